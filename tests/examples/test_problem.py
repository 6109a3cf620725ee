"""Problems, solver and checker: against brute force, and against every single mistake."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.examples.tree_of_thoughts.checker import check_plan, check_prefix
from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.problem import (
    DateWindow,
    ProblemError,
    TripProblem,
    Visit,
)
from sidequest_langchain.examples.tree_of_thoughts.solver import solve

problems = st.builds(generate, st.integers(3, 8), st.integers(0, 10_000))
small_problems = st.builds(generate, st.integers(3, 5), st.integers(0, 10_000))


def faults(problem: TripProblem, plan: tuple[Visit, ...]) -> set[str]:
    return {violation.fault for violation in check_plan(problem, plan)}


def three_cities() -> TripProblem:
    """Porto 1-4, Oslo 4-6, Riga 6-7 and nothing else."""
    return TripProblem(
        name="three",
        durations={"Oslo": 3, "Porto": 4, "Riga": 2},
        flights=frozenset({("Porto", "Oslo"), ("Oslo", "Riga"), ("Oslo", "Porto")}),
        windows=(
            DateWindow(
                city="Oslo", first_day=5, last_day=6, attendance="all", occasion="see a show"
            ),
        ),
    )


PLAN = (
    Visit(city="Porto", first_day=1, last_day=4),
    Visit(city="Oslo", first_day=4, last_day=6),
    Visit(city="Riga", first_day=6, last_day=7),
)


@given(problems)
def test_each_flight_day_is_shared_by_two_cities(problem: TripProblem) -> None:
    visits = problem.visits(problem.cities)
    assert visits[0].first_day == 1
    assert visits[-1].last_day == problem.n_days
    assert all(before.last_day == after.first_day for before, after in pairwise(visits))
    days = [v.last_day - v.first_day + 1 for v in visits]
    assert days == [*problem.durations.values()]
    assert problem.n_days == sum(days) - (len(days) - 1)


@settings(deadline=None)
@given(problems)
def test_a_problem_has_a_plan_and_every_plan_found_is_valid(problem: TripProblem) -> None:
    solution = solve(problem)
    assert problem.golden_route in solution.routes
    assert all(check_plan(problem, problem.visits(route)) == () for route in solution.routes)


@settings(deadline=None, max_examples=40)
@given(small_problems)
def test_the_solver_finds_what_brute_force_finds(problem: TripProblem) -> None:
    valid = {
        route
        for route in permutations(problem.cities)
        if not check_plan(problem, problem.visits(route))
    }
    assert set(solve(problem).routes) == valid


def test_the_solver_counts_what_it_looked_at() -> None:
    # Oslo misses its dates if it comes first, Porto leads to Oslo and on, Riga leads nowhere.
    solution = solve(three_cities())
    assert solution.routes == (("Porto", "Oslo", "Riga"),)
    assert (solution.n_expanded, solution.n_dead_ends) == (5, 2)


@settings(deadline=None, max_examples=40)
@given(small_problems)
def test_looking_ahead_never_refuses_what_can_be_completed(problem: TripProblem) -> None:
    solution = solve(problem)
    for route in solution.routes:
        for n in range(len(route) + 1):
            assert check_prefix(problem, route[:n]) == ()
            assert solution.completes(route[:n])


@pytest.mark.parametrize(("n_cities", "seed"), [(3, 0), (5, 7), (8, 3)])
def test_the_same_seed_makes_the_same_problem(n_cities: int, seed: int) -> None:
    assert generate(n_cities, seed) == generate(n_cities, seed)
    assert generate(n_cities, seed) != generate(n_cities, seed + 1)


def test_a_seed_means_the_same_on_every_machine() -> None:
    problem = generate(3, 0)
    assert (problem.golden_route, problem.durations) == EXPECTED_3_0


EXPECTED_3_0 = (("Sofia", "Dublin", "Bruges"), {"Bruges": 2, "Dublin": 3, "Sofia": 4})


def test_dead_ends_are_there_to_be_met() -> None:
    found = [solve(generate(5, seed)) for seed in range(30)]
    assert sum(solution.n_dead_ends >= 3 for solution in found) > 25


class TestChecker:
    def test_a_valid_plan_has_no_violation(self) -> None:
        assert check_plan(three_cities(), PLAN) == ()

    @pytest.mark.parametrize(
        ("plan", "expected"),
        [
            (PLAN[:2], {"missing_city", "last_day"}),
            ((*PLAN, PLAN[0]), {"repeated_city", "shared_day", "flight", "last_day"}),
            ((*PLAN, Visit(city="Rome", first_day=7, last_day=7)), {"unknown_city", "flight"}),
            ((replace(PLAN[0], last_day=5), *PLAN[1:]), {"duration", "shared_day"}),
            ((replace(PLAN[0], first_day=2), *PLAN[1:]), {"duration", "first_day"}),
            ((*PLAN[:2], replace(PLAN[2], last_day=8)), {"duration", "last_day"}),
            (
                (PLAN[0], Visit(city="Riga", first_day=4, last_day=5),
                 Visit(city="Oslo", first_day=5, last_day=7)),
                {"flight"},
            ),
            ((), {"missing_city"}),
        ],
    )  # fmt: skip
    def test_each_mistake_is_named(self, plan: tuple[Visit, ...], expected: set[str]) -> None:
        assert faults(three_cities(), plan) == expected

    def test_a_missed_date_is_named_with_its_days(self) -> None:
        moved = (Visit(city="Oslo", first_day=1, last_day=3), *PLAN[1:])
        messages = [v.message for v in check_plan(three_cities(), moved) if v.fault == "date"]
        assert messages == ["Oslo on days 1-3 misses days 5-6 (see a show)"]

    @settings(deadline=None)
    @given(small_problems, st.data())
    def test_every_single_mutation_of_a_valid_plan_fails(
        self, problem: TripProblem, data: st.DataObject
    ) -> None:
        plan = list(problem.visits(problem.golden_route))
        place = data.draw(st.integers(0, len(plan) - 1))
        kind = data.draw(st.sampled_from(["drop", "double", "earlier", "later", "other city"]))
        visit = plan[place]
        if kind == "drop":
            del plan[place]
        elif kind == "double":
            plan.insert(place, visit)
        elif kind == "earlier":
            plan[place] = replace(visit, first_day=visit.first_day - 1)
        elif kind == "later":
            plan[place] = replace(visit, last_day=visit.last_day + 1)
        else:
            plan[place] = replace(visit, city="Atlantis")
        assert check_plan(problem, tuple(plan))

    def test_a_flight_goes_one_way_only(self) -> None:
        assert "flight" not in faults(three_cities(), PLAN)
        back = TripProblem(
            name="back", durations={"Oslo": 3, "Riga": 2}, flights=frozenset({("Oslo", "Riga")})
        )
        assert faults(back, back.visits(("Riga", "Oslo"))) == {"flight"}


class TestPrefix:
    def test_a_date_that_can_only_be_missed_is_a_dead_end(self) -> None:
        problem = replace(three_cities(), windows=(window("Oslo", 2, 3, "any"),))
        (violation,) = check_prefix(problem, ("Porto",))
        assert violation.fault == "date"
        assert violation.message.startswith("Oslo can be reached on day 4 at the earliest")

    def test_a_city_that_leads_nowhere_is_a_dead_end(self) -> None:
        assert [v.fault for v in check_prefix(three_cities(), ("Riga",))] == ["stranded"]

    @pytest.mark.parametrize(
        ("attendance", "day", "expected"),
        [("any", 8, False), ("any", 9, True), ("all", 6, False), ("all", 7, True)],
    )
    def test_the_last_day_on_which_a_date_can_be_kept(
        self, attendance: str, day: int, expected: bool
    ) -> None:
        assert window("Oslo", 6, 8, attendance).is_missed_by_arriving(day) is expected


def window(city: str, first: int, last: int, attendance: str) -> DateWindow:
    return DateWindow(
        city=city,
        first_day=first,
        last_day=last,
        attendance=attendance,  # type: ignore[arg-type]
        occasion="meet a friend",
    )


@pytest.mark.parametrize("n_cities", [2, 9])
def test_sizes_out_of_range_are_refused(n_cities: int) -> None:
    with pytest.raises(ProblemError, match=f"3 to 8 cities can be made, found {n_cities}"):
        generate(n_cities, 0)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ProblemError, match="no duration is given for Rome"):
        TripProblem(name="x", durations={"Oslo": 2}, flights=frozenset({("Oslo", "Rome")}))
    with pytest.raises(ProblemError, match="at least one day, found less for Oslo"):
        TripProblem(name="x", durations={"Oslo": 0}, flights=frozenset())
    with pytest.raises(ProblemError, match="at least one city"):
        TripProblem(name="x", durations={}, flights=frozenset())
