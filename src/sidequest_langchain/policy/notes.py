"""What is remembered of each segment between two looks, however the tree cuts it meanwhile.

It must not know attention; `monitor` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sidequest_langchain.kv.segment import Segment

MASS_DECAY = 0.9
"""Share of a segment's moving average of mass that stays at each step."""

_ARRAYS = ("importance", "accumulated", "n_seen", "last", "window")


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Sums of probabilities by layer and KV head of one look."""

    n_layers: int
    by_layer: Mapping[int, Tensor]
    """`[H, n]` each."""
    n_queries: Mapping[int, Tensor]
    """Queries that could see each token, by layer, `[H, n]` each."""


class Notes:
    """Scores of one segment's tokens, fp32 `[n]` on the device of its rows."""

    __slots__ = (*_ARRAYS, "heads", "is_archived_idle", "last_step", "mass", "n_reads", "start")

    def __init__(self, start: int, n: int, device: torch.device) -> None:
        self.start = start
        """Position of the first token that the arrays are about."""
        self.importance, self.accumulated, self.n_seen, self.last, self.window = (
            torch.zeros(n, device=device) for _ in _ARRAYS
        )
        self.heads: Tensor | None = None
        """Moving average by layer and KV head, `[L, H, n]`; `None` where heads are not told."""
        self.mass = 0.0
        """Moving average of the segment's exact share of attention."""
        self.n_reads = 0
        """Steps in which a running path read it."""
        self.last_step = 0
        """The last such step."""
        self.is_archived_idle = False
        """Its rows went to a slower tier while nobody read it: who comes back gets them back."""

    @property
    def n(self) -> int:
        """Tokens that the arrays are about."""
        return len(self.importance)

    def read(self, mass: float, step: int) -> None:
        """Count a step that read the segment, and the share of attention it gave."""
        is_first = self.n_reads == 0
        self.mass = mass if is_first else MASS_DECAY * self.mass + (1 - MASS_DECAY) * mass
        self.n_reads += 1
        self.last_step = step

    def fold(
        self,
        total: Tensor,
        last: Tensor,
        n_queries: Tensor,
        *,
        n_layers: int,
        decay: float,
        is_prefill: bool,
        heads: HeadScores | None = None,
    ) -> None:
        """Take in one look.

        Args:
            total: Probabilities summed over queries and layers, mean over heads, `[n]`.
            last: Those of the last query, summed over layers, `[n]`.
            n_queries: Queries that could see each token, summed over layers, `[n]`.
            n_layers: Layers that were looked at.
            decay: Share of the moving average that stays.
            is_prefill: Whether these were the last queries of a prefill.
            heads: The same by layer and head, where it is told.
        """
        self.reach(len(total))
        n = self.n
        if len(total) < n:
            total, last, n_queries = (_padded(t, n) for t in (total, last, n_queries))
        is_seen = n_queries > 0
        mean = total / n_queries.clamp_min(1)
        is_new = self.n_seen == 0
        moved = torch.where(is_new, mean, decay * self.importance + (1 - decay) * mean)
        self.importance = torch.where(is_seen, moved, self.importance)
        if heads is not None:
            self._fold_heads(heads, decay)
        self.accumulated += total / n_layers
        self.n_seen += n_queries / n_layers
        self.last = torch.where(is_seen, last / n_layers, self.last)
        if is_prefill:
            self.window = torch.where(is_seen, mean, self.window)

    def reach(self, n: int) -> None:
        """Let the arrays hold `n` tokens at least."""
        if n > self.n:
            for name in _ARRAYS:
                setattr(self, name, _padded(cast(Tensor, getattr(self, name)), n))
            if self.heads is not None:
                self.heads = _padded(self.heads, n)

    def part(self, first: int, last: int) -> Notes:
        """Notes of some tokens, as copies; reads and mass are those of the whole."""
        new = Notes(self.start + first, 0, self.importance.device)
        for name in _ARRAYS:
            setattr(new, name, cast(Tensor, getattr(self, name))[first:last].clone())
        if self.heads is not None:
            new.heads = self.heads[..., first:last].clone()
        new.mass, new.n_reads, new.last_step = self.mass, self.n_reads, self.last_step
        new.is_archived_idle = self.is_archived_idle
        return new

    def _fold_heads(self, heads: HeadScores, decay: float) -> None:
        for layer, total in heads.by_layer.items():
            if self.heads is None:
                self.heads = total.new_zeros(heads.n_layers, total.shape[0], self.n)
            n_queries = _padded(heads.n_queries[layer], self.n)
            mean = _padded(total, self.n) / n_queries.clamp_min(1)
            old = self.heads[layer]
            # A probability is never quite 0: such a token was not seen by this head before.
            moved = torch.where(old == 0, mean, decay * old + (1 - decay) * mean)
            self.heads[layer] = torch.where(n_queries > 0, moved, old)


