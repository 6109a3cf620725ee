"""Runs the planner, or the chain-of-thought baseline, on one problem and measures the run.

It must not know how anything is shown.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig

from sidequest_langchain import SideQuestChatModel, attach
from sidequest_langchain.graph.events import KVEvent

from .agreement import Agreement, agreement
from .asking import Asker, CallRecord, Question
from .checker import Violation, check_plan
from .graph import PlannerGraph, build_graph
from .problem import TripProblem, Visit
from .prompts import chain_of_thought, read_plan
from .replay import Kept, replay_without_release
from .resident import resident_bytes
from .search import Limits
from .solver import solve
from .thought import Thought

_REASONS = {"beam": "prune", "calibrated": "prune", "backtracked": "backtrack"}
"""What the graph gives as its reasons, and what they are called."""
PLAN: dict[str, Any] = {"max_tokens": 240, "temperature": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A branch that was given up, and what that freed."""

    thought: str
    reason: str
    n_bytes: int
    n_tokens: int


class Watcher(Protocol):
    """Is told what happens while it happens, from any thread."""

    def begin(self, problem: TripProblem, method: str) -> None:
        """A problem is begun, by `beam`, `dfs` or `cot`."""

    def call(self, record: CallRecord) -> None:
        """A model call ended."""

    def tree(self, nodes: Mapping[str, Thought], resident: Mapping[str, int]) -> None:
        """The tree changed; `resident` has the bytes of each thought."""

    def release(self, release: Release) -> None:
        """A branch was given up."""

    def replaying(self, n_done: int, n_calls: int) -> None:
        """The calls are fed again without releases."""

    def end(self, run: Run) -> None:
        """The problem is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One problem, one method, and everything measured."""

    problem: TripProblem
    method: str
    outcome: str
    plan: tuple[Visit, ...]
    violations: tuple[Violation, ...]
    records: tuple[CallRecord, ...] = field(repr=False)
    wall_s: float
    """Without the replay."""
    nodes: Mapping[str, Thought] = field(default_factory=dict, repr=False)
    releases: tuple[Release, ...] = ()
    peak_bytes: int | None = None
    """`None`: the model has no cache of ours to measure."""
    kept: Kept | None = None
    """The same run without releases; `None`: not measured."""
    agreement: Agreement = field(default_factory=Agreement)

    @property
    def is_solved(self) -> bool:
        """Whether the plan is whole and violates nothing."""
        return not self.violations

    @property
    def n_calls(self) -> int:
        """Model calls; several samples of one prompt are one."""
        return len({record.n_call for record in self.records})

    def n_tokens(self, kind: str) -> int:
        """Tokens of all samples: `prompt`, `reused`, `prefilled` or `generated`."""
        return sum(getattr(record, f"n_{kind}_tokens") for record in self.records)


def run_planner(
    model: BaseChatModel,
    problem: TripProblem,
    limits: Limits,
    watcher: Watcher,
    *,
    seed: int = 0,
    is_replayed: bool = True,
) -> Run:
    """Search a plan with the tree of thoughts.

    Args:
        model: Any chat model; releases happen, and are measured, on ours.
        problem: The trip.
        limits: Search mode and how far it may go.
        watcher: Is told what happens.
        seed: Of the sampled proposals.
        is_replayed: Whether to measure the same calls without releases afterwards.
    """
    watcher.begin(problem, limits.mode)
    asker, releases = Asker(model, watcher.call), list[Release]()

    def on_event(event: KVEvent) -> None:
        if event.name == "sidequest.release" and event.data["reason"] in _REASONS:
            release = _release(event.data)
            if release.n_bytes:
                releases.append(release)
                watcher.release(release)

    graph = build_graph(asker, limits, seed=seed)
    ours = model if isinstance(model, SideQuestChatModel) else None
    if ours is not None:
        graph = attach(graph, ours, on_event=on_event)
    meter = _Meter(ours)
    began_s = time.perf_counter()
    try:
        state = _stream(graph, problem, limits, watcher, meter)
        wall_s = time.perf_counter() - began_s
        peak_bytes = meter.peak_bytes()
    finally:
        meter.clear()
    kept = None
    if ours is not None and is_replayed:
        kept = replay_without_release(ours, asker.records, watcher.replaying)
    nodes: dict[str, Thought] = state["nodes"]
    plan = problem.visits(nodes[state["best"]].route)
    run = Run(
        problem=problem,
        method=limits.mode,
        outcome=state["outcome"],
        plan=plan,
        violations=check_plan(problem, plan),
        records=asker.records,
        wall_s=wall_s,
        nodes=nodes,
        releases=tuple(releases),
        peak_bytes=peak_bytes,
        kept=kept,
        agreement=agreement(nodes.values(), solve(problem)),
    )
    watcher.end(run)
    return run


