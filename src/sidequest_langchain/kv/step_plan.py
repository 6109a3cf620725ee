"""Who attends to what in one forward pass: the rows of a ragged batch over the tree.

Made once a step, read by every layer; it must not know a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.kv.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's share of the step: `n_new` tokens at the end of the path to `tip`."""

    tip: Segment
    n_new: int
    position: int
    """Position of the first of the new tokens."""
    is_stored: bool = True
    """False re-runs the last token of a prompt whose K/V is in the tree already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows `first..last` of a segment, and the decoding rows that attend to them."""

    segment: Segment
    first: int
    last: int
    rows: tuple[int, ...] | None
    """Indices among the decoding rows; `None` is all of them."""
    slot: int
    """Depth in the path: blocks of one slot are seen by different rows."""


class StepPlan:
    """The rows of one step, packed one after another into `n_tokens` tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self.slices: list[tuple[int, int]] = []
        n = 0
        for row in self.rows:
            self.slices.append((n, n + row.n_new))
            n += row.n_new
        self.n_tokens = n
        self.decoding = [i for i, row in enumerate(self.rows) if row.n_new == 1]
        self.prefilling = [i for i, row in enumerate(self.rows) if row.n_new > 1]
        self._lineages = [row.tip.path() for row in self.rows]
        self._blocks: dict[int | None, tuple[Block, ...]] = {}
        self._indices: dict[tuple[object, torch.device], Tensor] = {}
        self._masks: dict[tuple[int, int, int, torch.device], Tensor | None] = {}

    def positions(self) -> list[int]:
        """The position of every packed token."""
        return [row.position + i for row in self.rows for i in range(row.n_new)]

    def last_tokens(self) -> list[int]:
        """Index of every row's last packed token."""
        return [end - 1 for _, end in self.slices]

    def lineage(self, row: int) -> list[Segment]:
        """The segments on a row's path, first to tip."""
        return self._lineages[row]

    def decoding_tokens(self, device: torch.device) -> Tensor:
        """Indices of the decoding rows' tokens among the packed ones, `[R]`."""
        return self.index(("tokens",), [self.slices[i][0] for i in self.decoding], device)

    def index(self, key: object, values: Sequence[int], device: torch.device) -> Tensor:
        """An index tensor on `device`, made once a step."""
        found = self._indices.get((key, device))
        if found is None:
            found = torch.tensor(values, dtype=torch.long, device=device)
            self._indices[key, device] = found
        return found

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """What the decoding rows see, each distinct block once, through a sliding window."""
        found = self._blocks.get(window)
        if found is None:
            found = self._blocks[window] = self._find_blocks(window)
        return found

    def _find_blocks(self, window: int | None) -> tuple[Block, ...]:
        seen: dict[tuple[Segment, int, int], tuple[list[int], int]] = {}
        for j, i in enumerate(self.decoding):
            row = self.rows[i]
            oldest = 0 if window is None else row.position - window + 1
            for slot, segment in enumerate(self._lineages[i]):
                last = segment.n_rows + (1 if segment is row.tip and row.is_stored else 0)
                first = max(0, oldest - segment.start)
                if first < last:
                    seen.setdefault((segment, first, last), ([], slot))[0].append(j)
        n = len(self.decoding)
        return tuple(
            Block(
                segment=segment,
                first=first,
                last=last,
                rows=None if len(members) == n else tuple(members),
                slot=slot,
            )
            for (segment, first, last), (members, slot) in seen.items()
        )

    def visible(self, row: int, segment: Segment, window: int, device: torch.device) -> Tensor:
        """Which rows of an ancestor a prefilling row's tokens see, bool `[T, S]`."""
        key = (row, segment.segment_id, window, device)
        if key not in self._masks:
            start, n_new = self.rows[row].position, self.rows[row].n_new
            queries = torch.arange(start, start + n_new, device=device).unsqueeze(1)
            keys = torch.arange(segment.start, segment.end, device=device).unsqueeze(0)
            self._masks[key] = keys > queries - window
        found = self._masks[key]
        assert found is not None
        return found
