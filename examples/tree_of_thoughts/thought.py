"""The tree of thoughts as the graph's state: one thought is one more city of a route.

It knows no search and no model; messages are carried, never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypedDict

from langchain_core.messages import BaseMessage

from .problem import TripProblem

Status = Literal["new", "live", "pruned", "dead", "done"]
ROOT = "trunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """A beginning of a route, and the conversation that led to it."""

    id: str
    """Its route, which is also the name of its branch in the KV cache."""
    parent: str | None
    route: tuple[str, ...]
    day: int
    """Day on which the last city is left."""
    messages: tuple[BaseMessage, ...] = field(default=(), repr=False)
    """From the problem to the reply that named the last city: a child's begins with it."""
    status: Status = "new"
    """`new`: just proposed; `live`: may be continued; `pruned`: others were better; `dead`:
    breaks a constraint or leads nowhere; `done`: a valid plan."""
    score: float | None = None
    """The model's estimate that all dates can be kept, from 0 to 1."""
    n_votes: int = 1
    """How many of the samples proposed it."""
    options: tuple[str, ...] = ()
    """The cities it was chosen from."""
    is_fallback: bool = False
    """Whether no reply named a city of the list, and the program chose."""
    reason: str = ""
    """Why it is dead or pruned."""

    @property
    def city(self) -> str | None:
        """The last city; `None` at the root."""
        return self.route[-1] if self.route else None


def thought_id(route: tuple[str, ...]) -> str:
    """The id of the thought with this route."""
    return " > ".join(route) or ROOT


def with_thoughts(old: dict[str, Thought], new: dict[str, Thought]) -> dict[str, Thought]:
    """Reducer: later versions of a thought replace earlier ones; nothing is lost."""
    return {**old, **new}


class PlannerState(TypedDict, total=False):
    """State of the graph."""

    problem: TripProblem
    nodes: Annotated[dict[str, Thought], with_thoughts]
    frontier: list[str]
    """Thoughts to continue in the next round."""
    best: str | None
    """The thought that is a valid plan, or else the longest route found."""
    leaning: dict[str, float]
    """Where the model stands between no and yes; see `prompts.leanings`."""
    outcome: str
    """Why the search ended; empty while it runs."""


def children_of(nodes: dict[str, Thought], parent: str) -> list[Thought]:
    """The thoughts right below `parent`, in the order they were made."""
    return [thought for thought in nodes.values() if thought.parent == parent]


def lineage(nodes: dict[str, Thought], thought: Thought) -> list[Thought]:
    """`thought`, its parent, and so on up to the root."""
    line = [thought]
    while (parent := line[-1].parent) is not None:
        line.append(nodes[parent])
    return line
