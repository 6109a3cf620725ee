"""Eviction as papers have it, one score each. They evict at once and never pack.

Papers work on one sequence, here the rows of all segments are ranked together, and protection is
the same for all, so that only the scores are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sidequest_langchain.policy.acts import Act
from sidequest_langchain.policy.facts import CacheFacts, Floats, Need, SegmentFacts
from sidequest_langchain.policy.scoring import ByScore, distance, pooled
from sidequest_langchain.policy.selection import Draft, Scores


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Never acts: what everything else is measured against. Exact."""

    name: ClassVar[str] = "none"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """No act."""
        return ()


@dataclass(frozen=True, kw_only=True)
class LRU:
    """Releases whole idle segments, the least recently read first: exact.

    Then the unprotected rows of the least recently read segments, earliest position first: lossy.
    """

    name: ClassVar[str] = "lru"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """Release, then evict, until enough is freed."""
        if facts.to_free <= 0:
            return ()
        draft = Draft(facts)
        draft.release_idle(reason="least recently read")
        scores = {s.segment_id: np.full(s.n_tokens, -float(s.age)) for s in facts.segments}
        draft.evict(scores, reason="of the least recently read segment")
        return draft.acts()


@dataclass(frozen=True, kw_only=True)
class Window(ByScore):
    """StreamingLLM: attention sinks and a window of the newest rows. arXiv:2309.17453.

    The sinks are protected anyway; the window is what the budget leaves.
    """

    name: ClassVar[str] = "window"
    is_from_attention: ClassVar[bool] = False

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """Minus the steps since the row was the newest."""
        return -distance(facts)[segment.segment_id]

    def scores(self, facts: CacheFacts) -> Scores:
        """All at once: distances are those of the whole tree."""
        return {at: -steps for at, steps in distance(facts).items()}


@dataclass(frozen=True, kw_only=True)
class H2O(ByScore):
    """Heavy hitters by accumulated attention, and recent rows. arXiv:2306.14048.

    The paper's plain sum favours tokens for having been there longer; `is_normalised` divides it
    by the queries that could see the token.
    """

    name: ClassVar[str] = "h2o"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ACCUMULATED})
    is_normalised: bool = True
    recent_share: float = 0.5
    """Share of what stays that is given to the newest rows, as in the paper."""

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """Attention a query, or in all."""
        if not self.is_normalised:
            return segment.accumulated
        return np.asarray(segment.accumulated / np.maximum(segment.n_seen, 1), np.float32)

    def scores(self, facts: CacheFacts) -> Scores:
        """Attention; the newest rows come above the highest of it."""
        scores = super().scores(facts)
        steps = distance(facts)
        # Rows that stay, by their bytes at full precision.
        n_rows = sum(facts.row_bytes(s).sum() for s in facts.segments) - facts.lossy_bytes
        n_recent = int(max(0.0, self.recent_share * n_rows / max(1, facts.bytes_per_row)))
        resident = [steps[s.segment_id][s.resident] for s in facts.segments]
        newest = np.sort(np.concatenate(resident)) if resident else np.zeros(0)
        if n_recent == 0 or newest.size == 0:
            return scores
        last = newest[min(n_recent, newest.size) - 1]
        top = max(float(np.max(s, initial=0.0)) for s in scores.values())
        return {
            at: np.where(steps[at] <= last, top + 1.0 / (1.0 + steps[at]), scores[at])
            for at in scores
        }


@dataclass(frozen=True, kw_only=True)
class SnapKV(ByScore):
    """Attention of the prompt's last queries, pooled over neighbours. arXiv:2404.14469.

    The paper picks once, after a prefill. Rows that came later were seen by no window: they are
    ranked by their moving average, in the same units.
    """

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WINDOW, Need.IMPORTANCE})
    pool: int = 7

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """Window attention, the highest among `pool` neighbours."""
        was_seen = segment.window > 0
        return pooled(np.where(was_seen, segment.window, segment.importance), self.pool)


@dataclass(frozen=True, kw_only=True)
class TOVA(ByScore):
    """The lowest attention of the last query goes, heads averaged. arXiv:2401.06104."""

    name: ClassVar[str] = "tova"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.LAST})

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """Attention of the last observed query."""
        return segment.last


@dataclass(frozen=True, kw_only=True)
class RKV(ByScore):
    """Importance minus redundancy: what says the same as others goes. arXiv:2505.24133.

    Both are shares of one over all rows: attention as it is, similarity by a softmax.
    """

    name: ClassVar[str] = "r_kv"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.IMPORTANCE, Need.REDUNDANCY})
    importance: float = 0.1
    """The paper's lambda: weight of the importance, the rest is that of the redundancy."""
    pool: int = 7

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """Pooled attention; see `scores`."""
        return pooled(segment.importance, self.pool)

    def scores(self, facts: CacheFacts) -> Scores:
        """Both shares are of all rows, so that segments compare."""
        attention = super().scores(facts)
        total = sum(float(values.sum()) for values in attention.values()) or 1.0
        similar = {
            s.segment_id: np.zeros(s.n_tokens) if s.redundancy is None else s.redundancy
            for s in facts.segments
        }
        grown = {at: np.exp(np.asarray(v, np.float64)) for at, v in similar.items()}
        redundancy = sum(float(v.sum()) for v in grown.values()) or 1.0
        share = self.importance
        return {
            at: share * attention[at] / total - (1 - share) * grown[at] / redundancy
            for at in attention
        }


@dataclass(frozen=True, kw_only=True)
class Random(ByScore):
    """Any unprotected row: what a score must beat. The same facts give the same rows."""

    name: ClassVar[str] = "random"
    is_from_attention: ClassVar[bool] = False
    seed: int = 0

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """By chance, from the seed, the step and the segment."""
        key = (self.seed, facts.step, segment.segment_id)
        return np.random.default_rng(key).random(segment.n_tokens, np.float32)


@dataclass(frozen=True, kw_only=True)
class Average(ByScore):
    """The lowest moving average of attention goes, or the lowest prediction if one runs."""

    name: ClassVar[str] = "evict_importance"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.IMPORTANCE})

    def score(self, facts: CacheFacts, segment: SegmentFacts) -> Floats:
        """Expected attention."""
        return segment.score
