"""Attention as facts: what each token and segment was given, gathered while the model decodes.

The scores come from the pass that runs anyway: attention hands over its queries and log-sum-exps,
and the probabilities of a few sampled layers are formed again from them, `exp(q k - L)`, on the
steps that are looked at. It must not decide anything.

Papers: H2O, arXiv:2306.14048, §4 (accumulated scores); SnapKV, arXiv:2404.14469, §4 (the window
after a prefill); TOVA, arXiv:2401.06104, §3 (the last query); Hydragen, arXiv:2402.05099, §3 (the
log-sum-exp that yields the mass of a segment).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidequest_langchain.kv.partial import KEY_BLOCK
from sidequest_langchain.kv.parts import LOAD_ROWS, RowsByHead, StoredRows
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.looks import LogShares, Look, Shares, formed, grown
from sidequest_langchain.policy.notes import HeadScores, Notebook, Notes
from sidequest_langchain.policy.probabilities import (
    grouped_queries,
    keys_of,
    offsets_of,
    probabilities,
)

if TYPE_CHECKING:
    from sidequest_langchain.kv.features import Features
    from sidequest_langchain.kv.step_plan import StepPlan
    from sidequest_langchain.kv.watching import Decoded, Prefilled

WINDOW = 32
"""Last queries of a prefill chunk that are looked at (SnapKV's observation window)."""

MOST_UNREAD = 64
"""Steps whose masses may wait to be read from the device."""


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
        self._seen: dict[Segment, Look] = {}
        self._masses: list[Shares] = []
        self._past_masses: list[list[Shares]] = []
        """By step; read, with a wait for the device, when tokens are looked at."""

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
        self._masses = []

    # -- told by attention ---------------------------------------------------------------

    def decoded(self, plan: StepPlan, layer: int, seen: Decoded) -> None:
        """Note what the decoding rows attended to in a layer."""
        n_kv_heads = seen.lses[0].shape[0]
        self._note_masses(seen, n_kv_heads, tuple(plan.decoding))
        if not self.is_looking:
            return
        grouped = grouped_queries(seen.q, n_kv_heads)
        total = seen.total.reshape(grouped.shape[:3])
        for block in seen.blocks:
            q, lse = grouped, total
            if block.rows is not None:
                members = plan.index(block.rows, block.rows, q.device)
                q, lse = q.index_select(2, members), lse.index_select(2, members)
            at_once = KEY_BLOCK if block.is_in_place else LOAD_ROWS
            for first in range(block.first, block.last, at_once):
                last = min(first + at_once, block.last)
                keys, offsets = keys_of(block, layer, first, last)
                p = probabilities(q, keys, lse, seen.features)
                is_there = block.seen(layer, first, last, q.device)
                if is_there is not None:
                    p = torch.where(is_there[:, None], p, 0.0)
                n = block.last if block.part is None else 0
                self._add(block.segment, layer, offsets, p, n_tokens=n)

    def prefilled(self, plan: StepPlan, layer: int, seen: Prefilled) -> None:
        """Note what the last queries of a chunk attended to in a layer."""
        row = plan.rows[seen.row]
        w = min(self._window, row.n_new)
        if seen.segments:
            shares = torch.stack(seen.lses)[:, :, -w:].sub(seen.total[:, -w:]).exp_().mean((1, 2))
            self._masses.append(Shares(seen.segments, [(seen.row,)] * len(seen.segments), shares))
        queries = seen.q[:, -w:], seen.total[:, -w:], row.position + row.n_new - w
        for segment in seen.segments:
            self._look_back(plan, layer, segment, queries, seen.features)
        if row.is_stored:
            keys = row.tip.rows(row.tip.n_rows, row.tip.n_rows + row.n_new)[0][layer]
            self._look_at_chunk(layer, row.tip, keys, queries[:2], seen.features)

    def finish(self) -> None:
        """Fold what the step saw into the notes: the step went well."""
        self.n_steps += 1
        self._past_masses.append(self._masses)
        self._masses = []
        if self._seen or len(self._past_masses) >= MOST_UNREAD:
            self.read_masses()
        for segment, seen in self._seen.items():
            self.notebook.of(segment).fold(
                seen.total,
                torch.stack(list(seen.last.values())).sum(0),
                seen.n_queries,
                n_layers=len(self._layers),
                decay=self._decay,
                is_prefill=seen.is_prefill,
                heads=HeadScores(self._n_layers, seen.heads, seen.head_queries)
                if self._is_by_head
                else None,
            )
        self._seen.clear()

    def read_masses(self) -> None:
        """Bring the segments' masses up to date; waits for the device."""
        first = self.n_steps - len(self._past_masses) + 1
        numbers = formed([told for masses in self._past_masses for told in masses])
        for step, masses in enumerate(self._past_masses, first):
            found: dict[Segment, float] = {}
            readers: dict[Segment, set[int]] = {}
            for told in masses:
                shares = next(numbers)
                for segment, rows, share in zip(told.segments, told.rows, shares, strict=True):
                    found[segment] = found.get(segment, 0.0) + share / len(self._layers)
                    readers.setdefault(segment, set()).update(rows)
            for segment, share in found.items():
                self.notebook.of(segment).read(share / len(readers[segment]), step)
        self._past_masses.clear()

    def notes_of(self, segment: Segment) -> Notes:
        """What is known of a segment, however it was cut since."""
        return self.notebook.of(segment)

    # -- inside --------------------------------------------------------------------------

    def _note_masses(self, seen: Decoded, n_kv: int, rows: tuple[int, ...]) -> None:
        """Each block's exact share of the attention, mean over heads, sum over its rows."""
        segments = [block.segment for block in seen.blocks]
        if all(block.rows is None for block in seen.blocks):
            readers = [rows] * len(segments)
            self._masses.append(Shares(segments, readers, LogShares(seen.lses, seen.sums)))
            return
        total = seen.total.view(n_kv, -1, seen.q.shape[1])
        flat = total.flatten(1)
        parts = []
        for block, lse in zip(seen.blocks, seen.lses, strict=True):
            over = flat if block.rows is None else total[:, :, list(block.rows)].reshape(n_kv, -1)
            parts.append(torch.exp(lse - over).sum())
        readers = [
            rows if block.rows is None else tuple(rows[j] for j in block.rows)
            for block in seen.blocks
        ]
        self._masses.append(Shares(segments, readers, torch.stack(parts) / len(seen.q)))

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
                grouped = grouped_queries(q, k.shape[0])
                p = probabilities(grouped, k, total.reshape(grouped.shape[:3]), features)
                offsets = offsets_of(part, layer, first, last, q.device)
                n_queries = None
                if features.window is not None:
                    at = torch.arange(position, position + q.shape[1], device=q.device)
                    places = segment.start + offsets.view(-1, 1, 1, last - first)
                    is_near = at.unsqueeze(1) - places < features.window
                    p = torch.where(is_near, p, 0.0)
                    n_queries = is_near.sum(2)[:, 0].float()
                if isinstance(part, RowsByHead):
                    is_there = part.seen(layer, 0, segment.n_tokens, q.device)[:, first:last]
                    p = torch.where(is_there[:, None, None], p, 0.0)
                self._add(segment, layer, offsets, p, is_prefill=True, n_queries=n_queries)

    def _look_at_chunk(
        self,
        layer: int,
        tip: Segment,
        keys: Tensor,
        queries: tuple[Tensor, Tensor],
        features: Features,
    ) -> None:
        """What the last queries of a chunk gave the chunk itself."""
        q, total = queries
        n_new, n_last = keys.shape[1], q.shape[1]
        grouped = grouped_queries(q, keys.shape[0])
        order = torch.arange(n_new, device=q.device)
        gap = order[n_new - n_last :].unsqueeze(1) - order
        visible = (gap >= 0) & (gap < (features.window or n_new))
        p = probabilities(grouped, keys, total.reshape(grouped.shape[:3]), features)
        # What comes later was not in the log-sum-exp: its exponential may be infinite.
        p = torch.where(visible, p, 0.0)
        offsets = order + tip.n_tokens
        n_queries = visible.sum(0).float()
        n = tip.n_tokens + n_new
        self._add(tip, layer, offsets, p, n_tokens=n, is_prefill=True, n_queries=n_queries)

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
        """Add probabilities `[H, G, r, S]` of the tokens at `offsets`, `[S]` or `[H, S]`.

        `n_queries`, `[S]`, `[1, S]` or `[H, S]`, says how many of the `r` could see each token.
        """
        by_kv = p.mean(1)  # GQA: the mean over the query heads of a group
        summed, last = by_kv.sum(1), by_kv[:, -1]
        counted = p.new_full((p.shape[3],), p.shape[2]) if n_queries is None else n_queries
        if offsets.dim() == 2:  # every head its own tokens; their padding is past the end
            is_there = offsets < segment.n_tokens
            share = is_there / p.shape[0]
            places = offsets.clamp(max=segment.n_tokens - 1)
            seen = self._seen_of(segment, segment.n_tokens, p.device)
            of_layer = seen.last_of(layer).index_fill_(0, places.flatten(), 0.0)
            for into, what in ((seen.total, summed), (of_layer, last), (seen.n_queries, counted)):
                into.index_add_(0, places.flatten(), (what * share).flatten())
        else:
            places = offsets.expand(p.shape[0], -1)
            seen = self._seen_of(segment, max(segment.n_tokens, n_tokens), p.device)
            seen.total.index_add_(0, offsets, summed.mean(0))
            seen.last_of(layer).index_copy_(0, offsets, last.mean(0))
            seen.n_queries.index_add_(0, offsets, counted.expand(1, -1)[0])
        seen.is_prefill = is_prefill
        if self._is_by_head:
            by_head, n_seen = seen.heads_of(layer, p.shape[0])
            by_head.scatter_add_(1, places, summed)
            n_seen.scatter_add_(1, places, counted.expand_as(summed))

    def _seen_of(self, segment: Segment, n: int, device: torch.device) -> Look:
        seen = self._seen.get(segment)
        if seen is None or len(seen.total) < n:
            seen = self._seen[segment] = grown(seen, n, device)
        return seen
