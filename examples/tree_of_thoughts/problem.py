"""A multi-city trip problem and its day arithmetic; it knows no model, no search, no text.

A flight day belongs to both cities, so that n cities share n - 1 days:

    Porto 4 days, Oslo 3 days     day  1 2 3 4 5 6
                                 Porto x x x x
                                  Oslo       x x x       4 + 3 - 1 = 6 days
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidequest_langchain.errors import SideQuestError

Attendance = Literal["any", "all"]


class ProblemError(SideQuestError, ValueError):
    """A trip problem cannot be made, read or solved as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DateWindow:
    """Days on which the traveller must be in a city."""

    city: str
    first_day: int
    last_day: int
    attendance: Attendance
    """`"any"`: at least one of these days; `"all"`: every one of them."""
    occasion: str
    """What for, in words: `meet a friend`."""

    def is_met_by(self, visit: Visit) -> bool:
        """Whether a stay on the days of `visit` keeps this date."""
        if self.attendance == "all":
            return visit.first_day <= self.first_day and self.last_day <= visit.last_day
        return visit.first_day <= self.last_day and self.first_day <= visit.last_day

    def is_missed_by_arriving(self, day: int) -> bool:
        """Whether who is not in the city before `day` must miss this date."""
        return day > (self.first_day if self.attendance == "all" else self.last_day)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A stay in one city; both days count."""

    city: str
    first_day: int
    last_day: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TripProblem:
    """Cities to visit once each, for a fixed number of days, by direct flights.

    Raises:
        ProblemError: The parts contradict each other.
    """

    name: str
    durations: dict[str, int]
    """Days of each city, in the order in which the problem names them."""
    flights: frozenset[tuple[str, str]]
    """Direct flights `(from, to)`; one that goes both ways is here twice."""
    windows: tuple[DateWindow, ...] = ()
    golden_route: tuple[str, ...] = ()
    """One valid order, where it is known."""

    def __post_init__(self) -> None:
        if not self.durations:
            msg = f"{self.name}: a trip needs at least one city"
            raise ProblemError(msg)
        short = [city for city, n_days in self.durations.items() if n_days < 1]
        if short:
            msg = f"{self.name}: a stay lasts at least one day, found less for {', '.join(short)}"
            raise ProblemError(msg)
        named = {city for pair in self.flights for city in pair}
        named |= {window.city for window in self.windows} | set(self.golden_route)
        if unknown := sorted(named - set(self.durations)):
            msg = f"{self.name}: no duration is given for {', '.join(unknown)}"
            raise ProblemError(msg)

    @property
    def cities(self) -> tuple[str, ...]:
        """The cities in the order in which the problem names them."""
        return tuple(self.durations)

    @property
    def n_days(self) -> int:
        """Days of the whole trip: each flight day is shared by two cities."""
        return sum(self.durations.values()) - (len(self.durations) - 1)

    def has_flight(self, start: str, end: str) -> bool:
        """Whether a direct flight goes from `start` to `end`."""
        return (start, end) in self.flights

    def destinations(self, city: str) -> tuple[str, ...]:
        """Where direct flights from `city` go, in the order of `cities`."""
        return tuple(other for other in self.durations if (city, other) in self.flights)

    def windows_of(self, city: str) -> tuple[DateWindow, ...]:
        """The dates to keep in `city`."""
        return tuple(window for window in self.windows if window.city == city)

    def visits(self, route: tuple[str, ...]) -> tuple[Visit, ...]:
        """The stays of a route that starts on day 1 (whether it is allowed is not asked)."""
        stays: list[Visit] = []
        day = 1
        for city in route:
            last = day + self.durations[city] - 1
            stays.append(Visit(city=city, first_day=day, last_day=last))
            day = last
        return tuple(stays)
