"""Names every constraint that a plan, or the beginning of one, violates; it knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from .problem import DateWindow, TripProblem, Visit

Fault = Literal[
    "unknown_city",
    "repeated_city",
    "missing_city",
    "first_day",
    "last_day",
    "shared_day",
    "duration",
    "flight",
    "date",
    "stranded",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One constraint that is not kept."""

    fault: Fault
    message: str


def check_plan(problem: TripProblem, plan: Sequence[Visit]) -> tuple[Violation, ...]:
    """Every constraint that a finished plan violates, by name; empty for a valid plan.

    A plan is judged by its days, not by its order alone. Cities that the problem does not know
    are reported once and not judged further.
    """
    known = [visit for visit in plan if visit.city in problem.durations]
    return (
        *_city_faults(problem, plan),
        *_end_faults(problem, plan),
        *_join_faults(problem, plan),
        *(fault for visit in known for fault in _visit_faults(problem, visit)),
    )


def check_prefix(problem: TripProblem, route: tuple[str, ...]) -> tuple[Violation, ...]:
    """Why no plan can begin with `route`, as far as one step of looking ahead tells.

    That is: a date already missed, in a visited city or in one that can only be reached too
    late, a leg without a flight, or no direct flight to any city that is left. Empty does not
    mean that the route can be completed.
    """
    visits = problem.visits(route)
    faults = [*_join_faults(problem, visits)]
    faults += [fault for visit in visits for fault in _visit_faults(problem, visit)]
    left = [city for city in problem.durations if city not in route]
    if visits and left:
        here, today = visits[-1].city, visits[-1].last_day
        for window in problem.windows:
            if window.city in left and window.is_missed_by_arriving(today):
                faults.append(_too_late(window, today))
        if not any(problem.has_flight(here, city) for city in left):
            message = f"no direct flight from {here} to any of {', '.join(left)}"
            faults.append(Violation(fault="stranded", message=message))
    return tuple(faults)


def _city_faults(problem: TripProblem, plan: Sequence[Visit]) -> list[Violation]:
    faults: list[Violation] = []
    seen: set[str] = set()
    for visit in plan:
        if visit.city not in problem.durations:
            message = f"{visit.city} is not one of the cities to visit"
            faults.append(Violation(fault="unknown_city", message=message))
        elif visit.city in seen:
            message = f"{visit.city} is visited more than once"
            faults.append(Violation(fault="repeated_city", message=message))
        seen.add(visit.city)
    for city in problem.durations:
        if city not in seen:
            faults.append(Violation(fault="missing_city", message=f"{city} is not visited"))
    return faults


def _end_faults(problem: TripProblem, plan: Sequence[Visit]) -> list[Violation]:
    faults: list[Violation] = []
    if plan and plan[0].first_day != 1:
        message = f"the trip starts on day {plan[0].first_day}, not on day 1"
        faults.append(Violation(fault="first_day", message=message))
    if plan and plan[-1].last_day != problem.n_days:
        message = f"the trip ends on day {plan[-1].last_day}, not on day {problem.n_days}"
        faults.append(Violation(fault="last_day", message=message))
    return faults


def _join_faults(problem: TripProblem, plan: Sequence[Visit]) -> list[Violation]:
    faults: list[Violation] = []
    for before, after in pairwise(plan):
        if before.last_day != after.first_day:
            message = (
                f"{before.city} is left on day {before.last_day}, "
                f"but {after.city} is reached on day {after.first_day}"
            )
            faults.append(Violation(fault="shared_day", message=message))
        if not problem.has_flight(before.city, after.city):
            message = f"no direct flight from {before.city} to {after.city}"
            faults.append(Violation(fault="flight", message=message))
    return faults


def _visit_faults(problem: TripProblem, visit: Visit) -> list[Violation]:
    faults: list[Violation] = []
    n_days = visit.last_day - visit.first_day + 1
    if n_days != problem.durations[visit.city]:
        message = f"{visit.city} has {n_days} days, not {problem.durations[visit.city]}"
        faults.append(Violation(fault="duration", message=message))
    for window in problem.windows_of(visit.city):
        if not window.is_met_by(visit):
            message = (
                f"{visit.city} on days {visit.first_day}-{visit.last_day} misses "
                f"{_dates(window)} ({window.occasion})"
            )
            faults.append(Violation(fault="date", message=message))
    return faults


def _too_late(window: DateWindow, today: int) -> Violation:
    message = (
        f"{window.city} can be reached on day {today} at the earliest, "
        f"too late for {_dates(window)} ({window.occasion})"
    )
    return Violation(fault="date", message=message)


def _dates(window: DateWindow) -> str:
    if window.first_day == window.last_day:
        return f"day {window.first_day}"
    return f"days {window.first_day}-{window.last_day}"
