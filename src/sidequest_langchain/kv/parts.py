"""Rows of one segment at one precision, as attention reads them.

A segment that nobody manages is one part, and is read without this. It must not know a query.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sidequest_langchain.kv.residency import rows_at
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage

LOAD_ROWS = 512
"""Rows of a part that are made readable at once, so that no full copy of a segment exists."""


class Part(Protocol):
    """Rows of a segment at one precision."""

    @property
    def n_rows(self) -> int:
        """How many."""
        ...

    @property
    def offsets(self) -> Sequence[int] | None:
        """Their offsets in the segment, ascending; `None` is `0..n_rows - 1`."""
        ...

    def load(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """K `[H, last - first, D]` and V of rows `first..last` of a layer, as attention takes."""
        ...


class StoredRows:
    """Rows as they lie in a storage, one after another: read in place."""

    __slots__ = ("first", "n_rows", "offsets", "storage")

    def __init__(
        self, storage: Storage, first: int, n_rows: int, offsets: Sequence[int] | None
    ) -> None:
        self.storage, self.first = storage, first
        self.n_rows, self.offsets = n_rows, offsets

    def load(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Views of the storage."""
        return self.storage.layer(layer, self.first + first, self.first + last)


class ChosenRows:
    """Some rows of another part: copied out as they are read."""

    __slots__ = ("_part", "_pieces", "_rows", "bits", "n_rows", "offsets")

    def __init__(self, part: Part, rows: Sequence[int]) -> None:
        self._part, self._rows = part, rows
        self._pieces: dict[tuple[int, int], list[tuple[int, int, Tensor | None]]] = {}
        self.n_rows = len(rows)
        self.bits = bits_of(part)
        self.offsets: Sequence[int] = (
            rows if part.offsets is None else [part.offsets[row] for row in rows]
        )

    def load(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Copies of the rows, read from the part in pieces of at most `LOAD_ROWS` rows."""
        if (first, last) not in self._pieces:  # alike in all layers
            self._pieces[first, last] = list(self._cut(self._rows[first:last]))
        found = []
        for begin, end, chosen in self._pieces[first, last]:
            k, v = self._part.load(layer, begin, end)
            if chosen is not None:
                there = chosen.to(k.device)
                k, v = k.index_select(1, there), v.index_select(1, there)
            found.append((k, v))
        if len(found) == 1:
            return found[0]
        if not found:
            return self._part.load(layer, 0, 0)
        return torch.cat([k for k, _ in found], 1), torch.cat([v for _, v in found], 1)

    @staticmethod
    def _cut(rows: Sequence[int]) -> Iterator[tuple[int, int, Tensor | None]]:
        """Rows of the part to load at once, and which of these are chosen; `None` is all."""
        at = 0
        while at < len(rows):
            first = rows[at]
            n = bisect_left(rows, first + LOAD_ROWS, at) - at
            last = rows[at + n - 1] + 1
            chosen = [row - first for row in rows[at : at + n]] if n < last - first else None
            yield first, last, None if chosen is None else torch.tensor(chosen)
            at += n


class RowsByHead:
    """Rows of a storage of which each head of each layer has tokens of its own."""

    __slots__ = (
        "_hidden",
        "first",
        "is_masked",
        "keep",
        "n_rows",
        "n_tokens",
        "offsets",
        "rows",
        "storage",
    )

    def __init__(
        self,
        storage: Storage,
        first: int,
        keep: Tensor,
        n_tokens: int,
        hidden: frozenset[int] = frozenset(),
        rows: Tensor | None = None,
    ) -> None:
        self.storage, self.first = storage, first
        self.keep, self.n_tokens = keep, n_tokens
        self.rows = rows
        """Where in the storage the rows are, `[L, H, n]`; `None`: from `first` on."""
        self._hidden = sorted(hidden)
        self.n_rows = int(keep.shape[2])
        self.offsets: Sequence[int] | None = None
        """Has no meaning here: `keep` says it by head."""
        self.is_masked = bool(hidden) or bool((keep == n_tokens).any())
        """Whether some rows are hidden or padding."""

    def load(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Views of the storage; copies where the rows are not in a row."""
        if self.rows is None:
            return self.storage.layer(layer, self.first + first, self.first + last)
        k, v = self.storage.layer(layer, 0, self.storage.capacity)
        rows = self.rows[layer, :, first:last].to(k.device).unsqueeze(-1)
        return (
            k.gather(1, rows.expand(-1, -1, k.shape[2])),
            v.gather(1, rows.expand(-1, -1, v.shape[2])),
        )

    def seen(self, layer: int, low: int, high: int, device: torch.device) -> Tensor:
        """Which rows hold a token at `low <= offset < high` that is not hidden, bool `[H, n]`."""
        keep = self.keep[layer].to(device)
        seen = (keep >= low) & (keep < min(high, self.n_tokens))
        if self._hidden:
            hidden = torch.tensor(self._hidden, dtype=keep.dtype, device=device)
            seen &= ~torch.isin(keep, hidden)
        return seen


def bits_of(part: Part) -> int | None:
    """Bits to which the rows of a part are packed; `None` is full precision."""
    bits: int | None = getattr(part, "bits", None)
    return bits


def parts_of(segment: Segment) -> list[Part]:
    """The parts of a segment's rows that attention sees."""
    managed = segment.residency
    first, last = segment.place
    if managed is None:
        return [StoredRows(segment.storage, first, last - first, None)]
    if managed.kept_by_head is not None:
        keep = managed.kept_by_head
        return [RowsByHead(segment.storage, first, keep, segment.n_tokens, managed.hidden)]
    stored = StoredRows(segment.storage, first, last - first, managed.kept)
    parts: list[Part] = [stored, *managed.packed]
    return [visible for part in parts if (visible := _unhidden(part, managed.hidden)) is not None]


def without_offsets(part: Part, gone: frozenset[int]) -> Part | None:
    """A part without some rows; `None` if none is left, itself if none goes."""
    offsets = range(part.n_rows) if part.offsets is None else part.offsets
    if gone.isdisjoint(offsets):
        return part if part.n_rows else None
    left = rows_at(offsets, set(offsets) - gone)
    return ChosenRows(part, left) if left else None


def _unhidden(part: Part, hidden: frozenset[int]) -> Part | None:
    if not hidden:
        return part if part.n_rows else None
    return without_offsets(part, hidden)
