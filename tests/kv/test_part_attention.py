"""Attention over packed, hidden and by-head rows, what-ifs, horizons and who watches."""

from __future__ import annotations

import random

import pytest
import torch

from sidequest_langchain.kv import bunches, part_attention, parts, what_if
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.step_plan import Row, StepPlan
from sidequest_langchain.kv.tree_attention import attend
from tests.kv import attending
from tests.kv.attending import (
    BATCHES,
    WINDOWS,
    Fed,
    World,
    attend_layer,
    batch,
    densely,
    features_for,
    grow,
    run,
)
from tests.kv.growing import check_rows, ids, reachable_bytes, tokens_to
from tests.kv.masking import (
    Gone,
    GoneByHead,
    closed_of,
    manage_some,
    rows_with_packed,
    some_of,
)

EVEN = [(4, 2, 8, 8), (6, 2, 8, 8)]
"""Heads of layers that are alike but for their queries."""


@pytest.fixture(params=[512, 3], ids=["", "in pieces"])
def load_rows(request, monkeypatch):
    monkeypatch.setattr(parts, "LOAD_ROWS", request.param)
    monkeypatch.setattr(part_attention, "LOAD_ROWS", request.param)
    monkeypatch.setattr(bunches, "LOAD_ROWS", request.param)


@pytest.fixture
def even(monkeypatch):
    monkeypatch.setattr(attending, "HEADS", EVEN)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kinds", [BATCHES["mixed"], BATCHES["decode"]], ids=["mixed", "decode"])
def test_packed_and_hidden_rows(kinds, windows, softcap, has_sinks, load_rows):
    for seed in range(2):
        rng, world, gone = random.Random(seed), World(seed), Gone()
        grove, running = grow(world, rng, n_done=10)
        features_of = features_for(world, windows, softcap, has_sinks)
        oracle = {"unseen": gone.unseen, "rows": lambda f, at, w=world: rows_with_packed(w, f, at)}
        manage_some(rng, grove, gone)
        fed = batch(rng, grove, running, kinds)
        run(world, grove, fed, features_of, **oracle)
        for f in fed:
            grove.tree.commit(f.path)
        manage_some(rng, grove, gone)
        run(world, grove, batch(rng, grove, [], kinds), features_of, **oracle)
        assert grove.tree.n_bytes == reachable_bytes(grove.tree)


# -- by head -------------------------------------------------------------------------------


def keep_some(rng, segment, tree):
    """Random rows for each head of each layer, equally many."""
    n = rng.randint(0, segment.n_tokens)
    shape = tree.layout[0].n_kv_heads, len(tree.layout)
    chosen = [
        [sorted(rng.sample(range(segment.n_tokens), n)) for _ in range(shape[0])]
        for _ in range(shape[1])
    ]
    return torch.tensor(chosen, dtype=torch.long).view(shape[1], shape[0], n)


def keep_some_by_head(rng, grove, gone):
    for segment in closed_of(grove.tree):
        if segment.residency is None and rng.random() < 0.7:
            keep = keep_some(rng, segment, grove.tree)
            before = grove.tree.n_bytes
            assert grove.tree.evict_by_head(segment, keep) == before - grove.tree.n_bytes >= 0
            gone.take(segment, keep)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("windows", [(None,) * 2, (3, 16), (16, None)], ids=str)
@pytest.mark.parametrize("kinds", BATCHES.values(), ids=BATCHES)
def test_rows_by_head(even, kinds, windows, softcap, has_sinks):
    for seed in range(3):
        rng, world = random.Random(seed), World(seed)
        gone = GoneByHead(2, 2)
        grove, running = grow(world, rng, n_done=10)
        keep_some_by_head(rng, grove, gone)
        features_of = features_for(world, windows, softcap, has_sinks)
        fed = batch(rng, grove, running, kinds)
        run(world, grove, fed, features_of, unseen=gone.unseen)
        for f in fed:
            grove.tree.commit(f.path)
        keep_some_by_head(rng, grove, gone)
        run(world, grove, batch(rng, grove, [], kinds), features_of, unseen=gone.unseen)