class Notebook:
    """The notes of all segments; those of a segment go with it."""

    def __init__(self) -> None:
        self._notes: weakref.WeakKeyDictionary[Segment, Notes] = weakref.WeakKeyDictionary()

    def of(self, segment: Segment) -> Notes:
        """The notes of a segment, as long as its tokens.

        A segment that was cut, or sealed, keeps the tail of its notes. The head that was cut off
        is a new segment: its notes are the head of those of what hangs on it.
        """
        notes = self._notes.get(segment)
        if notes is None:
            notes = self._inherited(segment)
        elif notes.start < segment.start:
            self._leave_to_heads(segment, notes)
            notes = notes.part(segment.start - notes.start, notes.n)
        notes.reach(segment.n_tokens)
        self._notes[segment] = notes
        return notes

    def join(self, parent: Segment, child: Segment) -> None:
        """Let a child that is about to take in its parent's tokens have its notes, too.

        The masses add up: both were read by the same queries. Notes must not be those from before
        a cut: `of` every segment of the path first. The parent may have joined its own parent's
        a moment ago, so that its notes begin before its tokens do.
        """
        head, tail = self._notes.get(parent) or self.of(parent), self.of(child)
        n_head, n_tail = parent.end - head.start, child.n_tokens
        new = head.part(0, n_head)
        new.reach(n_head + n_tail)
        for name in _ARRAYS:
            cast(Tensor, getattr(new, name))[n_head:] = cast(Tensor, getattr(tail, name))[:n_tail]
        if tail.heads is not None:
            if new.heads is None:
                new.heads = tail.heads.new_zeros(*tail.heads.shape[:2], n_head + n_tail)
            new.heads[..., n_head:] = tail.heads[..., :n_tail]
        new.mass = head.mass + tail.mass
        new.n_reads, new.last_step = tail.n_reads, max(head.last_step, tail.last_step)
        new.is_archived_idle = head.is_archived_idle or tail.is_archived_idle
        self._notes.pop(parent, None)
        self._notes[child] = new

    def _leave_to_heads(self, segment: Segment, notes: Notes) -> None:
        """Give what was cut off a segment its notes before they are shortened."""
        at = segment.parent
        while at is not None and at.parent is not None and at.start >= notes.start:
            if at not in self._notes:
                first = at.start - notes.start
                self._notes[at] = notes.part(first, min(first + at.n_tokens, notes.n))
            at = at.parent

    def _inherited(self, segment: Segment) -> Notes:
        stack = list(segment.children)
        while stack:
            child = stack.pop()
            notes = self._notes.get(child)
            if notes is not None and notes.start <= segment.start < notes.start + notes.n:
                first = segment.start - notes.start
                return notes.part(first, min(first + segment.n_tokens, notes.n))
            if notes is None or notes.start <= segment.start:
                stack.extend(child.children)
        return Notes(segment.start, 0, _device(segment))


def _device(segment: Segment) -> torch.device:
    keys, _ = segment.rows(0, 0)
    return keys[0].device if keys else torch.device("cpu")


def _padded(tensor: Tensor, n: int) -> Tensor:
    if tensor.shape[-1] == n:
        return tensor
    new = tensor.new_zeros(*tensor.shape[:-1], n)
    new[..., : tensor.shape[-1]] = tensor
    return new
