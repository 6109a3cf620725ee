"""What the model is asked, and how its replies are read; it knows no graph.

Every conversation begins with the same trunk: a few solved checks, the problem, one
acknowledgement. A thought adds one short turn and the reply that names its city, so that a
child's prompt is its parent's prompt, the parent's reply and one turn more:

    trunk ─ "From Porto ... which city next?" ─ "Oslo" ─┬─ "From Oslo ... which city next?"
                                                        └─ "Days 4 5 6. Date 5 6. Overlap?"

The program does the day arithmetic, since a small model cannot; the model compares the days.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from .problem import DateWindow, TripProblem

_SYSTEM = (
    "You plan trips. Asked for a city, you answer with its name only. Asked for an overlap of "
    "days, you answer yes or no."
)
_SOLVED_CHECKS = (
    ((4, 6), (5, 6)),
    ((1, 4), (9, 12)),
    ((8, 14), (3, 5)),
    ((6, 8), (5, 7)),
    ((2, 5), (7, 9)),
    ((10, 17), (12, 13)),
    ((7, 9), (2, 4)),
    ((3, 5), (3, 3)),
)
"""(days, date): the model is far better with these in its prompt than without."""

_SMALLEST = 1e-6
CheckKind: TypeAlias = Literal["stay", "left"]
"""Against what a date is held: the days of a stay, or all days that are left of the trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question whether days overlap."""

    kind: CheckKind
    turn: HumanMessage


def trunk(problem: TripProblem) -> list[BaseMessage]:
    """The messages that every conversation about this problem begins with."""
    messages: list[BaseMessage] = [SystemMessage(_SYSTEM)]
    for days, date in _SOLVED_CHECKS:
        overlap = days[0] <= date[1] and date[0] <= days[1]
        messages += [HumanMessage(_check(days, date)), AIMessage("yes" if overlap else "no")]
    return [*messages, HumanMessage(_problem(problem))]


def next_city_turn(
    problem: TripProblem, route: Sequence[str], day: int, options: Sequence[str]
) -> HumanMessage:
    """The turn that asks where to go."""
    if not route:
        listed = ", ".join(options)
        return HumanMessage(f"Day 1. Choose one: {listed}. Which city first? City name only.")
    later = [city for city in problem.cities if city not in route and city not in options]
    turn = f"Day {day}, in {route[-1]}. Choose one: {', '.join(options)}."
    if later:
        turn += f" Not now: {', '.join(later)}."
    return HumanMessage(f"{turn} Which city next? City name only.")


def date_checks(problem: TripProblem, route: tuple[str, ...]) -> list[Check]:
    """The turns that ask about each date which the last city of `route` decides upon.

    The date of the city itself is held against the days of the stay; that of a city still to
    come against the days that are left.
    """
    here = problem.visits(route)[-1]
    checks = []
    for window in problem.windows:
        date = (window.first_day, window.last_day)
        if window.city == here.city:
            turn = HumanMessage(_check((here.first_day, here.last_day), date))
            checks.append(Check(kind="stay", turn=turn))
        elif window.city not in route:
            turn = HumanMessage(_check((here.last_day, problem.n_days), date))
            checks.append(Check(kind="left", turn=turn))
    return checks


def calibration_checks(problem: TripProblem) -> list[Check]:
    """Questions with known answers, as many `yes` as `no` of each kind.

    A small model leans to one answer, and to another degree where the list of days is long; the
    mean of its answers to these is where it stands between yes and no.

    Paper: Calibrate Before Use, arXiv:2102.09690.
    """
    n = max(4, problem.n_days // 2)  # days that are left, about half-way
    stay = (((3, 6), (5, 6)), ((6, 8), (5, 7)), ((2, 6), (9, 10)), ((7, 9), (2, 4)))
    left = (((5, 5 + n), (7, 8)), ((6, 6 + n), (4 + n, 5 + n)))
    past = (((5, 5 + n), (2, 4)), ((6, 6 + n), (3, 4)))
    return [
        *(Check(kind="stay", turn=HumanMessage(_check(*pair))) for pair in stay),
        *(Check(kind="left", turn=HumanMessage(_check(*pair))) for pair in (*left, *past)),
    ]


def leanings(checks: Sequence[Check], replies: Sequence[AIMessage]) -> dict[CheckKind, float]:
    """Where the model stands between no and yes, by kind: the mean log-odds of `yes`."""
    odds: dict[CheckKind, list[float]] = {}
    for check, reply in zip(checks, replies, strict=True):
        odds.setdefault(check.kind, []).append(_log_odds(read_yes(reply)))
    return {kind: sum(some) / len(some) for kind, some in odds.items()}


def score_of(
    checks: Sequence[Check], replies: Sequence[AIMessage], leaning: Mapping[CheckKind, float]
) -> float:
    """The model's estimate that all dates checked are kept, from 0 to 1: 1 without any."""
    score = 1.0
    for check, reply in zip(checks, replies, strict=True):
        odds = _log_odds(read_yes(reply)) - leaning.get(check.kind, 0.0)
        score *= 1 / (1 + math.exp(-odds))
    return score


