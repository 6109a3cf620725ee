"""What a round of search decides, from the scores: beam and depth-first.

The model's scores say in which order thoughts are tried; the rules say, when a thought's turn
comes, whether it is a dead end. Decisions are plain facts: carrying them out, and freeing the
branches that were given up, is the graph's part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from .checker import check_plan, check_prefix
from .problem import TripProblem
from .thought import ROOT, Status, Thought, children_of, lineage

Mode: TypeAlias = Literal["beam", "dfs"]
MODES: tuple[Mode, ...] = ("beam", "dfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a search may go."""

    mode: Mode = "beam"
    beam_width: int = 3
    n_samples: int = 5
    max_depth: int | None = None
    """Longest route that is still continued; `None`: all the cities."""
    max_calls: int = 150
    """Model calls after which no new round begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome of one round."""

    changed: dict[str, Thought] = field(default_factory=dict)
    """Thoughts with a new status."""
    frontier: list[str] = field(default_factory=list)
    """Thoughts to continue; none: the search is over."""
    given_up: list[str] = field(default_factory=list)
    """Branches that no longer need their KV."""
    back_to: str | None = None
    """The thought the search went back to, if it met a dead end."""
    best: str | None = None
    outcome: str = ""
    """Why the search is over."""


def options_of(problem: TripProblem, nodes: dict[str, Thought], thought: Thought) -> list[str]:
    """Cities that a direct flight leads to and that were not tried from here yet."""
    near = problem.destinations(thought.route[-1]) if thought.route else problem.cities
    tried = {child.city for child in children_of(nodes, thought.id)}
    return [city for city in near if city not in thought.route and city not in tried]


def decide(
    problem: TripProblem, nodes: dict[str, Thought], frontier: list[str], limits: Limits
) -> Decision:
    """Decide what follows a round in which `frontier` was continued and scored."""
    step = _decide_beam if limits.mode == "beam" else _decide_dfs
    decision = step(problem, nodes, frontier, limits)
    after = {**nodes, **decision.changed}
    done = next((t.id for t in after.values() if t.status == "done"), None)
    if done is not None:
        return replace(decision, best=done, frontier=[], outcome="solved")
    if not decision.frontier and not decision.outcome:
        decision = replace(decision, outcome="every thought was a dead end")
    best = max(after.values(), key=lambda t: (len(t.route), t.score or 0.0))
    return replace(decision, best=best.id)


def ranked(thoughts: list[Thought]) -> list[Thought]:
    """Best first: by the model's score, then by how many samples proposed it."""
    return sorted(thoughts, key=lambda t: (-(t.score or 0.0), -t.n_votes))


def judged(problem: TripProblem, thought: Thought) -> Thought:
    """The thought after the rules have looked at it: `done`, `dead` or `live`."""
    is_whole = len(thought.route) == len(problem.cities)
    if is_whole:
        faults = check_plan(problem, problem.visits(thought.route))
    else:
        faults = check_prefix(problem, thought.route)
    if faults:
        return _with(thought, "dead", "; ".join(fault.message for fault in faults))
    return replace(thought, status="done" if is_whole else "live")


def _decide_beam(
    problem: TripProblem, nodes: dict[str, Thought], frontier: list[str], limits: Limits
) -> Decision:
    """Keep the best `beam_width` of all children; the others and their barren parents go."""
    changed: dict[str, Thought] = {}
    kept: list[Thought] = []
    for thought in ranked([t for parent in frontier for t in children_of(nodes, parent)]):
        if thought.status not in ("new", "live"):
            continue
        if len(kept) == limits.beam_width or any(t.status == "done" for t in kept):
            changed[thought.id] = _with(thought, "pruned", "others scored higher")
            continue
        changed[thought.id] = judged(problem, thought)
        if changed[thought.id].status != "dead":
            kept.append(changed[thought.id])
    spared = {above.id for thought in kept for above in lineage(nodes, thought)}
    for parent in frontier:
        if parent not in spared:
            is_barren = all(
                changed.get(c.id, c).status == "dead" for c in children_of(nodes, parent)
            )
            status: Status = "dead" if is_barren else "pruned"
            changed[parent] = _with(nodes[parent], status, "no child was kept")
    open_ids = [t.id for t in kept if t.status == "live" and _may_grow(t, limits)]
    given_up = [id for id, t in changed.items() if t.status in ("dead", "pruned") and id != ROOT]
    return Decision(changed=changed, frontier=open_ids, given_up=given_up)


def _decide_dfs(
    problem: TripProblem, nodes: dict[str, Thought], frontier: list[str], limits: Limits
) -> Decision:
    """Go down to the best child; from a dead end back up to the nearest open choice."""
    changed: dict[str, Thought] = {}
    here = nodes[frontier[0]]
    while True:
        for thought in ranked(children_of(nodes, here.id)):
            if thought.id in changed or thought.status not in ("new", "live"):
                continue
            changed[thought.id] = verdict = judged(problem, thought)
            if verdict.status == "done" or (
                verdict.status == "live" and _may_grow(verdict, limits)
            ):
                return _going_on(changed, [verdict.id], here)
        if options_of(problem, nodes, here):
            return _going_on(changed, [here.id], here)
        if here.parent is None:
            return _going_on(changed, [], here)
        changed[here.id] = _with(here, "dead", "every way on was tried")
        here = nodes[here.parent]


def _going_on(changed: dict[str, Thought], frontier: list[str], here: Thought) -> Decision:
    lost = [id for id, t in changed.items() if t.status == "dead"]
    return Decision(
        changed=changed, frontier=frontier, given_up=lost, back_to=here.id if lost else None
    )


def _may_grow(thought: Thought, limits: Limits) -> bool:
    return limits.max_depth is None or len(thought.route) < limits.max_depth


def _with(thought: Thought, status: Status, reason: str) -> Thought:
    return replace(thought, status=status, reason=reason)
