"""The audit of a tree's books: every counter against a recount. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from sidequest_langchain.errors import CacheCorrupted
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree


def check_integrity(tree: SegmentTree) -> None:
    """Compare every counter of the tree with a recount.

    Raises:
        CacheCorrupted: A segment's rows, capacity, position or links, a path's tip, or a total
            does not agree.
    """
    seen: set[Segment] = set()
    for segment in tree.segments():
        seen.add(segment)
        _check_segment(segment)
        known = all(tree.paths.get(p.serial) is p for p in segment.paths)
        _require(known, f"segment {segment.segment_id} holds strange paths")
    heads = [(id(s.parent), s.token_ids[0]) for s in seen if s.n_tokens and not s.is_open]
    _require(len(heads) == len(set(heads)), "a segment repeats a sibling's rows")
    lost = [s.segment_id for s in seen if s.is_idle_leaf and s not in tree.idle]
    _require(not lost, f"no sweep would find the idle segments {lost}")
    for path in tree.paths.values():
        _require(path in path.tip.paths, f"path {path.serial} is not at its tip")
        _require(path.tip in seen, f"path {path.serial} ends outside of the tree")
    for segment in seen:
        _check_fellows(segment, seen)
    tensors = [
        t
        for s in (*seen, *tree.scratches)
        for t in (*s.storage.keys, *s.storage.values, *_packed_tensors(s))
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    storages.pop(0, None)  # those without a byte
    n_bytes = sum(storages.values()) + tree.n_promised_bytes
    _require(n_bytes == tree.n_bytes, "bytes do not add up")
    n_tokens = sum(s.n_resident for s in seen) + tree.n_promised_tokens
    _require(n_tokens == tree.n_tokens, "tokens do not add up")


def _check_segment(segment: Segment) -> None:
    name = f"segment {segment.segment_id}"
    parent = segment.parent
    _require(segment.is_needed, f"{name} is kept for nobody")
    _require(parent is not None and segment in parent.children, f"{name} hangs loose")
    _require(parent is not None and segment.start == parent.end, f"{name} starts elsewhere")
    is_even = segment.storage.lengths == {segment.storage.capacity}
    _require(is_even, f"{name}: layers differ in length")
    for tensor in (*segment.keys, *segment.values):
        is_own = tensor.is_contiguous() or bool(segment.fellows)
        _require(is_own and not tensor.requires_grad, f"{name} is a view")
    _require(segment.n_rows <= segment.capacity, f"{name}: more tokens than rows")
    # A sealed segment may keep the room it had to grow, until its path ends.
    is_full = segment.capacity == segment.n_rows
    _require(is_full or _is_run_on(segment), f"{name} has slack")
    is_kept_empty = segment.is_open or segment.n_pins > 0
    _require(is_kept_empty or segment.n_tokens > 0, f"{name} is empty")
    _require(all(p.tip is segment for p in segment.paths), f"{name} holds strange paths")
    _require(len(segment.kinds) == segment.n_tokens, f"{name} has kinds of other tokens")
    if segment.residency is not None:
        _check_residency(name, segment, segment.residency)


def _check_residency(name: str, segment: Segment, managed: Residency) -> None:
    """Every token's row is in one place at most, and every row is some token's."""
    tokens = range(segment.n_tokens)
    _require(not segment.is_open, f"{name} is open, yet managed")
    _require(managed.n_tokens == segment.n_tokens, f"{name}: rows of other tokens")
    _require(managed.or_none() is managed, f"{name} is managed for nothing")
    _require(managed.hidden <= set(tokens), f"{name} hides tokens that it has not")
    for copy in managed.archived:
        is_right = _is_ascending(copy.offsets, tokens) and len(copy.offsets) == len(copy.rows)
        _require(is_right and bool(copy.offsets), f"{name}: copies of strange rows")
    if managed.kept_by_head is not None:
        keep = managed.kept_by_head
        is_real = keep < segment.n_tokens
        ascends = (keep[..., 1:] > keep[..., :-1]) | ~is_real[..., 1:]
        is_right = bool(ascends.all()) and managed.kept is None and not managed.packed
        _require(is_right and bool((keep >= 0).all()), f"{name}: heads keep strange rows")
        return
    places = [managed.dense, *(block.offsets for block in managed.packed)]
    _require(all(_is_ascending(place, tokens) for place in places), f"{name}: rows out of order")
    everywhere = [at for place in places for at in place]
    _require(len(everywhere) == len(set(everywhere)), f"{name}: a row is in two places")
    _require(all(block.n_rows for block in managed.packed), f"{name} has an empty block")
    _require(not (managed.packed and segment.fellows), f"{name} shares its storage, yet packed")


def _is_ascending(offsets: Sequence[int], tokens: range) -> bool:
    """Whether offsets are of those tokens and ascend."""
    is_within = not offsets or (offsets[0] in tokens and offsets[-1] in tokens)
    return is_within and all(a < b for a, b in pairwise(offsets))


def _packed_tensors(segment: Segment) -> list[Tensor]:
    blocks = (block.tensors() for block in segment.packed)
    return [t for tensors in blocks for name, t in tensors.items() if name != "header"]


def _is_run_on(segment: Segment) -> bool:
    """Whether a running path stands on a segment."""
    stack = [segment]
    while stack:
        at = stack.pop()
        if at.is_open:
            return True
        stack.extend(at.children)
    return False


def _check_fellows(segment: Segment, seen: set[Segment]) -> None:
    """A storage of several: each has its own rows, and they are in the order of these."""
    name, at = f"segment {segment.segment_id}", 0
    for fellow in segment.fellows:
        first, last = fellow.place
        is_right = fellow in seen and fellow.storage is segment.storage and first >= at
        _require(is_right and not fellow.is_open, f"{name} shares its storage wrongly")
        at = last
    is_in = segment in segment.fellows or not segment.fellows
    _require(is_in and at <= segment.storage.capacity, f"{name} shares its storage wrongly")


def _require(ok: bool, what: str) -> None:  # noqa: FBT001
    if not ok:
        msg = f"the segment tree's books do not balance: {what}; please report this"
        raise CacheCorrupted(msg)
