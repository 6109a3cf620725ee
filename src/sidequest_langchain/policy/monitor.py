"""Attention as facts: what each token and segment was given, gathered while the model decodes.

The scores come from the pass that runs anyway: attention hands over its queries and log-sum-exps,
and the probabilities of a few sampled layers are formed again from them, `exp(q k - L)`, on the
steps that are looked at. It must not decide anything.

Papers: H2O, arXiv:2306.14048, §4 (accumulated scores); SnapKV, arXiv:2404.14469, §4 (the window
after a prefill); TOVA, arXiv:2401.06104, §3 (the last query); Hydragen, arXiv:2402.05099, §3 (the
log-sum-exp that yields the mass of a segment).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidequest_langchain.kv.blocks import Block, at_offsets
from sidequest_langchain.kv.parts import LOAD_ROWS, Part, RowsByHead, StoredRows
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.notes import HeadScores, Notebook, Notes

if TYPE_CHECKING:
    from sidequest_langchain.kv.features import Features
    from sidequest_langchain.kv.step_plan import StepPlan
    from sidequest_langchain.kv.watching import Decoded, Prefilled

WINDOW = 32
"""Last queries of a prefill chunk that are looked at (SnapKV's observation window)."""


@dataclass(slots=True)
class _Seen:
    """What the sampled layers of one step gave one segment."""

    total: Tensor
    """Sum of probabilities, mean over heads, over queries and layers, `[n]`."""
    last: Tensor
    """Those of the last query, `[n]`, summed over layers."""
    n_queries: Tensor
    """Queries that could see each token, `[n]`, summed over layers."""
    is_prefill: bool = False
    heads: dict[int, Tensor] = field(default_factory=dict)
    """By layer, mean over the query heads of each KV head, `[H, n]`, summed over queries."""


class Monitor:
    """Watches some layers of every step, and looks at single tokens on some steps.

    Mutates nothing but its own notes.
    """

    def __init__(
        self,
        layers: Collection[int],
        *,
        n_layers: int,
        decay: float = 0.9,
        window: int = WINDOW,
        is_by_head: bool = False,
    ) -> None:
        """Make a monitor.

        Args:
            layers: Which layers to sample.
            n_layers: Of the model.
            decay: Share of the moving average that the old value keeps at each look.
            window: Last queries of a prefill chunk to look at.
            is_by_head: Keep scores by layer and KV head too; samples all layers then.
        """
        self._layers = frozenset(range(n_layers) if is_by_head else layers)
        self._n_layers = n_layers
        self._decay = decay
        self._window = window
        self._is_by_head = is_by_head
        self.notebook = Notebook()
        self.is_looking = False
        """Whether single tokens are looked at in this step."""
        self.n_steps = 0
        self._seen: dict[Segment, _Seen] = {}
        self._masses: list[tuple[tuple[Block, ...], Tensor]] = []

    @property
    def layers(self) -> frozenset[int]:
        """The sampled layers."""
        return self._layers

    def begin(self, *, is_looking: bool) -> None:
        """Begin a step; what an unfinished one saw is dropped.

        Args:
            is_looking: Whether to form the probabilities of single tokens.
        """
        self.is_looking = is_looking
        self._seen.clear()
        self._masses.clear()

    # -- told by attention ---------------------------------------------------------------

    def decoded(self, plan: StepPlan, layer: int, seen: Decoded) -> None:
        """Note what the decoding rows attended to in a layer."""
        del plan
        n_group = seen.q.shape[0] // seen.lses[0].shape[0]
        grouped = seen.q.view(-1, n_group, *seen.q.shape[1:])
        total = seen.total.view(grouped.shape[:3])
        if not self._is_by_head or layer % 6 == 0:  # by head all layers are told: a few will do
            self._note_masses(seen, total)
        if not self.is_looking:
            return
        for block in seen.blocks:
            members = None if block.rows is None else torch.tensor(block.rows)
            q = grouped if members is None else grouped.index_select(2, members.to(total.device))
            lse = total if members is None else total.index_select(2, members.to(total.device))
            for first in range(block.first, block.last, LOAD_ROWS):
                last = min(first + LOAD_ROWS, block.last)
                keys, offsets = _keys(block, layer, first, last)
                p = _probabilities(q, keys, lse, seen.features)
                hidden = block.seen(layer, first, last)
                if hidden is not None:
                    p = p * hidden[:, None]
                self._add(block.segment, layer, offsets, p, n_tokens=block.high)

    def prefilled(self, plan: StepPlan, layer: int, seen: Prefilled) -> None:
        """Note what the last queries of a chunk attended to in a layer."""
        row = plan.rows[seen.row]
        n_new, w = row.n_new, min(self._window, row.n_new)
        tip = row.tip if row.is_stored else None
        _, chunk = plan.slices[seen.row]
        del chunk
        for segment, lse in zip(seen.segments, seen.lses, strict=True):
            mass = torch.exp(lse[:, -w:] - seen.total[:, -w:]).mean()
            self.notebook.of(segment).add_mass(mass)
        q = seen.q[:, -w:]
        position = row.position + n_new - w
        for segment in seen.segments:
            self._look_back(plan, layer, segment, (q, seen.total[:, -w:], position), seen.features)
        if tip is not None and seen.own_keys is not None:
            self._look_at_chunk(layer, tip, seen, w)

    def finish(self) -> None:
        """Fold what the step saw into the notes: the step went well."""
        self.n_steps += 1
        for blocks, masses in self._masses:
            for block, mass in zip(blocks, masses.unbind(), strict=True):
                self.notebook.of(block.segment).add_mass(mass)
        self._masses.clear()
        for segment, seen in self._seen.items():
            self.notebook.of(segment).fold(
                seen.total,
                seen.last,
                seen.n_queries,
                n_layers=len(self._layers),
                decay=self._decay,
                is_prefill=seen.is_prefill,
                heads=HeadScores(self._n_layers, seen.heads) if self._is_by_head else None,
            )
        self._seen.clear()

    def notes_of(self, segment: Segment) -> Notes:
        """What is known of a segment, however it was cut since."""
        return self.notebook.of(segment)

    # -- inside --------------------------------------------------------------------------

    def _note_masses(self, seen: Decoded, total: Tensor) -> None:
        """Each block's exact share of the attention, mean over heads and rows."""
        n_kv = total.shape[0]
        if all(block.rows is None for block in seen.blocks):
            shares = torch.stack(seen.lses).sub_(total.reshape(n_kv, -1)).exp_().mean((1, 2))
        else:
            parts = []
            for block, lse in zip(seen.blocks, seen.lses, strict=True):
                rows = total if block.rows is None else total[:, :, list(block.rows)]
                parts.append(torch.exp(lse - rows.reshape(n_kv, -1)).mean())
            shares = torch.stack(parts)
        self._masses.append((seen.blocks, shares))

    def _look_back(
        self,
        plan: StepPlan,
        layer: int,
        segment: Segment,
        queries: tuple[Tensor, Tensor, int],
        features: Features,
    ) -> None:
        """What the last queries of a chunk gave the rows of an ancestor."""
        q, total, position = queries
        parts = plan.parts(segment)
        if parts is None:
            first, _ = segment.place
            parts = [StoredRows(segment.storage, first, segment.n_rows, None)]
        for part in parts:
            for first in range(0, part.n_rows, LOAD_ROWS):
                last = min(first + LOAD_ROWS, part.n_rows)
                k, _ = part.load(layer, first, last)
                n_group = q.shape[0] // k.shape[0]
                grouped = q.view(-1, n_group, *q.shape[1:])
                p = _probabilities(grouped, k, total.view(grouped.shape[:3]), features)
                offsets = _offsets(part, layer, first, last, q.device)
                if features.window is not None:
                    at = torch.arange(position, position + q.shape[1], device=q.device)
                    gap = at.unsqueeze(1) - (segment.start + offsets.reshape(-1, last - first))[0]
                    p = p * (gap < features.window)
                if isinstance(part, RowsByHead):
                    p = p * part.seen(layer, 0, segment.n_tokens)[:, first:last][:, None, None]
                self._add(segment, layer, offsets, p, is_prefill=True)

    def _look_at_chunk(self, layer: int, tip: Segment, seen: Prefilled, w: int) -> None:
        """What the last queries of a chunk gave the chunk itself."""
        keys = seen.own_keys
        assert keys is not None
        n_new = keys.shape[1]
        n_group = seen.q.shape[0] // keys.shape[0]
        q = seen.q[:, -w:]
        grouped = q.view(-1, n_group, *q.shape[1:])
        p = _probabilities(grouped, keys, seen.total[:, -w:].view(grouped.shape[:3]), seen.features)
        device = q.device
        gap = torch.arange(n_new - w, n_new, device=device).unsqueeze(1) - torch.arange(
            n_new, device=device
        )
        visible = gap >= 0
        if seen.features.window is not None:
            visible &= gap < seen.features.window
        offsets = torch.arange(tip.n_tokens, tip.n_tokens + n_new, device=device)
        n_tokens = tip.n_tokens + n_new
        self._add(
            tip, layer, offsets, p * visible, n_tokens=n_tokens, is_prefill=True,
            n_queries=visible.sum(0).float(),
        )  # fmt: skip

    def _add(
        self,
        segment: Segment,
        layer: int,
        offsets: Tensor,
        p: Tensor,
        *,
        n_tokens: int = 0,
        is_prefill: bool = False,
        n_queries: Tensor | None = None,
    ) -> None:
        """Add probabilities `[H, G, r, S]` of the tokens at `offsets`, `[S]` or `[H, S]`."""
        n = max(n_tokens, segment.n_tokens)
        seen = self._seen.get(segment)
        if seen is None or len(seen.total) < n:
            seen = self._seen[segment] = _grown(seen, n, p.device)
        seen.is_prefill = is_prefill
        n_heads = p.shape[0] * p.shape[1]
        by_kv = p.mean(1)  # GQA: the mean over the query heads of a group
        counted = p.shape[2] if n_queries is None else n_queries
        if offsets.dim() == 1:
            summed = by_kv.sum(1)
            seen.total.index_add_(0, offsets, summed.mean(0))
            seen.last.index_add_(0, offsets, by_kv[:, -1].mean(0))
            seen.n_queries[offsets] += counted
            places = offsets.expand(p.shape[0], -1)
        else:
            summed = by_kv.sum(1)
            flat, share = offsets.reshape(-1), 1 / p.shape[0]
            keep = flat < n  # the padding of heads that keep fewer
            seen.total.index_add_(0, flat[keep], summed.reshape(-1)[keep] * share)
            seen.last.index_add_(0, flat[keep], by_kv[:, -1].reshape(-1)[keep] * share)
            seen.n_queries[flat[keep].unique()] += counted
            places = offsets.clamp(max=n - 1)
        del n_heads
        if self._is_by_head:
            heads = seen.heads.get(layer)
            if heads is None:
                heads = seen.heads[layer] = p.new_zeros(p.shape[0], n)
            heads.scatter_add_(1, places, summed)


def sampled_layers(wanted: int | Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Layers to look at: those given, or so many, evenly spread, neither first nor last.

    Args:
        wanted: Layers, or how many.
        n_layers: Of the model.
    """
    if not isinstance(wanted, int):
        return tuple(sorted({layer for layer in wanted if layer < n_layers}))
    n = max(1, min(wanted, n_layers))
    return tuple(sorted({int((i + 0.5) * n_layers / n) for i in range(n)}))


def _keys(block: Block, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """K `[H, S, D]` of some of a block's rows, and their offsets in the segment."""
    if block.part is None:
        keys = block.keys[layer][:, first - block.first : last - block.first]
        return keys, torch.arange(first, last, device=keys.device)
    if len(block.keys):
        keys = block.keys[layer][:, first - block.first : last - block.first]
    else:
        keys, _ = block.part.load(layer, first, last)
    return keys, _offsets(block.part, layer, first, last, keys.device)


def _offsets(part: Part, layer: int, first: int, last: int, device: torch.device) -> Tensor:
    if isinstance(part, RowsByHead):
        return part.keep[layer][:, first:last].to(device)
    return at_offsets(part, first, last, device)


def _probabilities(q: Tensor, keys: Tensor, total: Tensor, features: Features) -> Tensor:
    """`exp(q k - L)`, fp32 `[H, G, r, S]`, for `q` `[H, G, r, D]`, K `[H, S, D]`, L `[H, G, r]`."""
    scores = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).float()
    scores = scores.view(*q.shape[:3], -1) * features.scaling
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    return scores.sub_(total.unsqueeze(-1)).exp_()


def _grown(old: _Seen | None, n: int, device: torch.device) -> _Seen:
    new = _Seen(*(torch.zeros(n, device=device) for _ in range(3)))
    if old is not None:
        for name in ("total", "last", "n_queries"):
            before: Tensor = getattr(old, name)
            getattr(new, name)[: len(before)] = before
        for layer, heads in old.heads.items():
            new.heads[layer] = heads.new_zeros(heads.shape[0], n)
            new.heads[layer][:, : heads.shape[1]] = heads
    return new
