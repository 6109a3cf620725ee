"""The planner as a LangGraph graph: rounds of propose, gather, evaluate and select.

    read ─ calibrate ─ propose ×k ─ gather ─ evaluate ×k ─ select ─┬─ propose ×k ...   (Send)
                                                                  └─ END

Two search modes on one graph: `beam` keeps the best and prunes the losers, `dfs` goes down the
best child and backtracks from dead ends. Every model call runs inside of `branch(...)`, so that
a thought's KV goes when the thought is given up. It must not know the engine: the public names
of sidequest_langchain are all it uses, and any chat model serves.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypedDict

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send

from sidequest_langchain import backtrack, branch, keep_only, prune

from .asking import Asker, Question
from .problem import TripProblem
from .prompts import (
    CheckKind,
    calibration_checks,
    date_checks,
    leanings,
    next_city_turn,
    read_city,
    score_of,
    trunk,
)
from .search import Decision, Limits, decide, options_of
from .thought import ROOT, PlannerState, Thought, thought_id

PROBES = "probes"
"""The branch of the questions that calibrate."""
READ: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0}
PROPOSE: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
EVALUATE: dict[str, Any] = {
    "max_tokens": 1,
    "temperature": 0.0,
    "logprobs": True,
    "top_logprobs": 10,
}

PlannerGraph: TypeAlias = CompiledStateGraph[Any, Any, Any, Any]
Update: TypeAlias = dict[str, Any]


class Proposing(TypedDict):
    """What a `propose` is sent."""

    problem: TripProblem
    thought: Thought
    options: list[str]


class Evaluating(TypedDict):
    """What an `evaluate` is sent."""

    problem: TripProblem
    thought: Thought
    leaning: dict[CheckKind, float]


def build_graph(asker: Asker, limits: Limits, *, seed: int = 0) -> PlannerGraph:
    """Compile the planner.

    Args:
        asker: Asks the model.
        limits: Search mode and how far it may go.
        seed: Makes the sampled proposals repeatable.
    """
    nodes = _Nodes(asker=asker, limits=limits, seed=seed)
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(PlannerState)
    builder.add_node("read", nodes.read)
    builder.add_node("calibrate", nodes.calibrate)
    builder.add_node("propose", nodes.propose, input_schema=Proposing)
    builder.add_node("gather", nodes.gather)
    builder.add_node("evaluate", nodes.evaluate, input_schema=Evaluating)
    builder.add_node("select", nodes.select)
    builder.add_edge(START, "read")
    builder.add_edge("read", "calibrate")
    builder.add_edge("propose", "gather")
    builder.add_edge("evaluate", "select")
    return builder.compile(name="travel planner")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """The nodes of one graph."""

    asker: Asker
    limits: Limits
    seed: int

    def read(self, state: PlannerState, config: RunnableConfig) -> Update:
        """Let the model read the problem: the trunk of every later prompt."""
        problem = state["problem"]
        prompt = trunk(problem)
        with branch(ROOT):
            question = Question(
                kind="read", thought=ROOT, parent=None, prompts=[prompt], settings=READ
            )
            ((reply,),) = self.asker.ask(question, config)
        root = Thought(
            id=ROOT, parent=None, route=(), day=1, messages=(*prompt, reply), status="live"
        )
        return {"nodes": {ROOT: root}, "frontier": [ROOT], "best": ROOT, "outcome": ""}

    def calibrate(self, state: PlannerState, config: RunnableConfig) -> Command[Any]:
        """Ask what is known, to see how far the model leans to yes or no."""
        problem, nodes = state["problem"], state["nodes"]
        checks = calibration_checks(problem)
        with branch(PROBES, parent=ROOT):
            question = Question(
                kind="calibrate",
                thought=PROBES,
                parent=ROOT,
                prompts=[[*nodes[ROOT].messages, check.turn] for check in checks],
                settings=EVALUATE,
            )
            replies = [reply for (reply,) in self.asker.ask(question, config)]
        prune(PROBES, reason="calibrated")
        return Command(
            update={"leaning": leanings(checks, replies)},
            goto=self._propose_all(problem, nodes, [ROOT]),
        )

    def propose(self, state: Proposing, config: RunnableConfig) -> Update:
        """Let the model name next cities for one thought: one call, several samples."""
        problem, thought, options = state["problem"], state["thought"], state["options"]
        turn = next_city_turn(problem, thought.route, thought.day, options)
        n_samples = min(self.limits.n_samples, len(options))
        # With one option there is nothing to sample, but the conversation goes on with a reply.
        settings = {**PROPOSE, "temperature": PROPOSE["temperature"] if len(options) > 1 else 0.0}
        settings["seed"] = _seed_of(self.seed, thought.id, options)
        with branch(thought.id, parent=thought.parent):
            question = Question(
                kind="propose",
                thought=thought.id,
                parent=thought.parent,
                prompts=[[*thought.messages, turn]],
                settings=settings,
                n_samples=n_samples,
            )
            (replies,) = self.asker.ask(question, config)
        children = _children(problem, thought, turn, replies, options)
        return {"nodes": {child.id: child for child in children}}

    def gather(self, state: PlannerState) -> Command[Any]:
        """Have every unfinished proposal of this round scored."""
        problem, nodes = state["problem"], state["nodes"]
        sends = [
            Send(
                "evaluate",
                {"problem": problem, "thought": thought, "leaning": state["leaning"]},
            )
            for thought in nodes.values()
            if thought.status == "new" and len(thought.route) < len(problem.cities)
        ]
        return Command(goto=sends or "select")

    def evaluate(self, state: Evaluating, config: RunnableConfig) -> Update:
        """Let the model estimate whether the dates can still be kept: one token a date."""
        problem, thought = state["problem"], state["thought"]
        checks = date_checks(problem, thought.route)
        replies: list[AIMessage] = []
        if checks:
            with branch(thought.id, parent=thought.parent):
                question = Question(
                    kind="evaluate",
                    thought=thought.id,
                    parent=thought.parent,
                    prompts=[[*thought.messages, check.turn] for check in checks],
                    settings=EVALUATE,
                )
                replies = [reply for (reply,) in self.asker.ask(question, config)]
        score = score_of(checks, replies, state["leaning"])
        return {"nodes": {thought.id: replace(thought, status="live", score=score)}}

    def select(self, state: PlannerState) -> Command[Any]:
        """Choose what to go on with, and give up the KV of what is not."""
        problem, frontier = state["problem"], state["frontier"]
        decision = decide(problem, state["nodes"], frontier, self.limits)
        nodes = {**state["nodes"], **decision.changed}
        outcome, growing = decision.outcome, decision.frontier
        if growing and self.asker.n_calls >= self.limits.max_calls:
            outcome, growing = f"stopped after {self.asker.n_calls} model calls", []
        update = {
            "nodes": decision.changed,
            "frontier": growing,
            "best": decision.best,
            "outcome": outcome,
        }
        goto = self._propose_all(problem, nodes, growing) or END
        if decision.back_to is not None:
            return backtrack(decision.back_to, prune=decision.given_up, update=update, goto=goto)
        if self.limits.mode == "beam":  # depth-first may come back to what it leaves open
            _give_up(decision, nodes, frontier)
        return Command(update=update, goto=goto)

    def _propose_all(
        self, problem: TripProblem, nodes: dict[str, Thought], frontier: Sequence[str]
    ) -> list[Send]:
        return [
            Send(
                "propose",
                {
                    "problem": problem,
                    "thought": nodes[id],
                    "options": options_of(problem, nodes, nodes[id]),
                },
            )
            for id in frontier
        ]


def _give_up(decision: Decision, nodes: dict[str, Thought], frontier: Sequence[str]) -> None:
    """Release what a beam left behind: parents without a kept child, and the kept ones' rivals."""
    barren = [id for id in decision.given_up if id in frontier]
    prune(*barren, reason="beam")
    if decision.frontier:
        parents = {nodes[id].parent for id in decision.frontier} - {None}
        keep_only(*decision.frontier, under=sorted(p for p in parents if p), reason="beam")
    else:
        prune(*(id for id in decision.given_up if id not in barren), reason="beam")