def read_city(reply: str, options: Sequence[str]) -> str | None:
    """The option that a reply names: the one it names first, or whose beginning it is."""
    found = {
        city: match.start()
        for city in options
        if (match := re.search(rf"\b{re.escape(city)}\b", reply, flags=re.IGNORECASE))
    }
    if found:
        return min(found, key=lambda city: found[city])
    word = reply.strip(" .,:;*\"'\n").casefold()
    if len(word) < 2:
        return None
    starts = [city for city in options if city.casefold().startswith(word)]
    return starts[0] if len(starts) == 1 else None


def read_yes(reply: AIMessage) -> float:
    """The probability of `yes` against `no` as the reply's first token, from 0 to 1.

    0.5, "cannot tell", if neither is among the alternatives that were returned.
    """
    content: Sequence[Mapping[str, Any]] = (reply.response_metadata.get("logprobs") or {}).get(
        "content"
    ) or ()
    mass = {"yes": 0.0, "no": 0.0}
    for one in content[0]["top_logprobs"] if content else ():
        word = one["token"].strip().casefold()
        if word in mass:
            mass[word] += math.exp(one["logprob"])
    total = mass["yes"] + mass["no"]
    return mass["yes"] / total if total else 0.5


def chain_of_thought(problem: TripProblem) -> list[BaseMessage]:
    """The baseline: the same problem, one answer, no tree."""
    ask = (
        f"{_facts(problem)}\n\nThink step by step, in a few short lines. Then end with one line "
        f"that starts with 'Plan:' and gives the order of the {len(problem.cities)} cities, "
        "separated by commas."
    )
    return [SystemMessage("You plan trips."), HumanMessage(ask)]


def read_plan(reply: str, cities: Sequence[str]) -> tuple[str, ...]:
    """The order of cities in the last line of a reply that starts with `Plan:`."""
    lines = [line for line in reply.splitlines() if re.match(r"\W*plan\W*:", line.casefold())]
    line = lines[-1] if lines else ""
    pattern = "|".join(re.escape(city) for city in cities)
    names = re.findall(rf"\b(?:{pattern})\b", line, flags=re.IGNORECASE)
    known = {city.casefold(): city for city in cities}
    return tuple(known[name.casefold()] for name in names)


def _log_odds(probability: float) -> float:
    bounded = min(max(probability, _SMALLEST), 1 - _SMALLEST)
    return math.log(bounded / (1 - bounded))


def _problem(problem: TripProblem) -> str:
    return f"{_facts(problem)}\n\nReply OK when you have read this."


def _facts(problem: TripProblem) -> str:
    lines = [
        f"Plan a trip through {len(problem.cities)} cities in {problem.n_days} days, each visited "
        "once, by direct flights. A flight day counts for both cities.",
        "",
        "Stays:",
    ]
    for city, days in problem.durations.items():
        dates = " and ".join(_date(window) for window in problem.windows_of(city))
        lines.append(f"- {city}: {days} days" + (f"; {dates}" if dates else ""))
    lines += ["", "Direct flights:"]
    lines += [
        f"- from {city} to {', '.join(problem.destinations(city)) or 'nowhere'}"
        for city in problem.cities
    ]
    return "\n".join(lines)


def _date(window: DateWindow) -> str:
    days = _span(window.first_day, window.last_day)
    if window.attendance == "all":
        return f"{window.occasion} on {days}, all of them"
    return f"{window.occasion} on {days}, any of them"


def _span(first: int, last: int) -> str:
    return f"day {first}" if first == last else f"days {first} to {last}"


def _check(days: tuple[int, int], date: tuple[int, int]) -> str:
    return f"Stay: {_listed(*days)}. Date: {_listed(*date)}. Overlap? yes or no"


def _listed(first: int, last: int) -> str:
    """Every day by itself: a day in both lists is then the same token in both."""
    return " ".join(str(day) for day in range(first, last + 1))
