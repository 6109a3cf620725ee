"""Parts of a segment as an act would leave them, made while they are read: nothing is changed.

For `StepPlan(overlay=...)`: what would the model say then? It must not know why one asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from sidequest_langchain.kv import by_head
from sidequest_langchain.kv.merged_rows import MergedRows, is_finer
from sidequest_langchain.kv.packed import GROUP, PackedBlock
from sidequest_langchain.kv.parts import Part, RowsByHead, parts_of, without_offsets
from sidequest_langchain.kv.segment import Segment


def without(
    segment: Segment, offsets: Iterable[int], parts: Sequence[Part] | None = None
) -> list[Part]:
    """A segment after `evict`.

    Args:
        segment: Which.
        offsets: Of the rows that would go.
        parts: What another what-if made of the segment; by default what it is.

    Raises:
        ValueError: The segment's heads keep rows of their own.
    """
    gone = frozenset(offsets)
    found = _parts(segment, parts)
    return [left for part in found if (left := without_offsets(part, gone)) is not None]


def repacked(
    segment: Segment,
    offsets: Iterable[int],
    bits: int,
    exempt: Collection[int] = (),
    parts: Sequence[Part] | None = None,
) -> list[Part]:
    """A segment after `compress`.

    Args:
        segment: Which.
        offsets: Of the rows that would be packed.
        bits: 8 or 4.
        exempt: Layers that would stay at full precision.
        parts: What another what-if made of the segment; by default what it is.

    Raises:
        ValueError: The segment's heads keep rows of their own.
    """
    found = _parts(segment, parts)
    finer = [part for part in found if is_finer(part, bits)]
    rows = MergedRows(finer, frozenset(offsets))
    if not rows.n_rows:
        return found
    return [*without(segment, rows.offsets, found), _RepackedRows(rows, bits, exempt)]


def kept_by_head(segment: Segment, keep: Tensor) -> list[Part]:
    """A segment after `evict_by_head`.

    Args:
        segment: Which.
        keep: Ascending offsets of what would stay, long `[L, H, n]`.

    Raises:
        ValueError: A row is not resident at full precision.
    """
    rows = by_head.rows_of_offsets(segment, keep)
    return [RowsByHead(segment.storage, 0, keep, segment.n_tokens, segment.hidden, rows)]


class _RepackedRows:
    """Rows that lose as much as packing would cost them, each time they are read."""

    __slots__ = ("_exempt", "_rows", "bits", "n_rows", "offsets")

    def __init__(self, rows: MergedRows, bits: int, exempt: Collection[int]) -> None:
        self._rows, self.bits, self._exempt = rows, bits, frozenset(exempt)
        self.n_rows, self.offsets = rows.n_rows, rows.offsets

    def load(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """K and V of rows `first..last` of a layer, packed and loaded again in whole groups."""
        if layer in self._exempt:
            return self._rows.load(layer, first, last)
        a, b = first // GROUP * GROUP, min(self.n_rows, -(-last // GROUP) * GROUP)
        k, v = self._rows.load(layer, a, b)
        block = PackedBlock.pack([k], [v], range(b - a), bits=self.bits)
        return block.load(0, first - a, last - a)


def _parts(segment: Segment, parts: Sequence[Part] | None) -> list[Part]:
    found = parts_of(segment) if parts is None else list(parts)
    if any(isinstance(part, RowsByHead) for part in found):
        msg = f"the heads of segment {segment.segment_id} keep rows of their own"
        raise ValueError(msg)
    return found
