"""One management cycle: monitor's facts, the decision, the guard's word, the executor, receipts."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.acts import Act, Archive, Compress
from sidequest_langchain.policy.asking import UNASKED, Measured, is_lossy, paths_to_ask
from sidequest_langchain.policy.deciding import Decision, DecisionEngine, mass_of
from sidequest_langchain.policy.executor import Executor
from sidequest_langchain.policy.facts import CacheFacts, Reason, Tier
from sidequest_langchain.policy.gathering import Gatherer
from sidequest_langchain.policy.guard import Canary
from sidequest_langchain.policy.limits import Limit, Limits
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.receipting import Decode, ReceiptWriter, completed
from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog
from sidequest_langchain.policy.schedule import stage_of

logger = logging.getLogger(__name__)

_TRIED = (
    "the cache's budget could not be kept: acts that should have freed enough failed, or freed "
    "less; receipts say why"
)
FORCED_ROWS = 16
"""Rows that go together where the budget asks for more than the guard allows."""
MOST_ROUNDS = 3
"""Cycles in a row, where the bytes that acts would free were estimated too high."""


class Cycles:
    """Runs management cycles over one tree."""

    def __init__(
        self,
        tree: SegmentTree,
        config: CacheConfig,
        *,
        monitor: Monitor,
        gatherer: Gatherer,
        decisions: DecisionEngine,
        executor: Executor,
        canary: Canary,
        log: ReceiptLog,
        decode: Decode,
        limits: Limits,
    ) -> None:
        self._tree, self._config = tree, config
        self._monitor, self._gatherer = monitor, gatherer
        self._decisions, self._executor, self._canary = decisions, executor, canary
        self._log = log
        self._writer = ReceiptWriter(decisions.policy.name, decode, mask_only=config.mask_only)
        self.limits = limits
        self._quiet_until = 0
        """Step up to which cycles that need not be do not act: the guard said no."""
        self._has_warned = False

    def is_due(self, n_coming: int = 0) -> bool:
        """Whether a cycle would have something to give back."""
        return self.limits.are_due(n_coming)

    def run(self, reason: Reason, n_coming: int = 0) -> list[ActReceipt]:
        """Give bytes back, if there are too many.

        Args:
            reason: Why now.
            n_coming: Bytes that are about to be added.

        Returns:
            Receipts of what was done, or would have been.

        Raises:
            BudgetExceeded: The budget cannot be kept. Nothing was done, or what a round before had
                done is in the receipts.
        """
        found: list[ActReceipt] = []
        try:
            for limit in self.limits.limits():
                for n in range(MOST_ROUNDS):
                    found += self._once(reason, limit, n_coming, asks_policy=n == 0)
                    if not self.limits.excess(limit):
                        break
                else:
                    raise BudgetExceeded(_TRIED)
        finally:  # a later round may find that the budget cannot be kept
            self._log.add(found)
            self.limits.settle()
        return found

    def _once(
        self, reason: Reason, limit: Limit, n_coming: int, *, asks_policy: bool
    ) -> list[ActReceipt]:
        config = self._config
        wanted, must = self.limits.wanted(limit, n_coming), self.limits.excess(limit)
        if not wanted and not must:
            return []
        if not must and self._monitor.n_steps < self._quiet_until:
            return []
        segments = self._gatherer.segments()
        lossy = self.limits.to_evict(limit, n_coming, must_fit=reason == "asked")
        decide = partial(self._decide, reason, limit, segments, lossy, asks_policy=asks_policy)
        decision = decide(max(wanted, must), must)
        receipts = [
            self._writer.write(
                decision.facts,
                refusal.act,
                segments.get(refusal.act.segment_id),
                "refused",
                why=refusal.why,
            )
            for refusal in decision.refused
        ]
        if not decision.acts:
            return receipts
        if config.observe:
            return [*receipts, *self._imagine(decision, segments)]
        found, objection = self._ask_guard(decision, segments)
        if objection and must < wanted:  # little more than the budget needs
            # A few rows at once: a cycle for every row would cost more than it spares.
            enough = max(must, min(wanted, FORCED_ROWS * self._tree.bytes_per_token))
            decision = decide(enough, must) if must else decision
            if must:
                found, objection = self._ask_guard(decision, segments)
        if objection and not must:
            self._quiet_until = self._monitor.n_steps + 64
            return receipts + [
                self._writer.write(
                    decision.facts,
                    act,
                    segments[act.segment_id],
                    "refused",
                    why=objection,
                    measured=found,
                )
                for act in decision.acts
            ]
        if objection and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the budget needs more than the guard allows (%s): the budget holds, and receipts "
                "say so (is_forced); a larger budget avoids it",
                objection,
            )
        for act in decision.acts:
            receipts.append(
                self._carry_out(
                    decision.facts, act, segments, measured=found, is_forced=bool(objection)
                )
            )
        return receipts

    def _decide(
        self,
        reason: Reason,
        limit: Limit,
        segments: dict[int, Segment],
        lossy: int,
        wanted: int,
        must: int,
        *,
        asks_policy: bool,
    ) -> Decision:
        schedule = self._config.schedule
        facts = self._gatherer.gather(
            segments,
            budget_bytes=limit.soft,
            unit=limit.unit,
            to_free=wanted,
            to_evict=max(must, min(wanted, lossy)),
            reason=reason,
            stage=lambda n_seen: stage_of(n_seen, schedule),
            tiers=self._tiers(),
        )
        return self._decisions.decide(facts, segments, must, asks_policy=asks_policy)

    def _tiers(self) -> list[Tier]:
        tiers, archive = self._config.tiers, self._tree.archive
        found = [Tier(name) for name in ("int8", "int4") if getattr(tiers, name)]
        if archive is not None and tiers.cpu_bytes:
            found.append(Tier("cpu", max(0, tiers.cpu_bytes - archive.n_cpu_bytes)))
        if archive is not None and tiers.disk_bytes:
            found.append(Tier("disk", max(0, tiers.disk_bytes - archive.n_disk_bytes)))
        return found

    def _ask_guard(self, decision: Decision, segments: dict[int, Segment]) -> tuple[Measured, str]:
        """The divergence of the acts, and what speaks against them.

        Where packing is too coarse for the first and last layer, these are left out from now on.
        """
        mass = sum(mass_of(decision.facts, act) for act in decision.acts)
        if not self._canary.is_on:
            return Measured(why=UNASKED), self._canary.objection(None, mass)
        found = self._measure(decision, segments)
        objection = self._canary.objection(found.kl, mass)
        packs = any(isinstance(act, Compress) for act in decision.acts)
        if objection and packs and self._executor.exempt_ends():
            found = self._measure(decision, segments)
            objection = self._canary.objection(found.kl, mass)
        return found, objection

    def _measure(self, decision: Decision, segments: dict[int, Segment]) -> Measured:
        """The divergence of the lossy acts; infinite where it cannot be measured."""
        facts = decision.facts
        lossy = [act for act in decision.acts if is_lossy(act, facts)]
        notes_of = self._monitor.notes_of
        asked = paths_to_ask(
            lossy, facts, segments, lambda s: bool(s.archived) and notes_of(s).is_archived_idle
        )
        try:
            overlay = self._executor.overlay(lossy, facts, segments)
            kl = self._canary.divergence(asked.tips, overlay)
        except (MemoryError, RuntimeError, ValueError):  # torch's is a RuntimeError
            logger.debug("the divergence could not be measured", exc_info=True)
            kl = math.inf
        return Measured(kl=kl, reasons=asked.reasons)

    def _carry_out(
        self,
        facts: CacheFacts,
        act: Act,
        segments: dict[int, Segment],
        *,
        measured: Measured,
        is_forced: bool,
    ) -> ActReceipt:
        segment = segments[act.segment_id]
        # Before the act: a release empties the segment.
        receipt = self._writer.write(
            facts, act, segment, "done", measured=measured, is_forced=is_forced
        )
        try:
            done = self._executor.carry_out(act, facts, segment)
        except (MemoryError, RuntimeError, ValueError) as error:  # torch's is a RuntimeError
            logger.debug("an act failed", exc_info=True)
            return replace(receipt, outcome="failed", reason=f"{type(error).__name__}: {error}")
        if done.why_not:
            return replace(receipt, outcome="failed", reason=done.why_not)
        if isinstance(act, Archive) and not facts.segment(act.segment_id).is_active:
            self._monitor.notes_of(segment).is_archived_idle = True
        return completed(receipt, done)

    def _imagine(self, decision: Decision, segments: dict[int, Segment]) -> list[ActReceipt]:
        """Receipts of what observe mode leaves undone."""
        receipts = []
        for act in decision.acts:
            receipt = self._writer.write(decision.facts, act, segments[act.segment_id], "observed")
            self.limits.imagine(decision.facts.unit, act.segment_id, receipt.freed_bytes)
            receipts.append(receipt)
        return receipts
