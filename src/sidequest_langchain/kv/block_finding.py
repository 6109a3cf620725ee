"""Which rows of which storage or part a step's decoding rows see: each distinct block once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from torch import Tensor

from sidequest_langchain.kv.blocks import Block, Row
from sidequest_langchain.kv.parts import Part, RowsByHead, StoredRows
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage

Seen = tuple[Segment, int, int, int]
"""Rows of a storage: of which segment, where in the storage its rows begin, and which of these."""


class _Span:
    """Rows of a storage that the same decoding rows see, while more of them are looked for."""

    __slots__ = ("first", "last", "own", "rows", "segment", "storage")

    def __init__(
        self, storage: Storage, first: int, rows: tuple[int, ...], segment: Segment
    ) -> None:
        self.storage = storage
        self.first = self.last = first
        self.rows = rows
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
    plain: dict[Seen, list[int]] = {}
    managed: dict[tuple[Segment, int, int, int, int | None, int], list[int]] = {}
    for j, (row, lineage) in enumerate(decoding):
        oldest = 0 if window is None else row.position - window + 1
        horizon = row.horizon
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
                    plain.setdefault((segment, segment.place[0], first, last), []).append(j)
                continue
            high = segment.n_tokens if horizon is None else horizon - segment.start
            for n, part in enumerate(parts):
                found = rows_seen(part, low, high)
                if found is not None and is_merged and isinstance(part, StoredRows):
                    plain.setdefault((segment, part.first, *found[:2]), []).append(j)
                elif found is not None:
                    managed.setdefault((segment, n, *found), []).append(j)
    blocks = [_block(span, len(decoding)) for span in _spans(plain, is_merged=is_merged)]
    for (segment, n, first, last, seen_from, high), members in managed.items():
        assert parts_of is not None
        part = (parts_of(segment) or ())[n]
        who = None if len(members) == len(decoding) else tuple(members)
        block = _of_part(segment, part, first, last, rows=who, seen=(seen_from, high))
        blocks.append(block)
    return tuple(blocks)


def blocks_behind(
    row: Row,
    lineage: Sequence[Segment],
    parts_of: Callable[[Segment], Sequence[Part] | None],
    window: int | None,
    limit: int | None,
) -> tuple[tuple[Block, ...], tuple[Segment, ...]]:
    """Find what a chunk of tokens sees of what came before it.

    Args:
        row: Whose chunk.
        lineage: Segments of its path.
        parts_of: How a segment is read; `None`: every token has its row in the storage.
        window: A token sees the last `window` positions; `None` is all.
        limit: Position from which on nothing stored is seen; `None` is never.

    Returns:
        Blocks of which all tokens of the chunk see every row, each for one "decoding row", and
        the segments of which some see a part only, or not every head sees the same.
    """
    plain: dict[Seen, list[int]] = {}
    blocks: list[Block] = []
    rest: list[Segment] = []
    for segment in lineage:
        high = segment.n_tokens if limit is None else limit - segment.start
        parts = parts_of(segment)
        if window is not None and row.position + row.n_new - window > segment.start:
            rest.append(segment)
        elif parts is None:
            last = min(segment.n_rows, high)
            if last > 0:
                plain[segment, segment.place[0], 0, last] = [0]
        else:
            seen = [(part, found) for part in parts if (found := rows_seen(part, 0, high))]
            if any(found[2] is not None for _, found in seen):
                rest.append(segment)
                continue
            for part, (first, last, _, _) in seen:
                if isinstance(part, StoredRows):
                    plain[segment, part.first, first, last] = [0]
                    continue
                blocks.append(_of_part(segment, part, first, last))
    spans = [_block(span, 1) for span in _spans(plain, is_merged=True)]
    return (*spans, *blocks), tuple(rest)


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
        return part.storage.kept_views(part.first + first, part.first + last)
    return None


def _spans(plain: dict[Seen, list[int]], *, is_merged: bool) -> list[_Span]:
    seen = list(plain.items())
    if is_merged:
        # Segments may lie in a storage in another order than on a path: attention asks for none.
        order = {id(s.storage): n for n, ((s, *_), _) in reversed(list(enumerate(seen)))}
        seen.sort(key=lambda one: (order[id(one[0][0].storage)], one[0][1] + one[0][2]))
    ends: dict[tuple[int, int, tuple[int, ...]], _Span] = {}
    closed: list[_Span] = []
    for (segment, at, first, last), members in seen:
        who = tuple(members)
        # Rows that follow one another in one storage are one block for who sees both.
        span = ends.pop((id(segment.storage), at + first, who), None) if is_merged else None
        if span is None:
            span = _Span(segment.storage, at + first, who, segment)
            span.own = first
        span.last = at + last
        if is_merged:
            ends[id(segment.storage), span.last, who] = span
        else:
            closed.append(span)
    return [*closed, *ends.values()]


def _block(span: _Span, n_decoding: int) -> Block:
    keys, values = span.storage.kept_views(span.first, span.last)
    return Block(
        rows=None if len(span.rows) == n_decoding else span.rows,
        keys=keys,
        values=values,
        segment=span.segment,
        first=span.own,
        last=span.own + span.last - span.first,
    )


def _of_part(
    segment: Segment,
    part: Part,
    first: int,
    last: int,
    *,
    rows: tuple[int, ...] | None = None,
    seen: tuple[int | None, int] = (None, 0),
) -> Block:
    keys, values = in_place(part, first, last) or ((), ())
    return Block(
        rows=rows,
        keys=keys,
        values=values,
        segment=segment,
        first=first,
        last=last,
        part=part,
        low=seen[0],
        high=seen[1],
        is_in_place=bool(len(keys)) and seen[0] is None,
    )