def test_what_heads_may_not_keep(even):
    world = World(0)
    grove = world.grove()
    segment = grove.run("abcdef").tip
    evict, right = grove.tree.evict_by_head, torch.tensor([[[0, 1], [1, 2]], [[0, 5], [3, 4]]])
    for wrong, says in [
        (right[:1], r"long \[2, 2, n\]"),
        (right.int(), "long"),
        (right + 1, "offsets are 0 to 5, found 1 to 6"),
        (right.flip(-1), "ascend"),
    ]:
        with pytest.raises(ValueError, match=says):
            evict(segment, wrong)
    evict(segment, right)
    assert (segment.n_rows, segment.n_tokens) == (2, 6)
    for act in (grove.tree.evict, grove.tree.archive_rows):
        with pytest.raises(ValueError, match="rows of their own"):
            act(segment, [0])
    with pytest.raises(ValueError, match="rows of their own"):
        grove.tree.compress(segment, [0], 8)
    with pytest.raises(ValueError, match="not resident"):
        evict(segment, right.roll(1, 0))
    evict(segment, right[..., :1])
    check_rows(grove)
    with pytest.raises(ValueError, match="one number of KV heads"):
        attending_uneven().tree.evict_by_head(segment, right)


def attending_uneven():
    attending.HEADS = [(4, 2, 8, 8), (4, 1, 8, 8)]
    return World(0).grove()


# -- what if -------------------------------------------------------------------------------


def outputs(world, grove, fed, features_of, **options):
    plan = StepPlan([f.row(grove.tree) for f in fed], **options)
    n_layers = len(attending.HEADS)
    return [attend_layer(world, plan, fed, at, features_of(at)) for at in range(n_layers)]


def long_grove(world):
    """A trunk of several groups of rows, a cut, and three calls on it."""
    grove = world.grove()
    text = "".join(random.Random(1).choices("abcd", k=200))
    grove.run(text)
    grove.run(text[:150] + "xyz")
    fed = [Fed(grove.begin(text), "ab"), Fed(grove.begin(text + "q"), "q")]
    return grove, [*fed, Fed(grove.begin(text[:150]), text[149], is_stored=False)]


