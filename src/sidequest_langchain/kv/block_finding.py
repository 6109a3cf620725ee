"""Which rows of which storage or part a step's decoding rows see: each distinct block once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from torch import Tensor

from sidequest_langchain.kv.blocks import Block, Row
from sidequest_langchain.kv.parts import Part, RowsByHead, StoredRows
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage


class _Span:
    """Rows of a storage that the same decoding rows see, while more of them are looked for."""

    __slots__ = ("first", "last", "own", "rows", "segment", "slot", "storage")

    def __init__(
        self, storage: Storage, first: int, rows: tuple[int, ...], slot: int, segment: Segment
    ) -> None:
        self.storage = storage
        self.first = self.last = first
        self.rows = rows
        self.slot = slot
        self.segment = segment
        self.own = 0
        """Row of the segment with which the span begins."""


def find_blocks(
    decoding: Sequence[tuple[Row, Sequence[Segment]]],
    parts_of: Callable[[Segment], Sequence[Part] | None] | None,
    window: int | None,
    *,
    is_merged: bool,
) -> tuple[Block, ...]:
    """Find what the decoding rows see.

    Args:
        decoding: The rows, each with the segments of its path.
        parts_of: How a segment is read; `None` says that none is managed.
        window: A token sees the last `window` positions; `None` is all.
        is_merged: Whether segments that follow one another in one storage are one block.
    """
    plain: dict[tuple[Segment, int, int], tuple[list[int], int]] = {}
    managed: dict[tuple[Segment, int, int, int, int | None, int], tuple[list[int], int]] = {}
    for j, (row, lineage) in enumerate(decoding):
        oldest = 0 if window is None else row.position - window + 1
        horizon = row.horizon
        slot = 0
        for segment in lineage:
            parts = None if parts_of is None else parts_of(segment)
            low = oldest - segment.start
            if parts is None:
                last = segment.n_rows
                if horizon is not None:
                    last = min(last, horizon - segment.start)
                if segment is row.tip and row.is_stored:
                    last = segment.n_rows + 1
                first = max(0, low)
                if first < last:
                    plain.setdefault((segment, first, last), ([], slot))[0].append(j)
                slot += 1
                continue
            high = segment.n_tokens if horizon is None else horizon - segment.start
            for n, part in enumerate(parts):
                found = rows_seen(part, low, high)
                if found is not None:
                    managed.setdefault((segment, n, *found), ([], slot))[0].append(j)
                slot += 1
    blocks = [_block(span, len(decoding)) for span in _spans(plain, is_merged=is_merged)]
    for (segment, n, first, last, seen_from, high), (members, slot) in managed.items():
        assert parts_of is not None
        part = (parts_of(segment) or ())[n]
        keys, values = in_place(part, first, last) or ((), ())
        blocks.append(
            Block(
                rows=None if len(members) == len(decoding) else tuple(members),
                slot=slot,
                keys=keys,
                values=values,
                segment=segment,
                first=first,
                last=last,
                part=part,
                low=seen_from,
                high=high,
                is_in_place=bool(len(keys)) and seen_from is None,
            )
        )
    return tuple(blocks)


def rows_seen(part: Part, low: int, high: int) -> tuple[int, int, int | None, int] | None:
    """Rows of a part with tokens at `low <= offset < high`; `None` if there are none.

    Returns:
        The first row and the one after the last; then, where heads differ in rows and some are
        not seen, the bounds again, else `None` and 0.
    """
    if isinstance(part, RowsByHead):
        if not part.n_rows or high <= 0 or low >= part.n_tokens:
            return None
        if low <= 0 and high >= part.n_tokens and not part.is_masked:
            return 0, part.n_rows, None, 0
        return 0, part.n_rows, max(low, 0), high
    if part.offsets is None:
        first, last = max(0, low), min(part.n_rows, high)
    else:
        first, last = bisect_left(part.offsets, low), bisect_left(part.offsets, high)
    return (first, last, None, 0) if first < last else None


def in_place(part: Part, first: int, last: int) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
    """K and V of every layer, as they lie in a storage; `None` if the part is to be loaded."""
    if isinstance(part, RowsByHead) and part.rows is not None:
        return None
    if isinstance(part, (StoredRows, RowsByHead)):
        return part.storage.views(part.first + first, part.first + last)
    return None


def _spans(
    plain: dict[tuple[Segment, int, int], tuple[list[int], int]], *, is_merged: bool
) -> list[_Span]:
    ends: dict[tuple[int, int, tuple[int, ...]], _Span] = {}
    closed: list[_Span] = []
    for (segment, first, last), (members, slot) in plain.items():
        who, at = tuple(members), segment.place[0]
        # Segments that follow one another in one storage are one block for who sees both.
        span = ends.pop((id(segment.storage), at + first, who), None) if is_merged else None
        if span is None:
            span = _Span(segment.storage, at + first, who, slot, segment)
            span.own = first
        span.last = at + last
        if is_merged:
            ends[id(segment.storage), span.last, who] = span
        else:
            closed.append(span)
    return [*closed, *ends.values()]


def _block(span: _Span, n_decoding: int) -> Block:
    keys, values = span.storage.views(span.first, span.last)
    return Block(
        rows=None if len(span.rows) == n_decoding else span.rows,
        slot=span.slot,
        keys=keys,
        values=values,
        segment=span.segment,
        first=span.own,
        last=span.own + span.last - span.first,
    )
