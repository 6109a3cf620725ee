"""Problems as text and as files: written, read back, and refused when they are not understood."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.problem import ProblemError, TripProblem
from sidequest_langchain.examples.tree_of_thoughts.problem_file import (
    from_entry,
    load_problems,
    save_problems,
    to_entry,
)
from sidequest_langchain.examples.tree_of_thoughts.solver import solve
from sidequest_langchain.examples.tree_of_thoughts.wording import as_text, from_text

problems = st.builds(generate, st.integers(3, 8), st.integers(0, 10_000))

TEXT = """\
You plan to visit 4 European cities for 12 days in total. You only take direct flights to commute \
between cities. You want to spend 4 days in Oslo. You have to attend a workshop in Oslo between \
day 1 and day 4. You plan to stay in San Marino for 5 days. You would like to meet your friends \
at San Marino between day 4 and day 6 to tour together. You would like to visit Riga for 2 days. \
From day 8 to day 9, there is a annual show you want to attend in Riga. You would like to visit \
Graz for 4 days.

Here are the cities that have direct flights:
Oslo and San Marino, from San Marino to Riga, Riga and Graz.

Find a trip plan of visiting the cities for 12 days by taking direct flights to commute between \
them."""


def test_a_text_in_the_benchmark_s_sentences_is_understood() -> None:
    problem = from_text(TEXT, name="example")
    assert problem.durations == {"Oslo": 4, "San Marino": 5, "Riga": 2, "Graz": 4}
    assert problem.n_days == 12
    assert not problem.has_flight("Riga", "San Marino")
    assert problem.has_flight("San Marino", "Riga")
    dates = [(w.city, w.first_day, w.last_day, w.attendance) for w in problem.windows]
    assert dates == [("Oslo", 1, 4, "any"), ("San Marino", 4, 6, "any"), ("Riga", 8, 9, "all")]
    assert solve(problem).routes == (("Oslo", "San Marino", "Riga", "Graz"),)


def test_a_flight_is_listed_once_and_one_way_flights_say_so() -> None:
    text = as_text(from_text(TEXT, name="example"))
    line = text.split("direct flights:\n")[1].split("\n")[0]
    assert sorted(line.rstrip(".").split(", ")) == [
        "Graz and Riga",
        "Oslo and San Marino",
        "from San Marino to Riga",
    ]


@given(problems)
def test_a_problem_survives_its_text(problem: TripProblem) -> None:
    read = from_text(as_text(problem), name=problem.name, golden_route=problem.golden_route)
    assert read == problem


@given(problems)
def test_a_problem_survives_its_entry_with_and_without_our_facts(problem: TripProblem) -> None:
    entry = json.loads(json.dumps(to_entry(problem)))
    assert from_entry(problem.name, entry) == problem
    del entry["facts"]
    assert from_entry(problem.name, entry) == problem


def test_an_entry_has_the_benchmark_s_fields() -> None:
    problem = generate(3, 0)
    entry = to_entry(problem)
    assert entry["cities"] == "**".join(problem.golden_route)
    assert entry["num_cities"] == "3"
    assert [int(d) for d in entry["durations"].split("**")] == [
        problem.durations[city] for city in problem.golden_route
    ]
    assert entry["golden_plan"].splitlines()[0].startswith("Day 1-")


def test_a_file_is_read_back(tmp_path: Path) -> None:
    problems = [generate(3, 0), generate(5, 1)]
    save_problems(tmp_path / "trips.json", problems)
    assert load_problems(tmp_path / "trips.json") == problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no list of direct flights"),
        (TEXT.replace("You want to spend", "You dream of"), "not understood: 'You dream of"),
        (TEXT.replace("Oslo and San Marino", "Oslo to San Marino"), "flight was not understood"),
        (
            TEXT.replace("12 days in total", "13 days in total"),
            "make 12 days, but the text says 13",
        ),
    ],
)
def test_what_is_not_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        from_text(text, name="example")


@pytest.mark.parametrize("entry", [{}, {"cities": 3}, [], None, {"cities": "A", "facts": {}}])
def test_an_entry_that_is_none_is_refused(entry: object) -> None:
    with pytest.raises(ProblemError, match="broken: not a trip problem"):
        from_entry("broken", entry)


@pytest.mark.parametrize("content", ["", "[1]", "{}", "\udcff"])
def test_a_file_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trips.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ProblemError, match=r"trips\.json"):
        load_problems(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"cannot read trip problems from .*absent\.json"):
        load_problems(tmp_path / "absent.json")


def test_reading_back_would_notice_a_changed_date() -> None:
    problem = generate(5, 1)
    later = replace(problem.windows[0], last_day=problem.windows[0].last_day + 1)
    changed = replace(problem, windows=(later, *problem.windows[1:]))
    assert (
        from_text(as_text(changed), name=problem.name, golden_route=problem.golden_route) != problem
    )