def run_chain_of_thought(model: BaseChatModel, problem: TripProblem, watcher: Watcher) -> Run:
    """Ask for the whole plan at once: one greedy answer with its reasoning, no tree."""
    watcher.begin(problem, "cot")
    asker = Asker(model, watcher.call)
    meter = _Meter(model if isinstance(model, SideQuestChatModel) else None)
    question = Question(
        kind="plan",
        thought="cot",
        parent=None,
        prompts=[chain_of_thought(problem)],
        settings=PLAN,
    )
    began_s = time.perf_counter()
    try:
        ((reply,),) = asker.ask(question, meter.config)
        wall_s = time.perf_counter() - began_s
        peak_bytes = meter.peak_bytes()
    finally:
        meter.clear()
    plan = problem.visits(read_plan(str(reply.text), problem.cities))
    violations = check_plan(problem, plan)
    run = Run(
        problem=problem,
        method="cot",
        outcome="no valid plan" if violations else "solved",
        plan=plan,
        violations=violations,
        records=asker.records,
        wall_s=wall_s,
        peak_bytes=peak_bytes,
    )
    watcher.end(run)
    return run


class _Meter:
    """One thread of the cache: what it holds, and how much at most."""

    def __init__(self, model: SideQuestChatModel | None) -> None:
        self._model = model
        self._thread_id = f"planner-{uuid.uuid4().hex}"
        self._before_bytes = 0
        if model is not None:
            self._before_bytes = model.kv.usage().n_bytes
            model.kv.reset_peak()

    @property
    def config(self) -> RunnableConfig:
        return {"configurable": {"thread_id": self._thread_id}}

    def resident(self, nodes: Mapping[str, Thought]) -> dict[str, int]:
        if self._model is None:
            return {}
        return resident_bytes(self._model.kv.segments(self._thread_id), nodes)

    def peak_bytes(self) -> int | None:
        if self._model is None:
            return None
        return self._model.kv.usage().peak_resident_bytes - self._before_bytes

    def clear(self) -> None:
        if self._model is not None:
            self._model.kv.clear(self._thread_id)


def _stream(
    graph: PlannerGraph, problem: TripProblem, limits: Limits, watcher: Watcher, meter: _Meter
) -> dict[str, Any]:
    state: dict[str, Any] = {"nodes": {}, "best": None, "outcome": ""}
    config: RunnableConfig = {**meter.config, "recursion_limit": 20 + 5 * limits.max_calls}
    for updates in graph.stream({"problem": problem}, config, stream_mode="updates"):
        for update in updates.values():
            if update:
                nodes = {**state["nodes"], **update.get("nodes", {})}
                state = {**state, **update, "nodes": nodes}
                watcher.tree(nodes, meter.resident(nodes))
    return state


def _release(data: Mapping[str, Any]) -> Release:
    return Release(
        thought=data["path"],
        reason=_REASONS[data["reason"]],
        n_bytes=data["bytes"],
        n_tokens=data["tokens"],
    )