def _children(
    problem: TripProblem,
    thought: Thought,
    turn: Any,
    replies: Sequence[AIMessage],
    options: Sequence[str],
) -> list[Thought]:
    """One thought for each city that the replies name.

    Fallback: if none of them names one of the options, the first option is taken, in the order
    in which the problem lists them, and marked as such.
    """
    named = [(read_city(str(reply.text), options), reply) for reply in replies]
    votes = Counter(city for city, _ in named if city)
    first_reply: dict[str, AIMessage] = {}
    for city, reply in named:
        if city:
            first_reply.setdefault(city, reply)
    is_fallback = not first_reply
    if is_fallback:
        first_reply = {options[0]: replies[0]}
    children = []
    for city, reply in first_reply.items():
        route = (*thought.route, city)
        children.append(
            Thought(
                id=thought_id(route),
                parent=thought.id,
                route=route,
                day=problem.visits(route)[-1].last_day,
                messages=(*thought.messages, turn, reply),
                n_votes=votes.get(city, 0),
                options=tuple(options),
                is_fallback=is_fallback,
            )
        )
    return children


def _seed_of(seed: int, thought: str, options: Sequence[str]) -> int:
    """A seed of its own for every question, the same on every machine."""
    return zlib.crc32(f"{seed} {thought} {' '.join(options)}".encode())
