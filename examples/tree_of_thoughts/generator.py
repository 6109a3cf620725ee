"""Makes trip problems from a seed: the same seed, the same problem, on every machine.

A problem is built around one valid route, so that it always has a solution; it knows no model.
"""

from __future__ import annotations

import random
from itertools import pairwise

from .problem import Attendance, DateWindow, ProblemError, TripProblem, Visit

CITIES = (
    "Athens",
    "Bergen",
    "Bruges",
    "Cork",
    "Dublin",
    "Genoa",
    "Graz",
    "Leeds",
    "Lyon",
    "Krakow",
    "Malmo",
    "Nantes",
    "Oslo",
    "Porto",
    "Prague",
    "Riga",
    "Seville",
    "Sofia",
    "Split",
    "Turin",
    "Vienna",
    "Zagreb",
)
OCCASIONS: tuple[tuple[str, Attendance], ...] = (
    ("meet a friend", "any"),
    ("visit an aunt", "any"),
    ("attend a wedding", "any"),
    ("attend a conference", "all"),
    ("see a food fair", "all"),
)
MIN_CITIES, MAX_CITIES = 3, 8
_SHORTEST_STAY, _LONGEST_STAY = 2, 5
_EXTRA_FLIGHTS = 0.35
"""Share of the other pairs of cities that get a flight too: enough for wrong turns."""


def generate(n_cities: int, seed: int) -> TripProblem:
    """Make the problem of this size and seed; it has at least one valid plan.

    Raises:
        ProblemError: `n_cities` is out of range.
    """
    if not MIN_CITIES <= n_cities <= MAX_CITIES:
        msg = f"problems of {MIN_CITIES} to {MAX_CITIES} cities can be made, found {n_cities}"
        raise ProblemError(msg)
    rng = random.Random(f"trip {n_cities} {seed}")
    route = tuple(rng.sample(CITIES, n_cities))
    durations = {city: rng.randint(_SHORTEST_STAY, _LONGEST_STAY) for city in sorted(route)}
    flights = _flights(route, rng)
    name = f"trip_{n_cities}_cities_seed_{seed}"
    bare = TripProblem(name=name, durations=durations, flights=flights, golden_route=route)
    return TripProblem(
        name=name,
        durations=durations,
        flights=flights,
        windows=_windows(bare.visits(route), rng),
        golden_route=route,
    )


def _flights(route: tuple[str, ...], rng: random.Random) -> frozenset[tuple[str, str]]:
    legs = {frozenset(leg) for leg in pairwise(route)}
    pairs = [(a, b) for i, a in enumerate(route) for b in route[i + 1 :]]
    chosen = [(a, b) for a, b in pairs if {a, b} in legs or rng.random() < _EXTRA_FLIGHTS]
    return frozenset([*chosen, *((b, a) for a, b in chosen)])


def _windows(visits: tuple[Visit, ...], rng: random.Random) -> tuple[DateWindow, ...]:
    """Dates that `visits` keeps, for about half of the cities."""
    n_windows = max(1, round(len(visits) / 2))
    dated = sorted(rng.sample(range(len(visits)), n_windows))
    windows = [_window(visits[place], visits[-1].last_day, rng) for place in dated]
    return tuple(sorted(windows, key=lambda window: window.city))


def _window(visit: Visit, n_days: int, rng: random.Random) -> DateWindow:
    occasion, attendance = rng.choice(OCCASIONS)
    if attendance == "all":
        first = rng.randint(visit.first_day, visit.last_day - 1)
        last = rng.randint(first + 1, visit.last_day)
    else:
        day = rng.randint(visit.first_day, visit.last_day)
        first = max(1, day - rng.randint(0, 2))
        last = min(n_days, day + rng.randint(0, 2))
    return DateWindow(
        city=visit.city, first_day=first, last_day=last, attendance=attendance, occasion=occasion
    )
