"""What tests of fusing share: paths of many segments, and what is resident of them by position."""

from __future__ import annotations

from sidequest_langchain.kv import chain
from sidequest_langchain.kv.packed import PackedBlock


def sealed(grove, *texts, call="", is_kept=True):
    """A running path whose segments have these texts, the resident ones aside."""
    path = grove.begin("".join(texts), call)
    for text in texts[path.n_reused and 1 :]:
        grove.feed(path, text)
        end = grove.tree.seal(path)
        if is_kept:  # else they may move into one storage
            own(grove, end)
    return path


def own(grove, segment):
    """Take a segment out of what `seal` joined."""
    if segment.fellows:
        chain.leave(segment, segment.storage.copy(*segment.place), segment.residency)


def line(path):
    return [text(s) for s in path.tip.path()]


def text(segment):
    return "".join(map(chr, segment.token_ids))


def held(path, n_layers):
    """Every resident row by position: its precision, whether it is seen, and its numbers."""
    found = {}
    for segment in path.tip.path():
        managed = segment.residency
        dense = range(segment.n_rows) if managed is None else managed.dense
        places = [(None, dense, [segment.storage.views(*segment.place)])]
        places += [(b.bits, b.offsets, b) for b in segment.packed]
        for bits, offsets, rows in places:
            loads = [
                rows.load(layer)
                if isinstance(rows, PackedBlock)
                else (rows[0][0][layer], rows[0][1][layer])
                for layer in range(n_layers)
            ]
            for row, at in enumerate(offsets):
                numbers = [t[:, row].flatten().tolist() for pair in loads for t in pair]
                is_seen = at not in segment.hidden
                assert found.setdefault(segment.start + at, (bits, is_seen, numbers))
    return found


def shaken(rng, grove, path):
    """Evict, pack, hide and copy some rows of every closed segment of a path."""
    tree = grove.tree
    for segment in path.tip.path():
        if segment.is_open:
            continue
        some = [[at for at in range(segment.n_tokens) if rng.random() < 0.4] for _ in range(5)]
        acts = [
            lambda s, at: tree.evict(s, at),
            lambda s, at: tree.compress(s, at, 8, rng.choice([(), (), (1,)])),
            lambda s, at: tree.compress(s, at, 4),
            lambda s, at: tree.hide(s, at[:2]),
            lambda s, at: tree.archive is not None and tree.archive_rows(s, at),
        ]
        for act, at in zip(rng.sample(acts, rng.randint(0, 5)), some, strict=False):
            act(segment, at)
