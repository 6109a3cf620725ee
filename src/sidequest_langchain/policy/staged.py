"""Our policy: give up precision before rows, idle branches before running paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.acts import Act
from sidequest_langchain.policy.facts import CacheFacts, Floats, Need, SegmentFacts
from sidequest_langchain.policy.scoring import with_prior
from sidequest_langchain.policy.selection import Draft, Scores


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Packs, archives and evicts, in the order of what it costs. Lossy.

    Order of sacrifice: INT8 everywhere, INT4 and the archive for idle branches, INT4 for running
    paths, then eviction. Each step takes idle subtrees first, then the siblings of running paths,
    then the running paths, and there the rows of the least expected attention. Packing all rows to
    INT8 changes the next token's distribution a thousand times less than dropping half of them,
    INT4 a few times less.

    By the length of the sequence: early, nothing is done while the budget holds; late, idle
    subtrees are released, exactly, before any row of a running path is evicted or packed to INT4.

    The tree's part follows ArborKV (arXiv:2605.22106), fairness between messages arXiv:2510.00231.
    """

    name: ClassVar[str] = "staged"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.IMPORTANCE})
    fair: float = 0.5
    """Part of its proportional share of rows that every message keeps; see `Draft.evict`."""
    block: int = 1
    tool_results: float = 0.5
    """Factor on the attention of a tool's words: they go first. A factor and not a rank, since
    the one result that is still needed must outlive the filler around it."""
    thoughts: float = 0.7
    """Factor on the attention of a reasoning block; they go next."""

    def scores(self, facts: CacheFacts) -> Scores:
        """Expected attention, less for what goes before the rest, by segment id."""
        return with_prior(facts, {s.segment_id: self._score(s) for s in facts.segments})

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """Sacrifice in order until enough is freed."""
        if facts.to_free <= 0 or self._can_wait(facts):
            return ()
        draft, scores = Draft(facts), self.scores(facts)
        idle, siblings, running = ranks(facts)
        for among in (idle, siblings, running):
            draft.compress(8, scores, among, reason="cold rows, packed first")
        for among in (idle, siblings):
            draft.compress(4, scores, among, reason="idle, packed further")
        draft.archive(scores, [*idle, *siblings], reason="idle")
        if facts.stage == "late":
            draft.release_idle(idle, reason="idle, late in a long run")
        draft.compress(4, scores, running, reason="cold rows, packed further")
        self._evict(draft, scores)
        return draft.acts()

    def _evict(self, draft: Draft, scores: Scores) -> None:
        for among, why in zip(ranks(draft.facts), ("idle", "a sibling", "running"), strict=True):
            reason = f"least expected attention, {why}"
            draft.evict(scores, among, fair=self.fair, block=self.block, reason=reason)
        draft.release_idle(is_last_resort=True, reason="no unprotected row is left")

    def _can_wait(self, facts: CacheFacts) -> bool:
        budget = facts.budget_bytes
        return facts.stage == "early" and (budget is None or facts.n_bytes <= budget)

    def _score(self, segment: SegmentFacts) -> Floats:
        factors = np.ones(256, np.float32)
        factors[TokenKind.TOOL_RESULT] = self.tool_results
        factors[TokenKind.THOUGHT] = self.thoughts
        return segment.score * factors[segment.kinds]


@dataclass(frozen=True, kw_only=True)
class EvictStaged(Staged):
    """`Staged` without packing and archive: to tell what its order of eviction is worth."""

    name: ClassVar[str] = "evict_staged"

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """Evict in order until enough is freed."""
        if facts.to_free <= 0 or self._can_wait(facts):
            return ()
        draft = Draft(facts)
        if facts.stage == "late":
            draft.release_idle(ranks(facts)[0], reason="idle, late in a long run")
        self._evict(draft, self.scores(facts))
        return draft.acts()


def ranks(facts: CacheFacts) -> tuple[list[int], list[int], list[int]]:
    """Segment ids by how near they are to what runs: idle subtrees, siblings, running paths.

    A sibling is an idle segment that hangs on a running path: the graph may step back into it. A
    segment that is active but read by nobody counts as running: its node is between two calls.
    """
    known = {s.segment_id: s for s in facts.segments}
    idle: list[int] = []
    siblings: list[int] = []
    running: list[int] = []
    for segment in facts.segments:
        parent = None if segment.parent_id is None else known[segment.parent_id]
        if not segment.is_idle:
            running.append(segment.segment_id)
        elif parent is not None and not parent.is_idle:
            siblings.append(segment.segment_id)
        else:
            idle.append(segment.segment_id)
    return idle, siblings, running
