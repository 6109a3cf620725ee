"""The audit of a tree's books: every counter against a recount. Changes nothing."""

from __future__ import annotations

from sidequest_langchain.errors import CacheCorrupted
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
    heads = [(id(s.parent), s.token_ids[0]) for s in seen if s.n_rows and not s.is_open]
    _require(len(heads) == len(set(heads)), "a segment repeats a sibling's rows")
    for path in tree.paths.values():
        _require(path in path.tip.paths, f"path {path.serial} is not at its tip")
        _require(path.tip in seen, f"path {path.serial} ends outside of the tree")
    _require(sum(s.n_bytes for s in seen) == tree.n_bytes, "bytes do not add up")
    _require(sum(s.n_rows for s in seen) == tree.n_tokens, "tokens do not add up")


def _check_segment(segment: Segment) -> None:
    name = f"segment {segment.segment_id}"
    parent = segment.parent
    _require(segment.is_needed, f"{name} is kept for nobody")
    _require(parent is not None and segment in parent.children, f"{name} hangs loose")
    _require(parent is not None and segment.start == parent.end, f"{name} starts elsewhere")
    for tensor in (*segment.keys, *segment.values):
        _require(tensor.shape[1] == segment.capacity, f"{name}: layers differ in length")
        _require(tensor.is_contiguous() and not tensor.requires_grad, f"{name} is a view")
    _require(segment.n_rows <= segment.capacity, f"{name}: more tokens than rows")
    _require(segment.is_open or segment.capacity == segment.n_rows, f"{name} has slack")
    is_kept_empty = segment.is_open or segment.n_pins > 0
    _require(is_kept_empty or segment.n_rows > 0, f"{name} is empty")
    _require(all(p.tip is segment for p in segment.paths), f"{name} holds strange paths")


def _require(ok: bool, what: str) -> None:  # noqa: FBT001
    if not ok:
        msg = f"the segment tree's books do not balance: {what}; please report this"
        raise CacheCorrupted(msg)
