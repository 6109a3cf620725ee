"""Who attends to what in one forward pass: the rows of a ragged batch over the tree.

Made once a step, read by every layer; it must not know a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sidequest_langchain.kv.block_finding import blocks_behind, find_blocks
from sidequest_langchain.kv.blocks import Block, Row
from sidequest_langchain.kv.bunches import Bunch, Reads, reads_of
from sidequest_langchain.kv.parts import Part, RowsByHead, parts_of
from sidequest_langchain.kv.residency import is_in_all_heads
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.watching import Decoded, Prefilled

__all__ = ["Block", "Row", "StepPlan", "Watcher", "on_device"]


class Watcher(Protocol):
    """Told by attention, in the middle of a step: it should be quick, and must change nothing."""

    @property
    def layers(self) -> frozenset[int]:
        """Only these are reported."""
        ...

    def decoded(self, plan: StepPlan, layer: int, seen: Decoded) -> None:
        """The decoding rows attended in a layer."""
        ...

    def prefilled(self, plan: StepPlan, layer: int, seen: Prefilled) -> None:
        """A chunk attended in a layer."""
        ...


class StepPlan:
    """The rows of one step, packed one after another into `n_tokens` tokens."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        watcher: Watcher | None = None,
        overlay: Mapping[Segment, Sequence[Part]] | None = None,
    ) -> None:
        """Plan a step.

        Args:
            rows: Who computes what.
            watcher: Told of what attention sees.
            overlay: Parts to read instead of a segment's own: a what-if, nothing is changed.

        Raises:
            ValueError: A row's horizon hides what the same row has stored.
        """
        self.rows = tuple(rows)
        self.watcher = watcher
        self.slices: list[tuple[int, int]] = []
        n = 0
        for row in self.rows:
            self.slices.append((n, n + row.n_new))
            n += row.n_new
        self.n_tokens = n
        self.sizes = [row.n_new for row in self.rows]
        """Tokens of every row."""
        self._lineages = [row.tip.path() for row in self.rows]
        self._parts: dict[Segment, Sequence[Part] | None] = dict(overlay or ())
        self._has_overlay = bool(overlay)
        self.decoding = [i for i, row in enumerate(self.rows) if row.n_new == 1]
        self.prefilling = [i for i, row in enumerate(self.rows) if row.n_new > 1]
        self.stored = [i for i, row in enumerate(self.rows) if row.is_stored]
        if len(self.stored) < len(self.rows) or any(row.horizon is not None for row in self.rows):
            self._look_at_own_rows()
        self._reads: dict[tuple[int | None, bool], Reads] = {}
        self._behind: dict[tuple[int, int | None], tuple[Reads, tuple[Segment, ...]]] = {}
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

    def parts(self, segment: Segment) -> Sequence[Part] | None:
        """How a segment is read; `None`: every token has its row in the storage."""
        if segment.residency is None and not self._has_overlay:
            return None
        if segment not in self._parts:
            managed = segment.residency
            is_whole = managed is None or managed.is_whole
            self._parts[segment] = None if is_whole else parts_of(segment)
        return self._parts[segment]

    def limit(self, row: int) -> int | None:
        """The position at which a prefilling row's sight of stored rows ends; `None` is never."""
        this = self.rows[row]
        return this.horizon if this.is_stored or this.horizon is not None else this.position

    def _look_at_own_rows(self) -> None:
        """A row that is re-run and cannot see itself in the tree is a chunk of one token."""
        for row in self.rows:
            hides = row.horizon is not None and row.is_stored and row.tip.n_tokens
            if hides and row.tip.end > (row.horizon or 0):
                msg = f"the horizon {row.horizon} hides tokens that the row's own tip holds"
                raise ValueError(msg)
        blind = {
            i for i in self.decoding if not self.rows[i].is_stored and not self._sees_itself(i)
        }
        if blind:
            self.decoding = [i for i in self.decoding if i not in blind]
            self.prefilling = sorted({*self.prefilling, *blind})

    def _sees_itself(self, i: int) -> bool:
        row = self.rows[i]
        if row.horizon is not None and row.horizon <= row.position:
            return False
        for segment in reversed(self._lineages[i]):
            if segment.start <= row.position < segment.end:
                parts = self.parts(segment)
                return parts is None or any(_has(p, row.position - segment.start) for p in parts)
        return False

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
        """What the decoding rows see, each distinct block once, through a sliding window.

        With a watcher each is of one segment; else segments in a row in one storage are one block.
        """
        return self.reads(window, is_watched=self.watcher is not None).blocks

    def reads(self, window: int | None, *, is_watched: bool) -> Reads:
        """The same, as it is read in layers that are watched, or not."""
        found = self._reads.get((window, is_watched))
        if found is None:
            blocks = self._find_blocks(window, is_merged=not is_watched)
            found = self._reads[window, is_watched] = reads_of(blocks)
        return found

    def behind(self, row: int, window: int | None) -> tuple[Reads, tuple[Segment, ...]]:
        """What a prefilling row's tokens all see, and segments that some of them see in part."""
        found = self._behind.get((row, window))
        if found is None:
            lineage, limit = self._lineages[row], self.limit(row)
            blocks, rest = blocks_behind(self.rows[row], lineage, self.parts, window, limit)
            found = self._behind[row, window] = reads_of(blocks), rest
        return found

    def has_single(self, calls: Sequence[Block | Bunch]) -> bool:
        """Whether something is seen by one row of several."""
        return any(call.rows is not None and len(call.rows) == 1 for call in calls)

    def places(
        self, window: int | None, n_group: int, device: torch.device, *, is_watched: bool
    ) -> tuple[Tensor, Tensor]:
        """Where a decoding row's parts lie when those of all calls stand side by side.

        A call for `r` rows has `G * r` parts for a KV head, those of one query head together.

        Returns:
            For every slot, query head of a group and decoding row the place of its part,
            `[slots * G * R]`, and 0, or -inf where it has none, fp32 `[slots, G * R]`.
        """
        key = ("places", window, n_group, is_watched)
        if (key, device) not in self._masks:
            reads, n = self.reads(window, is_watched=is_watched), len(self.decoding)
            slots = reads.slots(n)
            n_slots = 1 + max(slots)
            found: list[int | None] = [None] * (n_slots * n_group * n)
            at = 0
            for call, slot in zip(reads.calls, slots, strict=True):
                rows = range(n) if call.rows is None else call.rows
                for head in range(n_group):
                    first = (slot * n_group + head) * n
                    for row in rows:
                        found[first + row] = at
                        at += 1
            holes = [0.0 if place is not None else float("-inf") for place in found]
            self._masks[key, device] = on_device(device, torch.tensor(holes).view(n_slots, -1))
            self.index(key, [place or 0 for place in found], device)
        return self._indices[key, device], self._masks[key, device]

    def _find_blocks(self, window: int | None, *, is_merged: bool) -> tuple[Block, ...]:
        decoding = [(self.rows[i], self._lineages[i]) for i in self.decoding]
        is_plain = not self._has_overlay and all(
            segment.residency is None for _, lineage in decoding for segment in lineage
        )
        parts_of = None if is_plain else self.parts
        return find_blocks(decoding, parts_of, window, is_merged=is_merged)

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


def _has(part: Part, offset: int) -> bool:
    """Whether a query sees the row of a token in a part, in all of its heads."""
    if isinstance(part, RowsByHead):
        return not part.is_masked and is_in_all_heads(part.keep, offset)
    return offset < part.n_rows if part.offsets is None else offset in part.offsets


def on_device(device: torch.device, tensor: Tensor) -> Tensor:
    """A host tensor on `device`; the copy does not wait for what runs there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
