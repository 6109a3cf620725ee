"""The runs that are going on: root runs, node steps inside them, and model calls inside those.

Plain books, kept under the lifecycle's lock. They must not know who listens or what is cached.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.bus import EventBus, Origin
from sidequest_langchain.graph.events import KVEvent
from sidequest_langchain.graph.steps import StepRef


class Listener(Protocol):
    """A handler bound to a graph; it hears of the runs it was told about."""

    def deliver(self, event: KVEvent) -> None:
        """Hand an event to the observers."""

    def failed(self, error: BaseException) -> None:
        """Count a failure that must not reach the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What one call of `prune`, `keep_only` or `backtrack` asked for."""

    paths: tuple[str, ...]
    """As asked."""
    descendants: tuple[str, ...] = ()
    """Branches declared below them: they go too."""
    reason: str = "pruned"
    back_to: str | None = None
    """The branch that `backtrack` goes on from."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Everything to release, descendants first."""
        return (*reversed(self.descendants), *self.paths)


@dataclass(slots=True, kw_only=True)
class CallTotals:
    """What the model calls of one step came to."""

    n_calls: int = 0
    n_reused_tokens: int = 0
    n_prefilled_tokens: int = 0
    n_generated_tokens: int = 0
    segments: list[int] = field(default_factory=list)
    """Tips of the calls' paths, in the order they ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class Root:
    """One outermost run that a handler sees, and all that happens inside it."""

    run_id: UUID
    bus: EventBus
    audience: list[Listener]
    branches: BranchLedger = field(default_factory=BranchLedger)
    """Those of calls without a thread; they die with the run."""
    run_ids: set[UUID] = field(default_factory=set)
    """Every live run inside, to be forgotten with it."""
    steps: dict[UUID, Step] = field(default_factory=dict)
    namespaces: dict[str | None, set[str]] = field(default_factory=dict)
    """By thread: the topmost namespaces in which steps ran."""
    n_starts: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    unfinished: set[tuple[str | None, str]] = field(default_factory=set)
    """Visits whose last attempt failed or was cancelled: their text is nobody's history."""
    interrupted: set[str | None] = field(default_factory=set)
    """Threads that wait for a resume."""
    swept: set[str | None] = field(default_factory=set)
    """Threads whose segments were released when the run ended."""
    first_supersteps: dict[UUID | None, int | None] = field(default_factory=dict)
    """By graph run: the superstep it started with."""
    is_resumed: bool = False
    is_ended: bool = False
    n_events: int = 0

    def note_namespace(self, thread_id: str | None, checkpoint_ns: str) -> None:
        """Remember where steps ran; what is nested below a known place needs no note."""
        known = self.namespaces.setdefault(thread_id, set())
        parts = checkpoint_ns.split("|")
        if not any("|".join(parts[: n + 1]) in known for n in range(len(parts))):
            known.add(checkpoint_ns)

    def may_repeat(self, step: Step) -> bool:
        """Whether an earlier attempt at this visit may have left paths."""
        if self.n_starts[step.ref.thread_id, step.ref.checkpoint_ns] > 1:
            return True
        return self.is_resumed and step.ref.step == self.first_supersteps.get(step.graph_run_id)

    def is_given_up(self, step: Step) -> bool:
        """Whether a path of this step that ends only now is wanted by nobody."""
        thread_id, checkpoint_ns = step.ref.thread_id, step.ref.checkpoint_ns
        return self.is_ended and (
            thread_id in self.swept or (thread_id, checkpoint_ns) in self.unfinished
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """One attempt at one visit of a node."""

    run_id: UUID
    root: Root
    ref: StepRef
    graph_run_id: UUID | None
    serial: int
    """Paths begun before this attempt."""
    origin: Origin
    audience: list[Listener]
    start_event: KVEvent | None = None
    staged: list[PrunePlan] = field(default_factory=list)
    totals: CallTotals = field(default_factory=CallTotals)


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One live chain, tool or graph run: where it belongs."""

    root: Root
    step: Step | None
    """The innermost step around it (itself, if it is one)."""
    thread_id: str | None
    seen_by: list[Listener]


def who(root: Root, step: Step | None) -> dict[str, Any]:
    """The part of every event's data that says where it happened."""
    found: dict[str, Any] = {"run_id": str(root.run_id)}
    if step is not None:
        found |= step.ref.to_json()
    return found
