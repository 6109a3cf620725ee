"""How often the model's choices agreed with what was possible, by the exact solver.

Computed after a run; the search never sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from .solver import Solution
from .thought import Thought


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Choices counted; add several runs up with `+`."""

    n_proposals: int = 0
    """Samples that named a city where both right and wrong cities were on offer."""
    n_right: int = 0
    """Those that can still become a valid plan."""
    n_right_by_chance: float = 0.0
    """How many would have been right if drawn evenly from the cities on offer."""
    n_pairs: int = 0
    """Pairs of scored thoughts of one depth of which one can become a valid plan."""
    n_pairs_right: float = 0.0
    """Those in which that one has the higher score; equal scores count half."""
    n_fallbacks: int = 0
    """Choices that the program made since no reply named a city on offer."""

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        )


def agreement(thoughts: Iterable[Thought], solution: Solution) -> Agreement:
    """Compare the thoughts of one run with the solutions of its problem."""
    listed = list(thoughts)
    total = Agreement()
    for thought in listed:
        total += _proposal(thought, solution)
    scored = [t for t in listed if t.score is not None]
    for one, other in combinations(scored, 2):
        if len(one.route) == len(other.route):
            total += _pair(one, other, solution)
    return total


def _proposal(thought: Thought, solution: Solution) -> Agreement:
    if thought.is_fallback:
        return Agreement(n_fallbacks=1)
    if not thought.route or not solution.completes(thought.route[:-1]):
        return Agreement()
    good = [o for o in thought.options if solution.completes((*thought.route[:-1], o))]
    if len(good) in (0, len(thought.options)):
        return Agreement()
    n = thought.n_votes
    return Agreement(
        n_proposals=n,
        n_right=n if thought.city in good else 0,
        n_right_by_chance=n * len(good) / len(thought.options),
    )


def _pair(one: Thought, other: Thought, solution: Solution) -> Agreement:
    can_one, can_other = solution.completes(one.route), solution.completes(other.route)
    if can_one == can_other:
        return Agreement()
    good, bad = (one, other) if can_one else (other, one)
    good_score, bad_score = good.score or 0.0, bad.score or 0.0
    right = 0.5 if good_score == bad_score else float(good_score > bad_score)
    return Agreement(n_pairs=1, n_pairs_right=right)
