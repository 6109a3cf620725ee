"""Who attends to what in one forward pass: the rows of a ragged batch over the tree.

Made once a step, read by every layer; it must not know a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage


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
    """Rows of one storage, and the decoding rows that attend to them."""

    rows: tuple[int, ...] | None
    """Indices among the decoding rows; `None` is all of them."""
    slot: int
    """Depth in the path: blocks of one slot are seen by different rows."""
    keys: Sequence[Tensor]
    """K of every layer, `[H, S, D]`."""
    values: Sequence[Tensor]
    """V of every layer, `[H, S, Dv]`."""


class _Span:
    """Rows of a storage that the same decoding rows see, while a plan looks for more of them."""

    __slots__ = ("first", "last", "rows", "slot", "storage")

    def __init__(self, storage: Storage, first: int, rows: tuple[int, ...], slot: int) -> None:
        self.storage = storage
        self.first = self.last = first
        self.rows = rows
        self.slot = slot


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
        self.sizes = [row.n_new for row in self.rows]
        """Tokens of every row."""
        self.decoding = [i for i, row in enumerate(self.rows) if row.n_new == 1]
        self.prefilling = [i for i, row in enumerate(self.rows) if row.n_new > 1]
        self.stored = [i for i, row in enumerate(self.rows) if row.is_stored]
        self._lineages = [row.tip.path() for row in self.rows]
        self._blocks: dict[int | None, tuple[Block, ...]] = {}
        self._indices: dict[tuple[object, torch.device], Tensor] = {}
        self._masks: dict[tuple[object, torch.device], Tensor] = {}
        self._counted: dict[Segment, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}
        self._targets: list[list[Tensor]] | None = None

    def positions(self) -> list[int]:
        """The position of every packed token."""
        return [row.position + i for row in self.rows for i in range(row.n_new)]

    def last_tokens(self) -> list[int]:
        """Index of every row's last packed token."""
        return [end - 1 for _, end in self.slices]

    def lineage(self, row: int) -> list[Segment]:
        """The segments on a row's path, first to tip."""
        return self._lineages[row]

    def counted(self, segment: Segment) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """K and V of the rows that a segment had before this step, in every layer."""
        found = self._counted.get(segment)
        if found is None:
            found = self._counted[segment] = segment.rows(0, segment.n_rows)
        return found

    def targets(self, layer: int) -> list[Tensor]:
        """Where a layer's new K go, `[H, n_new, D]` for every stored row; then its new V."""
        if self._targets is None:
            rows = [self.rows[i] for i in self.stored]
            parts = [r.tip.rows(r.tip.n_rows, r.tip.n_rows + r.n_new) for r in rows]
            # One list a layer: the layers of K, and of V, turned from rows to columns.
            keys, values = zip(*(k for k, _ in parts)), zip(*(v for _, v in parts))  # noqa: B905
            self._targets = [[*k, *v] for k, v in zip(keys, values, strict=True)]
        return self._targets[layer]

    def decoding_tokens(self, device: torch.device) -> Tensor:
        """Indices of the decoding rows' tokens among the packed ones, `[R]`."""
        return self.index(("tokens",), [self.slices[i][0] for i in self.decoding], device)

    def index(self, key: object, values: Sequence[int], device: torch.device) -> Tensor:
        """An index tensor on `device`, made once a step."""
        found = self._indices.get((key, device))
        if found is None:
            found = on_device(device, torch.tensor(values, dtype=torch.long))
            self._indices[key, device] = found
        return found

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """What the decoding rows see, each distinct block once, through a sliding window."""
        found = self._blocks.get(window)
        if found is None:
            found = self._blocks[window] = self._find_blocks(window)
        return found

    def has_single(self, blocks: Sequence[Block]) -> bool:
        """Whether some block is seen by one row of several."""
        return any(block.rows is not None and len(block.rows) == 1 for block in blocks)

    def places(
        self, window: int | None, n_group: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Where a decoding row's parts lie when those of all blocks stand side by side.

        A block of `r` rows has `G * r` parts for a KV head, those of one query head together.

        Returns:
            For every slot, query head of a group and decoding row the place of its part,
            `[slots * G * R]`, and 0, or -inf where it has none, fp32 `[slots, G * R]`.
        """
        key = ("places", window, n_group)
        if (key, device) not in self._masks:
            blocks, n = self.blocks(window), len(self.decoding)
            n_slots = 1 + max(block.slot for block in blocks)
            found: list[int | None] = [None] * (n_slots * n_group * n)
            at = 0
            for block in blocks:
                rows = range(n) if block.rows is None else block.rows
                for head in range(n_group):
                    first = (block.slot * n_group + head) * n
                    for row in rows:
                        found[first + row] = at
                        at += 1
            holes = [0.0 if place is not None else float("-inf") for place in found]
            self._masks[key, device] = on_device(device, torch.tensor(holes).view(n_slots, -1))
            self.index(key, [place or 0 for place in found], device)
        return self._indices[key, device], self._masks[key, device]

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
        ends: dict[tuple[int, int, tuple[int, ...]], _Span] = {}
        for (segment, first, last), (members, slot) in seen.items():
            who, at = tuple(members), segment.place[0]
            # Segments that follow one another in one storage are one block for who sees both.
            span = ends.pop((id(segment.storage), at + first, who), None)
            if span is None:
                span = _Span(segment.storage, at + first, who, slot)
            span.last = at + last
            ends[id(segment.storage), span.last, who] = span
        return tuple(self._block(span) for span in ends.values())

    def _block(self, span: _Span) -> Block:
        keys, values = span.storage.views(span.first, span.last)
        return Block(
            rows=None if len(span.rows) == len(self.decoding) else span.rows,
            slot=span.slot,
            keys=keys,
            values=values,
        )

    def band(self, row: int, window: int, device: torch.device) -> Tensor:
        """Which of its own tokens a prefilling row's tokens see, bool `[T, T]`."""
        key = ("band", self.rows[row].n_new, window)
        if (key, device) not in self._masks:
            order = torch.arange(self.rows[row].n_new, device=device)
            gap = order.unsqueeze(1) - order.unsqueeze(0)
            self._masks[key, device] = (gap >= 0) & (gap < window)
        return self._masks[key, device]

    def visible(self, row: int, segment: Segment, window: int, device: torch.device) -> Tensor:
        """Which rows of an ancestor a prefilling row's tokens see, bool `[T, S]`."""
        key = (row, segment.segment_id, window)
        if (key, device) not in self._masks:
            start, n_new = self.rows[row].position, self.rows[row].n_new
            queries = torch.arange(start, start + n_new, device=device).unsqueeze(1)
            keys = torch.arange(segment.start, segment.end, device=device).unsqueeze(0)
            self._masks[key, device] = keys > queries - window
        return self._masks[key, device]


def on_device(device: torch.device, tensor: Tensor) -> Tensor:
    """A host tensor on `device`; the copy does not wait for what runs there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
