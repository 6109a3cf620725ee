"""Rows of requests and blocks of keys: what a step's plan is made of. It must not know a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.kv.parts import Part, RowsByHead
from sidequest_langchain.kv.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's share of the step: `n_new` tokens at the end of the path to `tip`."""

    tip: Segment
    n_new: int
    position: int
    """Position of the first of the new tokens."""
    is_stored: bool = True
    """False re-runs tokens that the path holds already, and stores nothing: the last one, or, with
    a `horizon` at `position`, any number of the last ones."""
    horizon: int | None = None
    """The row sees no stored row at this position or later, only its own new tokens, causally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one storage or part, and the decoding rows that attend to them."""

    rows: tuple[int, ...] | None
    """Indices among the decoding rows; `None` is all of them."""
    keys: Sequence[Tensor]
    """K of every layer, `[H, S, D]`; empty where `part` is to be loaded."""
    values: Sequence[Tensor]
    """V of every layer, `[H, S, Dv]`."""
    segment: Segment
    """Whose rows these are; without a watcher, others that follow it may be in the block too."""
    first: int
    """Which rows of the part, or of the segment."""
    last: int
    part: Part | None = None
    """Of a managed segment; `None` is every token's row."""
    low: int | None = None
    """Offset of the first token that is seen, where heads differ in rows; `None`: no need to ask"""
    high: int = 0
    """Offset after the last one."""
    is_in_place: bool = True
    """Whether `keys` and `values` are there and every row of them is seen."""

    @property
    def offsets(self) -> Sequence[int]:
        """Offsets in the segment of the rows. Has no meaning where heads differ in rows."""
        if self.part is None or self.part.offsets is None:
            return range(self.first, self.last)
        return self.part.offsets[self.first : self.last]

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """K `[H, S, D]` and V of one layer: views, or copies where the part has no plain rows."""
        if len(self.keys):
            return self.keys[layer], self.values[layer]
        assert self.part is not None
        return self.part.load(layer, self.first, self.last)

    def seen(self, layer: int, first: int, last: int, device: torch.device) -> Tensor | None:
        """Which rows `first..last` of the part a query may see, bool `[H, 1, S]`; `None`: all."""
        if self.low is None or not isinstance(self.part, RowsByHead):
            return None
        return self.part.seen(layer, self.low, self.high, device)[:, None, first:last]


def at_offsets(part: Part, first: int, last: int, device: torch.device) -> Tensor:
    """Offsets of some rows of a part whose heads have rows in common, long `[last - first]`."""
    if part.offsets is None:
        return torch.arange(first, last, device=device)
    return torch.tensor(part.offsets[first:last], dtype=torch.long, device=device)
