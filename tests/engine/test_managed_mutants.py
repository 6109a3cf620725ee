"""The checks of the managed cache find faults: each runs here on code that was broken on purpose.

A mutant that survives says that a check has gone blind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from sidequest_langchain.engine import engine as engine_module
from sidequest_langchain.engine import managing as engine_managing
from sidequest_langchain.engine.scheduler import Scheduler
from sidequest_langchain.errors import BudgetExceeded, CacheCorrupted
from sidequest_langchain.kv import acts as kv_acts
from sidequest_langchain.kv import parts as kv_parts
from sidequest_langchain.kv.acts import ActingTree
from sidequest_langchain.kv.keeping import KeepingTree
from sidequest_langchain.kv.packing import PackingTree
from sidequest_langchain.kv.step_plan import StepPlan
from sidequest_langchain.policy import cycle, deciding, executor, gathering, receipting
from sidequest_langchain.policy.asking import Measured
from sidequest_langchain.policy.executor import Executor
from sidequest_langchain.policy.guard import Canary
from sidequest_langchain.policy.limits import Limits
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.notes import Notebook, Notes
from sidequest_langchain.policy.returning import Returns
from tests.engine import test_holding_back as holding
from tests.engine import test_managed_budget as budget
from tests.engine import test_managed_faults as faults
from tests.engine import test_managed_oracle as oracle
from tests.policy import test_monitor as monitor

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Mutant:
    """Replace a function by `around(original, *args)`."""

    def mutate(patch: Patch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **given: around(original, *args, **given))

    return mutate


def compressed_positions(patch: Patch) -> None:
    """Positions are counted from the rows that are resident (B51)."""

    def positions(self):
        return [
            sum(s.n_resident for s in row.tip.path()) + i - (not row.is_stored)
            for row in self.rows
            for i in range(row.n_new)
        ]

    patch.setattr(StepPlan, "positions", positions)


def shifted(evict, self, segment, offsets):
    return evict(self, segment, [min(at + 1, segment.n_tokens - 1) for at in offsets])


def unprotected(protect, facts, *rules):
    facts = protect(facts, *rules)
    segments = (replace(s, protected=~s.protected & False, precise=None) for s in facts.segments)
    return replace(facts, segments=tuple(segments))


def swapped_rows(fetched, self, *args):
    dense, packed = fetched(self, *args)
    return [(storage, list(zip([a for a, _ in pairs], [b for _, b in pairs][::-1], strict=True)))
            for storage, pairs in dense], packed  # fmt: skip


def coarser(compress, self, segment, offsets, bits, exempt=()):
    return compress(self, segment, offsets, 4, exempt)


def in_segment(runs_of, positions):
    return runs_of([at % 16 for at in positions])


def turned(family, policy):
    return partial(oracle.test_evicted_rows_are_as_masked, family, policy)


MUTANTS: dict[str, tuple[Callable[..., Any], Mutant]] = {
    "positions compressed": (turned("llama", "h2o"), compressed_positions),
    "offsets one too high": (turned("llama", "h2o"), wrapped(ActingTree, "evict", shifted)),
    "learned positions compressed": (turned("gpt2", "lru"), compressed_positions),
    "positions in receipts from the segment": (
        turned("llama", "tova"),
        wrapped(receipting, "runs_of", in_segment),
    ),
    "hidden rows seen": (
        partial(oracle.test_hiding_is_evicting, "llama"),
        wrapped(kv_parts, "_unhidden", lambda _, part, hidden: part),
    ),
    "packed coarser than said": (
        partial(oracle.test_packed_rows_are_as_quantised, "llama", "staged"),
        wrapped(PackingTree, "compress", coarser),
    ),
    "heads keep one another's rows": (
        partial(oracle.test_every_head_its_own, "llama"),
        wrapped(
            ActingTree,
            "evict_by_head",
            lambda evict, self, segment, keep: evict(self, segment, keep.flip(1)),
        ),
    ),
    "protection ignored": (
        partial(faults.test_policies_that_err, "evict everything"),
        wrapped(deciding, "protect", unprotected),
    ),
    "coming and growing rows not counted": (
        partial(budget.test_one_long_answer_keeps_the_budget, "evict", "bytes"),
        wrapped(Limits, "amount", lambda amount, *args: amount(*args) // 2),
    ),
    "rows of heads counted for each": (
        partial(budget.test_one_long_answer_keeps_the_budget, "by_head", "bytes"),
        wrapped(
            gathering.Gatherer,
            "_bits",
            lambda bits, self, segment: bits(self, segment) | 32 * bool(segment.residency),
        ),
    ),
    "who holds most is not told": (
        partial(budget.test_protected_rows_alone_exceed_the_budget, (0, 1), False),
        lambda patch: patch.setattr("sidequest_langchain.engine.passes._own_bytes", lambda s: 0),
    ),
    "nobody waits for the others": (
        holding.test_who_alone_exceeds_the_budget_is_refused_and_the_others_answer,
        lambda patch: patch.setattr(Scheduler, "hold_back", lambda self: False),
    ),
    "exact calls share with the others": (
        faults.test_exact_calls_never_see_lossy_rows,
        lambda patch: patch.setattr(engine_module, "EXACT", ""),
    ),
    "pins ignored": (
        faults.test_pinned_paths_are_left_alone,
        lambda patch: (
            patch.setattr(gathering, "_pinned", lambda segments: set()),
            patch.setattr(kv_acts, "_is_pinned", lambda segment: False),
        )[0],
    ),
    "weights are not told apart": (
        partial(faults.test_damaged_copies_are_computed_again, "other weights"),
        wrapped(engine_managing, "fingerprint", lambda _, *args: {"model": "the same"}),
    ),
    "what idled is not brought back": (
        partial(faults.test_what_idled_in_an_archive_comes_back, "cpu"),
        wrapped(Returns, "_left_idle", lambda *_: []),
    ),
    "rows come back in another order": (
        partial(faults.test_recall_undoes, "llama", "evict"),
        wrapped(KeepingTree, "_fetched", swapped_rows),
    ),
    "observing acts": (
        partial(faults.test_observing_changes_nothing, "llama"),
        wrapped(
            cycle.Cycles,
            "_imagine",
            lambda _, self, decision, segments: [
                self._carry_out(decision.facts, act, segments, measured=Measured(), is_forced=False)
                for act in decision.acts
            ],
        ),
    ),
    "the canary sees what is there": (
        partial(faults.test_the_divergence_is_that_of_plain_transformers, "llama", "evict"),
        wrapped(
            Canary,
            "divergence",
            lambda ask, self, tips, overlay: ask(self, tips, dict.fromkeys(overlay, ())),
        ),
    ),
    "the guard never objects": (
        faults.test_guard_refuses_then_backs_off_and_yields_to_the_budget,
        wrapped(Canary, "objection", lambda *_: ""),
    ),
    "masses halved": (
        partial(monitor.test_masses_are_exact, "llama"),
        wrapped(Notes, "read", lambda read, self, mass, step: read(self, mass / 2, step)),
    ),
    "a sum over the heads of a group": (
        partial(monitor.test_scores_are_those_of_plain_attention, "llama"),
        wrapped(
            Monitor,
            "_add",
            lambda add, self, segment, layer, offsets, p, **given: add(
                self, segment, layer, offsets, p * p.shape[1], **given
            ),
        ),
    ),
    "notes of a head one too far": (
        partial(monitor.test_notes_follow_seals_and_cuts, False),
        wrapped(Notes, "part", lambda part, self, first, last: part(self, max(0, first - 1), last)),
    ),
    "notes do not follow": (
        partial(monitor.test_notes_follow_seals_and_cuts, False),
        wrapped(Notebook, "_leave_to_heads", lambda *_: None),
    ),
    "an act that fails is thought done": (
        partial(faults.test_policies_that_err, "archive everything"),
        wrapped(
            Executor,
            "carry_out",
            lambda carry, self, act, facts, segment: executor.Done(act, segment, 0),
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name, make_engine, monkeypatch, tmp_path, caplog):
    check, mutate = MUTANTS[name]
    wanted = inspect.signature(check).parameters
    fixtures = {
        "make_engine": make_engine,
        "monkeypatch": monkeypatch,
        "tmp_path": tmp_path,
        "caplog": caplog,
    }
    mutate(monkeypatch)
    with pytest.raises((AssertionError, CacheCorrupted, BudgetExceeded)):
        check(**{name: fixtures[name] for name in fixtures.keys() & wanted.keys()})
