"""Policies that rank rows by one score and evict the lowest: what each kind of them shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sidequest_langchain.policy.acts import Act
from sidequest_langchain.policy.facts import CacheFacts, Floats, Need, SegmentFacts
from sidequest_langchain.policy.selection import Draft, Scores


@dataclass(frozen=True, kw_only=True)
class ByScore(ABC):
    """Evicts the unprotected rows of the lowest score; never packs or archives. Lossy.

    Where these do not suffice, idle segments are released, which is exact.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    is_from_attention: ClassVar[bool] = True
    fair: float = 0.0
    """See `Draft.evict`; papers rank all rows together."""
    block: int = 1
    """Rows that go together."""

    @abstractmethod
    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """How much each row is worth keeping, `[n_tokens]`."""

    def scores(self, facts: CacheFacts) -> Scores:
        """The scores of all segments; rows that nobody could look at yet count as the average."""
        scores = {s.segment_id: self.score(facts, s) for s in facts.segments}
        return with_prior(facts, scores) if self.is_from_attention else scores

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """Evict until enough is freed."""
        if facts.to_free <= 0:
            return ()
        draft = Draft(facts)
        draft.evict(self.scores(facts), fair=self.fair, block=self.block, reason=self.name)
        reason = f"{self.name}: no unprotected row is left"
        draft.release_idle(is_last_resort=True, reason=reason)
        return draft.acts()


def with_prior(facts: CacheFacts, scores: Scores) -> Scores:
    """Scores where rows that no observed query could see get the mean of all others.

    A new row must not be the first to go because nobody had the chance to look at it.
    """
    unseen = {s.segment_id: s.n_seen <= 0 for s in facts.segments}
    if not any(mask.any() for mask in unseen.values()):
        return scores
    seen = np.concatenate([scores[at][~mask] for at, mask in unseen.items()])
    mean = float(np.nanmean(seen)) if np.isfinite(seen).any() else 0.0
    return {at: np.where(mask, mean, scores[at]) for at, mask in unseen.items()}


def pooled(values: Floats, kernel: int) -> Floats:
    """The highest value among the `kernel` neighbours centred at each, `[n_tokens]`."""
    if kernel <= 1 or values.size == 0:
        return values
    before = (kernel - 1) // 2
    padded = np.pad(values, (before, kernel - 1 - before), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel)
    return np.asarray(windows.max(axis=1), np.float32)


def distance(facts: CacheFacts) -> dict[int, Floats]:
    """Steps since each row was the newest on a path that reads it, by segment id, `[n_tokens]`.

    On a running path the distance to its end, the nearest where several share the row; on an
    idle one the same by its leaves, and the steps since it was read last.
    """
    own = {s.segment_id: s.end for s in facts.segments}
    reach: dict[int, int] = {}
    for tip in facts.tips:
        for at in tip:
            reach[at] = min(reach.get(at, own[tip[-1]]), own[tip[-1]])
    running = set(reach)
    for segment in reversed(facts.segments):
        end = reach.setdefault(segment.segment_id, segment.end)
        at_parent = segment.parent_id
        if at_parent is not None and at_parent not in running:
            reach[at_parent] = min(reach.get(at_parent, end), end)
    return {
        s.segment_id: np.asarray(
            reach[s.segment_id] + s.age - s.start - np.arange(s.n_tokens), np.float32
        )
        for s in facts.segments
    }
