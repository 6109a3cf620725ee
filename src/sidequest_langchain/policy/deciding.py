"""The decision engine: from facts to acts that keep the budget. Plans only, and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.acts import Act, Archive, Compress, Evict, EvictByHead
from sidequest_langchain.policy.executor import Executor, Refusal
from sidequest_langchain.policy.facts import CacheFacts, Policy, checked
from sidequest_langchain.policy.importance import Predictor, predict
from sidequest_langchain.policy.protection import protect
from sidequest_langchain.policy.selection import Draft, by_head

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done in a cycle."""

    facts: CacheFacts
    """With masks of what is protected, and predictions where a predictor runs."""
    acts: tuple[Act, ...]
    refused: tuple[Refusal, ...]


class DecisionEngine:
    """Asks the policy, cuts down what it must not touch, and adds what the budget still needs."""

    def __init__(
        self,
        policy: Policy,
        config: CacheConfig,
        executor: Executor,
        token_weights: Mapping[int, float],
        predictor: Predictor | None = None,
    ) -> None:
        self.policy = policy
        self._predictor = predictor
        self._config = config
        self._executor = executor
        self._token_weights = token_weights
        self._has_failed = False

    def decide(
        self,
        facts: CacheFacts,
        segments: dict[int, Segment],
        must_free: int,
        *,
        asks_policy: bool = True,
    ) -> Decision:
        """Plan a cycle.

        Args:
            facts: Of this moment, unmasked.
            segments: The segments of the facts, by id.
            must_free: Bytes without which the budget would be exceeded.
            asks_policy: False where the policy's acts came to nothing.

        Raises:
            BudgetExceeded: Even without every row that is not protected, the budget would be.
        """
        facts = self._protected(facts)
        acts = self._ask(facts) if asks_policy else ()
        fine, refused = self._executor.check(acts, facts, segments)
        if must_free > 0 and planned_bytes(facts, fine) < must_free:
            fine = self._enough(facts, fine, must_free, segments)
        return Decision(facts=facts, acts=tuple(fine), refused=tuple(refused))

    def _protected(self, facts: CacheFacts) -> CacheFacts:
        """The facts with masks; what was protected as a whole stays so, and precise."""
        whole = {s.segment_id: s.protected for s in facts.segments if s.protected is not None}
        facts = protect(facts, self._config.protection, self._token_weights)
        if self._predictor is not None:
            facts = predict(facts, self._predictor)
        if not whole:
            return facts
        segments = tuple(
            replace(s, protected=whole[s.segment_id], precise=whole[s.segment_id])
            if s.segment_id in whole
            else s
            for s in facts.segments
        )
        return replace(facts, segments=segments)

    def _ask(self, facts: CacheFacts) -> Sequence[Act]:
        try:
            return [_tidied(act) for act in checked(self.policy(facts))]
        except Exception as error:  # whatever a user's policy raises, the run goes on
            if not self._has_failed:
                logger.warning(
                    "the policy %r failed (%s: %s); the budget is kept without it",
                    self.policy.name,
                    type(error).__name__,
                    error,
                )
                logger.debug("the policy's error", exc_info=True)
                self._has_failed = True
            return ()

    def _enough(
        self,
        facts: CacheFacts,
        acts: Sequence[Act],
        must_free: int,
        segments: dict[int, Segment],
    ) -> list[Act]:
        """The acts, and as many more as the budget needs: exact ones first.

        Raises:
            BudgetExceeded: There are not enough rows that may go.
        """
        heads = [act for act in acts if isinstance(act, EvictByHead)]
        draft = Draft(facts, must_free - planned_bytes(facts, heads))
        draft.add([act for act in acts if not isinstance(act, EvictByHead)])
        left = {s.segment_id for s in facts.segments} - {act.segment_id for act in heads}
        scores = {s.segment_id: s.score for s in facts.segments}
        draft.release_idle(left, reason="the budget")
        is_shared = self._config.eviction == "shared"
        if is_shared and self._config.policy == "staged":
            draft.compress(8, scores, left, reason="the budget")
            draft.compress(4, scores, left, reason="the budget")
        draft.evict(scores, left, reason="the budget")
        if draft.left > 0:
            raise BudgetExceeded(self._message(facts, draft.left))
        # Where heads keep rows of their own already, they go on to.
        return [*heads] + [
            act
            if is_shared and segments[act.segment_id].kept_by_head is None
            else by_head(facts, [act])[0]
            for act in draft.acts()
        ]

    def _message(self, facts: CacheFacts, missing: float) -> str:
        budget = facts.budget_bytes or 0
        rows = max(1, facts.bytes_per_row)
        protected = sum(
            int((s.resident & ~s.evictable).sum()) for s in facts.segments if not s.is_idle
        )
        holds = f"{budget // rows:,} rows"
        lacks = f"{-int(-missing // rows):,} rows"
        if facts.unit == "bytes":
            holds = f"{budget:,} bytes (about {holds} at full precision)"
            lacks = f"{int(missing):,} bytes"
        calls = sum(
            int((s.resident & ~s.evictable & (s.kinds == TokenKind.TOOL_CALL)).sum())
            for s in facts.segments
            if not s.is_idle
        )
        is_a_call = self._config.protection.newest_tool_call and 2 * calls > protected
        which = f" ({calls:,} of them of the newest tool call)" if is_a_call else ""
        less = "newest_tool_call=False" if is_a_call else "..."
        return (
            f"the cache's budget of {holds} cannot hold this step: {protected:,} rows are "
            f"protected or in use{which}, and {lacks} more are needed; give a larger budget, "
            f"protect less (CacheConfig(protection=Protection({less}))), release paths, read "
            "prompts in smaller pieces (prefill_chunk=...), or send shorter messages"
        )


def _tidied(act: Act) -> Act:
    """An act with plain numbers and words.

    Raises:
        TypeError: Something is no whole number.
    """
    given: dict[str, Any] = {"segment_id": index(act.segment_id)}
    if isinstance(act, Evict | Archive | Compress):
        given["offsets"] = tuple(map(index, act.offsets))
    if isinstance(act, EvictByHead):
        given["n_keep"] = index(act.n_keep)
    given["reason"] = str(getattr(act, "reason", ""))
    return replace(act, **given)


def planned_bytes(facts: CacheFacts, acts: Sequence[Act]) -> float:
    """Bytes that acts will free, as estimated from the facts."""
    draft = Draft(facts)
    draft.add([act for act in acts if not isinstance(act, EvictByHead)])
    freed = draft.freed
    for act in acts:
        if isinstance(act, EvictByHead):
            this = facts.segment(act.segment_id)
            n_kept = max(act.n_keep, int((this.resident & ~this.evictable).sum()))
            freed += max(0, int(this.resident.sum()) - n_kept) * facts.bytes_per_row
    return freed


def mass_of(facts: CacheFacts, act: Act) -> float:
    """Share of the running paths' attention that the rows of an act had, as last observed.

    Packed rows stay and count nothing.
    """
    if not isinstance(act, Evict | Archive | EvictByHead):
        return 0.0
    on_path = {at for tip in facts.tips for at in tip}
    total = sum(
        float(s.importance[s.resident].sum()) for s in facts.segments if s.segment_id in on_path
    )
    this = facts.segment(act.segment_id)
    if not total or act.segment_id not in on_path:
        return 0.0
    if isinstance(act, EvictByHead):
        held = np.sort(this.importance[this.resident])
        return float(held[: max(0, len(held) - act.n_keep)].sum()) / total
    rows = [at for at in act.offsets if at < this.n_tokens]
    return float(this.importance[rows].sum()) / total
