"""Solves a trip problem exactly, by depth-first search; the planner's answer key.

The search of the planner itself must not use it: it says afterwards what was possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .checker import check_plan, check_prefix
from .problem import TripProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Every valid order of the cities, and what it took to find them."""

    routes: tuple[tuple[str, ...], ...]
    n_expanded: int
    """Beginnings of a route that were looked at."""
    n_dead_ends: int
    """Those of them that could not be continued."""

    @property
    def is_solvable(self) -> bool:
        """Whether any valid order exists."""
        return bool(self.routes)

    def completes(self, prefix: tuple[str, ...]) -> bool:
        """Whether a valid route begins with `prefix`."""
        return any(route[: len(prefix)] == prefix for route in self.routes)


def solve(problem: TripProblem) -> Solution:
    """Find every valid route, with the look-ahead that `check_prefix` gives."""
    routes: list[tuple[str, ...]] = []
    n_expanded = n_dead_ends = 0
    open_routes: list[tuple[str, ...]] = [(city,) for city in reversed(problem.cities)]
    while open_routes:
        route = open_routes.pop()
        n_expanded += 1
        if len(route) == len(problem.cities):
            if check_plan(problem, problem.visits(route)):
                n_dead_ends += 1
            else:
                routes.append(route)
        elif check_prefix(problem, route):
            n_dead_ends += 1
        else:
            open_routes.extend(reversed([*_extensions(problem, route)]))
    return Solution(routes=tuple(routes), n_expanded=n_expanded, n_dead_ends=n_dead_ends)


def _extensions(problem: TripProblem, route: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for city in problem.destinations(route[-1]):
        if city not in route:
            yield (*route, city)
