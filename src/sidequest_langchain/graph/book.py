"""Follows runs from their start and end events, and says what is to be done about each.

A pure state machine: it returns effects and carries out none. Nothing here calls a listener,
a cache or a callback; the lifecycle holds a lock around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sidequest_langchain.config import Retain
from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.bus import EventBus, Origin
from sidequest_langchain.graph.events import EventName, KVEvent, Outcome
from sidequest_langchain.graph.runs import (
    Listener,
    PrunePlan,
    Root,
    Run,
    Step,
    who,
)
from sidequest_langchain.graph.steps import step_of, thread_of
from sidequest_langchain.labels import PathSelector

MAX_THREADS = 1024
"""Threads whose branches (or interrupted runs) are remembered; the least recent go first."""
MAX_LATE = 1024
"""Steps that were still busy when their run ended, whose late calls are still recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tell an event to listeners, and to the bus if `origin` says where."""

    event: KVEvent
    audience: tuple[Listener, ...]
    bus: EventBus
    origin: Origin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Ask the cache for a release, and report what it freed under `root`."""

    selector: PathSelector
    reason: str
    name: str
    root: Root
    step: Step | None = None
    is_quiet: bool = False
    """Report it only if there was something to release."""


Effect: TypeAlias = Emit | Post
Finish = Literal["ok", "error"]


@dataclass(slots=True)
class Recent:
    """A bounded memory by thread; the least recently used entries go first."""

    limit: int
    entries: OrderedDict[Any, Any] = field(default_factory=OrderedDict)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The entry of `key`, made if there is none."""
        if key not in self.entries:
            self.entries[key] = make()
            if len(self.entries) > self.limit:
                self.entries.popitem(last=False)
        self.entries.move_to_end(key)
        return self.entries[key]

    def pop(self, key: Any, default: Any = None) -> Any:
        """Take the entry of `key` out."""
        return self.entries.pop(key, default)


class RunBook:
    """The live runs of the graphs attached to one model."""

    def __init__(self, retain: Retain | None) -> None:
        self.retain = retain
        self.runs: dict[UUID, Run] = {}
        self.calls: dict[UUID, Step] = {}
        """Live model calls by run id."""
        self._branches = Recent(MAX_THREADS)
        self._paused = Recent(MAX_THREADS)
        """By thread: namespaces of interrupted runs, to be released when a later one ends."""
        self._late = Recent(MAX_LATE)

    # -- starts --------------------------------------------------------------------------

    def start_chain(
        self,
        listener: Listener,
        run_id: UUID,
        parent_run_id: UUID | None,
        *,
        name: str | None,
        tags: Sequence[str],
        metadata: Mapping[str, Any],
        serial: int,
        make_bus: Callable[[], EventBus],
    ) -> list[Effect]:
        """A chain, graph, node or tool begins."""
        if run_id in self.runs:
            return self._join(listener, self.runs[run_id], run_id)
        parent = self.runs.get(parent_run_id) if parent_run_id is not None else None
        if parent is None:
            root = Root(run_id=run_id, bus=make_bus(), audience=[listener])
            parent = Run(root=root, step=None, thread_id=None, seen_by=[])
        run = Run(
            root=parent.root, step=parent.step, thread_id=thread_of(metadata), seen_by=[listener]
        )
        self.runs[run_id] = run
        run.root.run_ids.add(run_id)
        enclosing = parent.step.ref if parent.step is not None else None
        ref = step_of(name, tags, metadata, enclosing=enclosing)
        if ref is None:
            return []
        run.step = self._begin(run.root, run_id, parent_run_id, ref, tags, metadata, serial)
        run.step.audience.append(listener)
        run.step.start_event = self._event(run.root, run.step, "sidequest.step_start", {})
        return [_emit(run.root, run.step, run.step.start_event)]

    def _join(self, listener: Listener, run: Run, run_id: UUID) -> list[Effect]:
        """A second handler of the same model sees a run that is known already."""
        if listener in run.seen_by:
            return []
        run.seen_by.append(listener)
        root, step = run.root, run.step
        if run_id == root.run_id:
            root.audience.append(listener)
        if step is None or step.run_id != run_id or step.start_event is None:
            return []
        step.audience.append(listener)
        return [Emit(event=step.start_event, audience=(listener,), bus=root.bus, origin=None)]

    def _begin(
        self,
        root: Root,
        run_id: UUID,
        graph_run_id: UUID | None,
        ref: Any,
        tags: Sequence[str],
        metadata: Mapping[str, Any],
        serial: int,
    ) -> Step:
        visit = (ref.thread_id, ref.checkpoint_ns)
        root.n_starts[visit] += 1
        root.note_namespace(*visit)
        root.first_supersteps.setdefault(graph_run_id, ref.step)
        step = Step(
            run_id=run_id,
            root=root,
            ref=_attempt(ref, root.n_starts[visit]),
            graph_run_id=graph_run_id,
            serial=serial,
            origin=Origin(
                run_id=run_id,
                graph_run_id=graph_run_id,
                tags=tuple(tags),
                metadata=dict(metadata),
            ),
            audience=[],
        )
        root.steps[run_id] = step
        return step
