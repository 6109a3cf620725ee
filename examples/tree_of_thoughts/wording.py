"""A trip problem as English text, and such text as a problem again.

The sentences follow those of Natural Plan's trip planning task, so that its own texts are
understood as well. It knows no model.

Paper: Natural Plan, arXiv:2406.04520, trip planning.
"""

from __future__ import annotations

import re

from .problem import Attendance, DateWindow, ProblemError, TripProblem, Visit

_CITY = r"(?P<city>[A-Z][\w.'-]*(?: [A-Z][\w.'-]*)*)"
_DAYS = r"day (?P<first>\d+) (?:and|to) day (?P<last>\d+)"
_STAYS = (
    rf"(?:would like to|want to|plan to) (?:visit|stay in) {_CITY} for (?P<days>\d+) days?$",
    rf"want to spend (?P<days>\d+) days? in {_CITY}$",
)
_DATES: tuple[tuple[Attendance, str], ...] = (
    ("any", rf"(?P<what>meet a friend|attend a wedding|visit (?:an aunt|relatives)) in {_CITY} "
            rf"between {_DAYS}$"),
    ("any", rf"(?P<what>meet your friends) at {_CITY} between {_DAYS}(?: to tour together)?$"),
    ("any", rf"(?P<what>attend a workshop) in {_CITY} between {_DAYS}$"),
    ("all", rf"{_DAYS}, .*(?P<what>attend a conference|see a food fair|annual show).* in {_CITY}$"),
)  # fmt: skip
_FLIGHTS = "Here are the cities that have direct flights:"


def as_text(problem: TripProblem) -> str:
    """The problem as one text, with the question at its end."""
    n_days = problem.n_days
    sentences = [
        f"You plan to visit {len(problem.cities)} European cities for {n_days} days in total.",
        "You only take direct flights to commute between cities.",
    ]
    for city, days in problem.durations.items():
        sentences.append(f"You would like to visit {city} for {days} days.")
        sentences += [_date_sentence(window) for window in problem.windows_of(city)]
    return (
        f"{' '.join(sentences)}\n\n{_FLIGHTS}\n{_flights_text(problem)}.\n\n"
        f"Find a trip plan of visiting the cities for {n_days} days by taking direct flights to "
        "commute between them."
    )


def plan_text(plan: tuple[Visit, ...]) -> str:
    """A plan, one stay a line."""
    return "\n".join(f"Day {v.first_day}-{v.last_day}: {v.city}" for v in plan)


def from_text(text: str, *, name: str, golden_route: tuple[str, ...] = ()) -> TripProblem:
    """Read a problem from its text.

    Raises:
        ProblemError: A sentence is not understood, or the sentences contradict each other.
    """
    head, found, rest = text.partition(_FLIGHTS)
    if not found:
        msg = f"{name}: no list of direct flights found; expected the line {_FLIGHTS!r}"
        raise ProblemError(msg)
    durations: dict[str, int] = {}
    windows: list[DateWindow] = []
    n_days = None
    for sentence in _sentences(head):
        if total := re.search(r"plan to visit \d+ .*cities for (\d+) days in total$", sentence):
            n_days = int(total[1])
        elif stay := _first_match(_STAYS, sentence):
            durations[stay["city"]] = int(stay["days"])
        elif window := _window(sentence):
            windows.append(window)
        elif not re.search(r"direct flight|count", sentence):
            msg = f"{name}: this sentence was not understood: {sentence!r}"
            raise ProblemError(msg)
    problem = TripProblem(
        name=name,
        durations=durations,
        flights=_flights(rest.strip().split("\n")[0], name),
        windows=tuple(windows),
        golden_route=golden_route,
    )
    if n_days is not None and n_days != problem.n_days:
        msg = f"{name}: the stays make {problem.n_days} days, but the text says {n_days}"
        raise ProblemError(msg)
    return problem


def _sentences(text: str) -> list[str]:
    return [s.strip().rstrip(".") for s in re.split(r"(?<=\.)\s+", text.strip()) if s.strip()]


def _first_match(patterns: tuple[str, ...], sentence: str) -> re.Match[str] | None:
    found = (re.search(pattern, sentence) for pattern in patterns)
    return next((match for match in found if match), None)


def _window(sentence: str) -> DateWindow | None:
    for attendance, pattern in _DATES:
        if match := re.search(pattern, sentence, flags=re.DOTALL):
            return DateWindow(
                city=match["city"],
                first_day=int(match["first"]),
                last_day=int(match["last"]),
                attendance=attendance,
                occasion=match["what"],
            )
    return None


def _date_sentence(window: DateWindow) -> str:
    first, last = window.first_day, window.last_day
    if window.attendance == "any":
        return f"You want to {window.occasion} in {window.city} between day {first} and day {last}."
    return f"During day {first} and day {last}, you have to {window.occasion} in {window.city}."


def _flights_text(problem: TripProblem) -> str:
    parts = []
    for start in problem.cities:
        for end in problem.cities:
            if problem.has_flight(start, end) and not problem.has_flight(end, start):
                parts.append(f"from {start} to {end}")
            elif start < end and problem.has_flight(start, end):
                parts.append(f"{start} and {end}")
    return ", ".join(parts)


def _flights(line: str, name: str) -> frozenset[tuple[str, str]]:
    flights: set[tuple[str, str]] = set()
    for part in filter(None, (p.strip() for p in line.rstrip(". ").split(","))):
        if one_way := re.fullmatch(r"from (.+) to (.+)", part):
            flights.add((one_way[1], one_way[2]))
        elif both := re.fullmatch(r"(.+) and (.+)", part):
            flights |= {(both[1], both[2]), (both[2], both[1])}
        else:
            msg = f"{name}: this flight was not understood: {part!r}"
            raise ProblemError(msg)
    return frozenset(flights)