@pytest.mark.parametrize("windows", [(None,) * 3, (16, None, 100)], ids=str)
@pytest.mark.parametrize("is_managed", [False, True])
@pytest.mark.parametrize("act", ["evict", "int8", "int4", "both"])
def test_a_what_if_says_what_the_act_does(act, is_managed, windows, load_rows):
    world = World(3)
    grove, fed = long_grove(world)
    features_of = features_for(world, windows, None, True)
    segment = max(closed_of(grove.tree), key=lambda s: s.n_tokens)
    tree = grove.tree
    if is_managed:
        tree.evict(segment, range(5, 20))
        tree.compress(segment, range(30, 60), 8)
    gone, packed = [0, 1, 2, 40, 41, 149], [*range(25, 149)]
    overlay = None
    if act in ("evict", "both"):
        overlay = what_if.without(segment, gone)
    if act in ("int8", "int4", "both"):
        bits = 4 if act == "int4" else 8
        overlay = what_if.repacked(segment, packed, bits, (1,), parts=overlay)
    before, n_bytes = outputs(world, grove, fed, features_of), tree.n_bytes
    imagined = outputs(world, grove, fed, features_of, overlay={segment: overlay})
    for one, other in zip(before, outputs(world, grove, fed, features_of), strict=True):
        assert torch.equal(one, other), "the what-if changed something"
    assert tree.n_bytes == n_bytes
    if act in ("evict", "both"):
        tree.evict(segment, gone)
    if act in ("int8", "int4", "both"):
        tree.compress(segment, packed, bits, (1,))
    for one, other in zip(imagined, outputs(world, grove, fed, features_of), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert not all(map(torch.equal, imagined, before))


@pytest.mark.parametrize("windows", [(None,) * 2, (16, None)], ids=str)
def test_a_what_if_by_head(even, windows, load_rows):
    world = World(3)
    grove, fed = long_grove(world)
    features_of = features_for(world, windows, None, False)
    segment = max(closed_of(grove.tree), key=lambda s: s.n_tokens)
    for _ in range(2):
        keep = keep_some(random.Random(2), segment, grove.tree)
        if segment.kept_by_head is not None:
            keep = segment.kept_by_head[..., ::2].contiguous()
        overlay = {segment: what_if.kept_by_head(segment, keep)}
        imagined = outputs(world, grove, fed, features_of, overlay=overlay)
        grove.tree.evict_by_head(segment, keep)
        for one, other in zip(imagined, outputs(world, grove, fed, features_of), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="rows of their own"):
        what_if.without(segment, [0])


# -- canaries ------------------------------------------------------------------------------


@pytest.mark.parametrize("w", [1, 2, 7])
@pytest.mark.parametrize("is_stored", [False, True], ids=["", "scratch"])
@pytest.mark.parametrize("windows", [(None,) * 3, (3, 5, 16)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_last_tokens_of_a_path_are_run_again(seed, windows, is_stored, w):
    rng, world, gone = random.Random(seed), World(seed), Gone()
    grove, running = grow(world, rng, n_done=8)
    manage_some(rng, grove, gone)
    tree = grove.tree
    features_of = features_for(world, windows, None, True)
    paths = [p for p in tree.paths.values() if p.tip.end > w]
    paths = [*rng.sample(paths, min(3, len(paths))), *(p for p in running if p.tip.end > w)]
    rows, n_bytes = [], tree.n_bytes
    for path in paths:
        position = path.tip.end - w
        tip = tree.scratch(path.tip, position, w) if is_stored else path.tip
        rows.append(Row(tip=tip, n_new=w, position=position, is_stored=is_stored, horizon=position))
    assert (tree.n_bytes > n_bytes) == is_stored
    check_integrity(tree)
    plan = StepPlan(rows)
    for layer in range(3):
        q, k, v = (
            torch.cat(t, 1)
            for t in zip(
                *(world.qkv(tokens_to(p.tip), p.tip.end - w, layer) for p in paths), strict=True
            )
        )
        out = attend(plan, layer, q, k, v, features_of(layer))
        for n, path in enumerate(paths):
            tokens = tokens_to(path.tip)
            fed = Fed(path, "", is_stored=False)
            held = {s.start + at for s in path.tip.path() for at in s.hidden}
            unseen = {at for at in {*gone.unseen(fed), *held} if at < len(tokens) - w}
            unseen |= {at for at in away(path) if at < len(tokens) - w}
            given = rows_with_packed(world, fed, layer)
            for true, packed in zip(world.rows_of(tokens, 0, layer), given, strict=True):
                packed[:, -w:] = true[:, -w:]
            wanted = densely(world, tokens, w, layer, features_of(layer), unseen, given)
            mine = out[n * w : (n + 1) * w].double()
            torch.testing.assert_close(mine, wanted, atol=2e-5, rtol=2e-5)
    for scratch in list(tree.scratches):
        tree.discard_scratch(scratch)
    assert tree.n_bytes == n_bytes
    check_integrity(tree)
    check_rows(grove)


def away(path):
    """Positions on a path whose rows are not resident."""
    found = set()
    for segment in path.tip.path():
        if segment.residency is not None:
            held = {*segment.residency.dense, *(a for b in segment.packed for a in b.offsets)}
            found |= {segment.start + at for at in range(segment.n_tokens) if at not in held}
    return found


def test_a_horizon_that_hides_what_the_tip_holds_is_refused():
    world = World(0)
    grove = world.grove()
    path = grove.begin("ab")
    grove.feed(path, "ab")
    with pytest.raises(ValueError, match="horizon 1 hides"):
        StepPlan([Row(tip=path.tip, n_new=1, position=2, horizon=1)])


# -- watching ------------------------------------------------------------------------------


class Watch:
    """Keeps what it is told."""

    def __init__(self, *layers):
        self.layers = frozenset(layers)
        self.told = []

    def decoded(self, plan, layer, seen):
        self.told.append((layer, seen))

    def prefilled(self, plan, layer, seen):
        self.told.append((layer, seen))


def masses(world, f, layer, features, gone):
    """Attention of the last token fed, summed by position, `[Hq, T]`; sinks take their share."""
    tokens = f.tokens
    q, k, _ = (t.double() for t in world.qkv(tokens, 0, layer))
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = torch.einsum("hd,hsd->hs", q[:, -1], k) * features.scaling
    if features.softcap is not None:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    last = len(tokens) - 1
    blind = set() if features.window is None else set(range(last - features.window + 1))
    scores[:, [at for at in (blind | set(gone.unseen(f))) if at < last]] = float("-inf")
    if features.sinks is not None:
        scores = torch.cat([scores, features.sinks.double()[:, None]], 1)
    return scores.softmax(-1)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kinds", BATCHES.values(), ids=BATCHES)
def test_a_watcher_gets_exact_masses_and_changes_nothing(kinds, window, has_sinks):
    for seed in range(3):
        rng, world, gone = random.Random(seed), World(seed), Gone()
        grove, running = grow(world, rng, n_done=12)
        for segment in closed_of(grove.tree):
            if rng.random() < 0.4:
                offsets = some_of(rng, segment)
                grove.tree.evict(segment, offsets)
                gone.take(segment, offsets)
        fed = batch(rng, grove, running, kinds)
        features_of = features_for(world, (window,) * 3, 2.0, has_sinks)
        plain = outputs(world, grove, fed, features_of)
        watch = Watch(0, 2)
        watched = outputs(world, grove, fed, features_of, watcher=watch)
        for one, other in zip(plain, watched, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
        plan = StepPlan([f.row(grove.tree) for f in fed], watcher=watch)
        n_told = len(plan.prefilling) + bool(plan.decoding)
        assert [layer for layer, _ in watch.told] == [0] * n_told + [2] * n_told
        for layer, seen in watch.told:
            found = by_segment(plan, layer, seen, attending.HEADS[layer])
            for i, shares in found.items():
                wanted = masses(world, fed[i], layer, features_of(layer), gone)
                assert shares
                for segment, share in shares.items():
                    part = wanted[:, segment.start : segment.end]
                    if segment is plan.rows[i].tip:
                        part = wanted[:, segment.start : len(fed[i].tokens)]
                    torch.testing.assert_close(share, part.sum(1), atol=1e-5, rtol=1e-5)


def by_segment(plan, layer, seen, heads):
    """Of each row: segment to the share of the last query's attention, `[Hq]`."""
    n_heads, n_kv = heads[:2]
    found = {}
    if hasattr(seen, "own_lse"):
        shares = found[seen.row] = {}
        for segment, lse in zip(seen.segments, seen.lses, strict=True):
            shares[segment] = (lse - seen.total).exp()[:, -1].double()
        own = (seen.own_lse - seen.total).exp()[:, -1].double()
        row = plan.rows[seen.row]
        of = next((s for s in plan.lineage(seen.row) if s.start <= row.position < s.end), row.tip)
        shares[of] = shares.get(of, 0) + own
        total = sum(shares.values())
        if seen.features.sinks is None:
            torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=1e-5)
        return found
    for block, lse in zip(seen.blocks, seen.lses, strict=True):
        rows = range(len(plan.decoding)) if block.rows is None else block.rows
        lse = lse.view(n_kv, n_heads // n_kv, len(rows)).reshape(n_heads, len(rows))
        for column, j in enumerate(rows):
            shares = found.setdefault(plan.decoding[j], {})
            share = (lse[:, column] - seen.total[:, j]).exp().double()
            shares[block.segment] = shares.get(block.segment, 0) + share
    return found


def test_blocks_name_the_offsets_of_their_rows():
    world = World(0)
    grove = world.grove()
    segment = grove.run("abcdefgh").tip
    grove.tree.evict(segment, [1, 2])
    path = grove.begin("abcdefghx")
    grove.tree.reserve(path, 1)
    plan = StepPlan([Row(tip=path.tip, n_new=1, position=8)], watcher=Watch(0))
    of = {b.segment: (list(b.offsets), b.load(0)[0].shape[1]) for b in plan.blocks(6)}
    assert of == {segment: ([3, 4, 5, 6, 7], 5), path.tip: ([0], 1)}
    assert ids("x") == [ord("x")]
