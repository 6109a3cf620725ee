"""Follows runs from their start and end events, and says what is to be done about each.

A state machine without hands: it returns effects and carries out none, so that the lifecycle
can hold a lock around every call and none around what the call leads to.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from uuid import UUID

from langgraph.errors import GraphBubbleUp, NodeCancelledError, ParentCommand

from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.bus import EventBus
from sidequest_langchain.graph.effects import Effect, Emit, carry_out, emit
from sidequest_langchain.graph.events import Outcome
from sidequest_langchain.graph.retention import MAX_THREADS, Recent, Retention
from sidequest_langchain.graph.runs import (
    CallTotals,
    Listener,
    PrunePlan,
    Root,
    Run,
    Serials,
    Started,
    Step,
    add_topmost,
)
from sidequest_langchain.graph.steps import StepRef, step_of, thread_of

MAX_LATE = 1024
"""Steps that were cut short, whose threads may go on: their late calls are recognised."""


class RunBook:
    """The live runs of the graphs that are attached to one model."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self.runs: dict[UUID, Run] = {}
        self._calls: dict[UUID, Step] = {}
        self._branches: Recent[str, BranchLedger] = Recent(MAX_THREADS)
        self._late_steps: Recent[UUID, Step] = Recent(MAX_LATE)
        self._late_calls: Recent[UUID, Step] = Recent(MAX_LATE)

    # -- starts --------------------------------------------------------------------------

    def start_run(self, listener: Listener, started: Started, serials: Serials) -> list[Effect]:
        """A chain, graph, node or tool begins."""
        run = self.runs.get(started.run_id)
        if run is not None:
            return self._join(listener, run, started.run_id)
        parent = self.runs.get(started.parent_run_id) if started.parent_run_id else None
        root = parent.root if parent else self._new_root(listener, started.run_id)
        around = parent.step if parent else None
        thread_id = thread_of(started.metadata)
        ref = weakref.ref(listener)
        run = Run(root=root, step=around, thread_id=thread_id, seen_by=[ref])
        self.runs[started.run_id] = run
        root.run_ids.add(started.run_id)
        self._note_place(root, thread_id, started.metadata.get("langgraph_checkpoint_ns"))
        found = step_of(
            started.name, started.tags, started.metadata, around=around.ref if around else None
        )
        if found is None:
            return []
        if around is not None:
            add_topmost(around.graphs, found.checkpoint_ns.rsplit("|", 1)[0])
        run.step = step = self._new_step(root, started, found, serials)
        step.audience.append(ref)
        effect = emit(root, step, "sidequest.step_start", {})
        step.start_event = effect.event
        return [effect]

    def start_call(
        self, run_id: UUID, parent_run_id: UUID | None, metadata: Mapping[str, Any]
    ) -> None:
        """A model call begins."""
        if parent_run_id is None:
            return
        run = self.runs.get(parent_run_id)
        step = run.step if run else self._late_steps.get(parent_run_id)
        if run is not None and step is None:
            place = metadata.get("langgraph_checkpoint_ns")
            self._note_place(run.root, thread_of(metadata), place)
        if step is not None and step.root.is_ended:
            self._late_calls.put(run_id, step)
        elif step is not None:
            self._calls[run_id] = step
            step.root.call_ids.add(run_id)

    # -- ends ----------------------------------------------------------------------------

    def end_run(self, run_id: UUID, error: BaseException | None, serials: Serials) -> list[Effect]:
        """A chain, graph, node or tool ended, well or not; what is not known is ignored."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return []
        run.root.run_ids.discard(run_id)
        run.root.first_supersteps.pop(run_id, None)
        run.root.bus.forget(run_id)
        effects: list[Effect] = []
        step = run.root.steps.pop(run_id, None)
        if step is not None:
            effects += self._end_step(step, _outcome(error), serials)
        if run_id == run.root.run_id:
            effects += self._end_root(run, error, serials)
        return effects

    def end_call(self, run_id: UUID, totals: CallTotals | None) -> list[Effect]:
        """A model call ended; `totals` are its figures, `None` if it failed."""
        step = self._calls.pop(run_id, None) or self._late_calls.pop(run_id)
        if step is None:
            return []
        step.root.call_ids.discard(run_id)
        if totals is not None:
            step.totals.add(totals)
        return list(self._retention.after_call(step))

    def pause(self, run_id: UUID | None) -> None:
        """A graph waits for a resume: what its thread holds stays."""
        run = self.runs.get(run_id) if run_id else None
        if run is not None:
            run.root.interrupted.add(run.thread_id)

    def resume(self, run_id: UUID | None) -> None:
        """A graph goes on from a checkpoint: its first steps repeat earlier attempts."""
        run = self.runs.get(run_id) if run_id else None
        if run is not None:
            run.root.is_resumed = True

    def correct_thread(self, step: Step, thread_id: str | None) -> None:
        """A step runs on another thread than its metadata says: its graph was given its own."""
        step.root.namespaces.get(step.ref.thread_id, set()).discard(step.ref.checkpoint_ns)
        step.ref = replace(step.ref, thread_id=thread_id)
        graph = self.runs.get(step.graph_run_id) if step.graph_run_id else None
        if graph is not None:
            graph.thread_id = thread_id
        self._note_place(step.root, thread_id, step.ref.checkpoint_ns)

    # -- branches and prunes -------------------------------------------------------------

    def ledger(self, run_id: UUID, thread_id: str | None) -> BranchLedger | None:
        """The branches of a thread (of a run, if it has no thread); `None`: nothing is known."""
        run = self.runs.get(run_id)
        if run is None:
            return None
        if thread_id is None:
            return run.root.branches
        return self._branches.setdefault(thread_id, BranchLedger)

    def forget_branches(self, thread_id: str) -> None:
        """Forget the branches of a thread."""
        self._branches.pop(thread_id)

    def open_branch(
        self, run_id: UUID, thread_id: str | None, branch: str, parent: str | None
    ) -> None:
        """A branch was opened in a run, on a thread."""
        ledger = self.ledger(run_id, thread_id)
        if ledger is not None:
            ledger.open(branch, parent)
            step = self.runs[run_id].step
            if step is not None:
                step.branches[branch] = None

    def stage(self, run_id: UUID, plan: PrunePlan) -> bool:
        """Keep a prune until the step that asked for it ends well; `False`: there is no step."""
        run = self.runs.get(run_id)
        if run is None or run.step is None:
            return False
        run.step.staged.append(plan)
        return True

    def prune_now(self, run_id: UUID, plan: PrunePlan) -> list[Effect]:
        """A prune that does not wait for its step to end."""
        run = self.runs.get(run_id)
        return [] if run is None else self._prune(plan, run.root, run.step)

    # -- inside --------------------------------------------------------------------------

    def _new_root(self, listener: Listener, run_id: UUID) -> Root:
        ref = weakref.ref(listener)
        return Root(run_id=run_id, bus=EventBus(partial(_fail, ref)), audience=[ref])

    def _new_step(self, root: Root, started: Started, ref: StepRef, serials: Serials) -> Step:
        root.n_starts[ref.checkpoint_ns] += 1
        root.first_supersteps.setdefault(started.parent_run_id, ref.step)
        step = Step(
            run_id=started.run_id,
            graph_run_id=started.parent_run_id,
            root=root,
            ref=replace(ref, attempt=root.n_starts[ref.checkpoint_ns]),
            serials=serials,
            started=started,
            audience=[],
        )
        root.steps[started.run_id] = step
        return step

    def _note_place(self, root: Root, thread_id: str | None, checkpoint_ns: str | None) -> None:
        # Only where it is asked for later: a long run on a thread must not grow by it.
        if checkpoint_ns and (thread_id is None or self._retention.is_for_run(thread_id)):
            root.note_place(thread_id, checkpoint_ns)

    def _join(self, listener: Listener, run: Run, run_id: UUID) -> list[Effect]:
        """A second handler of the same model sees a run that is known already."""
        ref = weakref.ref(listener)
        if ref in run.seen_by:
            return []
        run.seen_by.append(ref)
        if run_id == run.root.run_id:
            run.root.audience.append(ref)
        step = run.root.steps.get(run_id)
        if step is None or step.start_event is None:
            return []
        step.audience.append(ref)
        return [Emit(event=step.start_event, audience=(listener,), root=run.root)]

    def _end_step(self, step: Step, outcome: Outcome, serials: Serials) -> list[Effect]:
        root = step.root
        ended_well = outcome in ("ok", "parent_command")
        told: list[Effect] = []
        releases: list[Effect] = []
        if ended_well:
            for plan in step.staged:
                event, *posts = self._prune(plan, root, step)
                told.append(event)
                releases += posts
            releases += self._retention.after_step(step)
        elif outcome == "interrupted":
            root.interrupted.add(step.ref.thread_id)
        else:
            self._retention.after_failure(step, serials)
            self._late_steps.put(step.run_id, step)
        figures: dict[str, Any] = {"outcome": outcome, "branches": list(step.branches)}
        figures |= asdict(step.totals)
        figures["n_prunes_dropped"] = 0 if ended_well else len(step.staged)
        # What is released is reported after the step that let it go has ended.
        return [*told, emit(root, step, "sidequest.step_end", figures), *releases]

    def _end_root(self, run: Run, error: BaseException | None, serials: Serials) -> list[Effect]:
        root = run.root
        if _outcome(error) == "interrupted":
            root.interrupted.add(run.thread_id)
        effects: list[Effect] = []
        for step in tuple(root.steps.values()):
            effects += self._end_step(step, "cancelled", serials)
        for run_id in root.run_ids:
            self.runs.pop(run_id, None)
        for run_id in root.call_ids:
            self._late_calls.put(run_id, self._calls.pop(run_id))
        effects += self._retention.after_run(root, has_ended_well=error is None)
        still_busy = {other.thread_id for other in self.runs.values()}
        for thread_id in root.swept - still_busy - {None}:
            self._branches.pop(str(thread_id))
        root.end()
        return effects

    def _prune(self, plan: PrunePlan, root: Root, step: Step | None) -> list[Effect]:
        thread_id = plan.thread_id
        ledger = root.branches if thread_id is None else self._branches.get(thread_id)
        if ledger is not None:
            plan = replace(plan, descendants=ledger.descendants(plan.paths))
            ledger.forget(plan.targets)
        return carry_out(plan, root, step)


def _fail(ref: weakref.ref[Listener], error: Exception) -> None:
    listener = ref()
    if listener is not None:
        listener.fail(error)


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "ok"
    if isinstance(error, ParentCommand):
        return "parent_command"
    if isinstance(error, GraphBubbleUp):
        return "interrupted"
    if isinstance(error, NodeCancelledError):
        return "cancelled"
    return "error" if isinstance(error, Exception) else "cancelled"
