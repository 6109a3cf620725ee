"""Trip problems as JSON: our own with all their facts, Natural Plan's from their text.

It knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .problem import DateWindow, ProblemError, TripProblem
from .wording import as_text, from_text, plan_text

_SEPARATOR = "**"


def to_entry(problem: TripProblem) -> dict[str, Any]:
    """The problem with Natural Plan's fields, and `facts` from which it can be read back."""
    route = problem.golden_route
    return {
        "cities": _SEPARATOR.join(route or problem.cities),
        "durations": _SEPARATOR.join(str(problem.durations[c]) for c in route or problem.cities),
        "num_cities": str(len(problem.cities)),
        "prompt_0shot": as_text(problem),
        "golden_plan": plan_text(problem.visits(route)),
        "facts": {
            "durations": problem.durations,
            "flights": sorted([*pair] for pair in problem.flights),
            "windows": [
                {
                    "city": w.city,
                    "first_day": w.first_day,
                    "last_day": w.last_day,
                    "attendance": w.attendance,
                    "occasion": w.occasion,
                }
                for w in problem.windows
            ],
        },
    }


def from_entry(name: str, entry: Any) -> TripProblem:
    """Read one problem.

    Raises:
        ProblemError: A field is missing or of the wrong kind, or the text is not understood.
    """
    try:
        cities = tuple(entry["cities"].split(_SEPARATOR))
        text = entry["prompt_0shot"]
        golden = cities if entry.get("golden_plan") else ()
        facts = entry.get("facts")
        if facts is None:
            return from_text(text, name=name, golden_route=golden)
        return TripProblem(
            name=name,
            durations={str(city): int(days) for city, days in facts["durations"].items()},
            flights=frozenset((str(a), str(b)) for a, b in facts["flights"]),
            windows=tuple(DateWindow(**window) for window in facts["windows"]),
            golden_route=golden,
        )
    except (KeyError, TypeError, AttributeError) as error:
        msg = f"{name}: not a trip problem with Natural Plan's fields ({error!r})"
        raise ProblemError(msg) from error


def save_problems(path: Path, problems: Iterable[TripProblem]) -> None:
    """Write problems as one JSON file, by name."""
    entries = {problem.name: to_entry(problem) for problem in problems}
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def load_problems(path: Path) -> list[TripProblem]:
    """Read the problems of a file: ours or Natural Plan's `trip_planning.json`.

    Raises:
        ProblemError: The file cannot be read, is no JSON, or holds something else.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        msg = f"cannot read trip problems from {path}: {error}"
        raise ProblemError(msg) from error
    if not isinstance(entries, dict) or not entries:
        msg = f"{path} holds no problems; expected one JSON object of name: problem"
        raise ProblemError(msg)
    return [from_entry(name, entry) for name, entry in entries.items()]
