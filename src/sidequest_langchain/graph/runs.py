"""The runs that are going on: root runs, the node steps inside them, and what the steps asked for.

Plain books, kept under the lifecycle's lock. They must not know how a run is followed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.bus import EventBus, Origin
from sidequest_langchain.graph.events import KVEvent
from sidequest_langchain.graph.steps import StepRef

Serials = Mapping[int, int]
"""How many paths were begun in each cache, by the identity of the cache."""


class Listener(Protocol):
    """A handler: it hears of the runs that it was told about."""

    def deliver(self, event: KVEvent) -> None:
        """Hand an event to the observers."""

    def fail(self, error: BaseException) -> None:
        """Count a failure that must not reach the graph."""


Audience = list["weakref.ref[Listener]"]
"""Listeners, not kept alive: books that outlive a run must not hold what observers hold."""


def heard(audience: Audience) -> tuple[Listener, ...]:
    """The listeners that are still there."""
    return tuple(listener for ref in audience if (listener := ref()) is not None)


def add_topmost(known: set[str], checkpoint_ns: str) -> None:
    """Add a namespace, unless it is nested below one that is known."""
    parts = checkpoint_ns.split("|")
    if not any("|".join(parts[: n + 1]) in known for n in range(len(parts))):
        known.add(checkpoint_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a start event says about a chain, graph, node or tool."""

    run_id: UUID
    parent_run_id: UUID | None
    name: str | None
    tags: tuple[str, ...]
    metadata: Mapping[str, Any]


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
    thread_id: str | None = None
    """The thread whose branches they are."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Everything to release, the deepest first."""
        return (*reversed(self.descendants), *self.paths)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        return {
            "paths": list(self.paths),
            "descendants": list(self.descendants),
            "reason": self.reason,
            "back_to": self.back_to,
        }


@dataclass(slots=True, kw_only=True)
class CallTotals:
    """What the model calls of one step came to."""

    n_calls: int = 0
    n_reused_tokens: int = 0
    n_prefilled_tokens: int = 0
    n_generated_tokens: int = 0
    segments: list[int] = field(default_factory=list)
    """Tips of the calls' paths, in the order they ended."""

    def add(self, call: CallTotals) -> None:
        """Count more calls."""
        self.n_calls += call.n_calls
        self.n_reused_tokens += call.n_reused_tokens
        self.n_prefilled_tokens += call.n_prefilled_tokens
        self.n_generated_tokens += call.n_generated_tokens
        self.segments += call.segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What the failed or cancelled attempts at one visit of a node may have left."""

    thread_id: str | None
    graphs: frozenset[str]
    """Namespaces of the subgraphs and tasks that ran in them."""
    since: Serials
    """Paths begun before the first of them."""
    until: Serials
    """Paths begun before the last of them ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class Root:
    """One outermost run that a handler sees, and all that happens inside it."""

    run_id: UUID
    bus: EventBus
    audience: Audience
    branches: BranchLedger = field(default_factory=BranchLedger)
    """Those of steps without a thread; they go with the run."""
    run_ids: set[UUID] = field(default_factory=set)
    """The live runs inside."""
    call_ids: set[UUID] = field(default_factory=set)
    """The live model calls inside."""
    steps: dict[UUID, Step] = field(default_factory=dict)
    """The live steps."""
    namespaces: dict[str | None, set[str]] = field(default_factory=dict)
    """By thread: the topmost namespaces in which something ran."""
    n_starts: Counter[str] = field(default_factory=Counter)
    """Attempts at each visit that is not done, by namespace."""
    unfinished: dict[str, Unfinished] = field(default_factory=dict)
    """By namespace: visits whose last attempt failed or was cancelled."""
    interrupted: set[str | None] = field(default_factory=set)
    """Threads that wait for a resume."""
    swept: set[str | None] = field(default_factory=set)
    """Threads whose segments were released when the run ended."""
    first_supersteps: dict[UUID | None, int | None] = field(default_factory=dict)
    """By graph run: the superstep it started with."""
    is_resumed: bool = False
    is_ended: bool = False
    n_events: int = 0

    @property
    def origin(self) -> Origin:
        """What the bus reports its events under."""
        return Origin(run_id=self.run_id)

    def note_place(self, thread_id: str | None, checkpoint_ns: str) -> None:
        """Remember where something ran; what is nested below a known place needs no note."""
        add_topmost(self.namespaces.setdefault(thread_id, set()), checkpoint_ns)

    def may_repeat(self, step: Step) -> bool:
        """Whether an earlier attempt at this visit may have left paths."""
        if self.n_starts[step.ref.checkpoint_ns] > 1:
            return True
        return self.is_resumed and step.ref.step == self.first_supersteps.get(step.graph_run_id)

    def is_given_up(self, step: Step) -> bool:
        """Whether a path that this step makes only now is wanted by nobody."""
        ref = step.ref
        return self.is_ended and (
            ref.thread_id in self.swept or ref.checkpoint_ns in self.unfinished
        )

    def end(self) -> None:
        """Keep only what late calls need: whether their paths are still wanted."""
        self.is_ended = True
        self.branches = BranchLedger()
        for books in (self.run_ids, self.call_ids, self.steps, self.namespaces, self.n_starts):
            books.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """One attempt at one visit of a node."""

    run_id: UUID
    graph_run_id: UUID | None
    root: Root
    ref: StepRef
    serials: Serials
    """Paths begun before this attempt."""
    started: Started
    audience: Audience
    start_event: KVEvent | None = None
    graphs: set[str] = field(default_factory=set)
    """Namespaces of the subgraphs and tasks that ran in it, the topmost ones."""
    branches: dict[str, None] = field(default_factory=dict)
    """Branches opened in it, in order."""
    staged: list[PrunePlan] = field(default_factory=list)
    totals: CallTotals = field(default_factory=CallTotals)

    @property
    def origin(self) -> Origin:
        """What the bus reports its events under."""
        return Origin(
            run_id=self.run_id,
            graph_run_id=self.graph_run_id,
            tags=self.started.tags,
            metadata=self.started.metadata,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One live chain, graph, node or tool run: where it belongs."""

    root: Root
    step: Step | None
    """The innermost step around it (itself, if it is one)."""
    thread_id: str | None
    seen_by: Audience
