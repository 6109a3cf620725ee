"""Prompts share their heads, and replies are read as they are meant."""

from __future__ import annotations

import math

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.prompts import (
    Check,
    calibration_checks,
    date_checks,
    leanings,
    read_city,
    read_plan,
    read_yes,
    score_of,
    trunk,
)
from tests.examples.scripted import alternatives, numbers, overlap

OPTIONS = ["Graz", "Oslo", "Riga"]


def answer(yes: float) -> AIMessage:
    return AIMessage(
        "yes", response_metadata={"logprobs": {"content": [{"top_logprobs": alternatives(yes)}]}}
    )


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Oslo", "Oslo"),
        (" oslo.", "Oslo"),
        ("I would go to Riga, then Oslo", "Riga"),
        ("**Graz**", "Graz"),
        ("Osl", "Oslo"),
        ("Paris", None),
        ("", None),
        ("O", None),
        ("Grazing", None),
    ],
)
def test_a_reply_names_a_city_of_the_list_or_none(reply: str, expected: str | None) -> None:
    assert read_city(reply, OPTIONS) == expected


def test_a_beginning_that_two_cities_share_names_neither() -> None:
    assert read_city("San", ["San Marino", "Santander"]) is None


def test_the_trunk_holds_the_whole_problem_and_ends_with_a_question() -> None:
    problem = generate(5, 1)
    messages = trunk(problem)
    assert isinstance(messages[0], SystemMessage)
    assert isinstance(messages[-1], HumanMessage)
    text = str(messages[-1].content)
    for city, days in problem.durations.items():
        assert f"- {city}: {days} days" in text
    for window in problem.windows:
        assert window.occasion in text
    assert text.endswith("Reply OK when you have read this.")


def test_the_solved_checks_are_right() -> None:
    messages = trunk(generate(5, 1))
    for asked, reply in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
        days, date = (numbers(part) for part in str(asked.content).split("Date:"))
        assert reply.content == ("yes" if overlap(days, date) > 0.5 else "no")


def test_a_date_is_held_against_the_stay_and_others_against_what_is_left() -> None:
    problem = generate(5, 1)
    route = problem.golden_route
    for n in range(1, len(route)):
        checks = date_checks(problem, route[:n])
        dated = [w for w in problem.windows if w.city not in route[: n - 1]]
        assert len(checks) == len(dated)
        assert sum(c.kind == "stay" for c in checks) == len(problem.windows_of(route[n - 1]))
        for check in checks:
            days, date = (numbers(part) for part in str(check.turn.content).split("Date:"))
            assert set(days) & set(date), "the golden route keeps every date"


@pytest.mark.parametrize("n_cities", [3, 4, 5, 6, 7, 8])
def test_calibration_asks_as_many_yes_as_no_of_each_kind(n_cities: int) -> None:
    for seed in range(20):
        checks = calibration_checks(generate(n_cities, seed))
        for kind in ("stay", "left"):
            answers = []
            for check in checks:
                if check.kind == kind:
                    parts = str(check.turn.content).split("Date:")
                    days, date = (numbers(part) for part in parts)
                    answers.append(overlap(days, date) > 0.5)
            assert sorted(answers) == [False, False, True, True], (n_cities, seed, kind)


class TestScore:
    def test_yes_is_weighed_against_no_alone(self) -> None:
        assert read_yes(answer(0.75)) == pytest.approx(0.75)
        both = {"content": [{"top_logprobs": [
            {"token": " Yes", "logprob": math.log(0.3)},
            {"token": "no", "logprob": math.log(0.1)},
            {"token": "maybe", "logprob": math.log(0.6)},
        ]}]}  # fmt: skip
        assert read_yes(AIMessage("?", response_metadata={"logprobs": both})) == pytest.approx(0.75)

    @pytest.mark.parametrize("metadata", [{}, {"logprobs": None}, {"logprobs": {"content": []}}])
    def test_without_log_probabilities_it_cannot_tell(self, metadata: dict[str, object]) -> None:
        assert read_yes(AIMessage("yes", response_metadata=metadata)) == 0.5

    def test_a_leaning_is_taken_off(self) -> None:
        asked = [Check(kind="stay", turn=HumanMessage("?"))]
        leaning = leanings(asked * 2, [answer(0.1), answer(0.3)])
        middle = (math.log(1 / 9) + math.log(3 / 7)) / 2
        assert leaning == {"stay": pytest.approx(middle)}
        between = 1 / (1 + math.exp(-middle))
        assert score_of(asked, [answer(between)], leaning) == pytest.approx(0.5)
        assert (
            score_of(asked, [answer(0.3)], leaning) > 0.5 > score_of(asked, [answer(0.1)], leaning)
        )

    def test_every_date_counts(self) -> None:
        checks = [Check(kind="stay", turn=HumanMessage("?"))] * 2
        assert score_of(checks, [answer(0.5), answer(0.4)], {}) == pytest.approx(0.2)
        assert score_of([], [], {}) == 1


def test_a_plan_is_read_from_its_last_line() -> None:
    reply = "Plan: Riga, Oslo\nNo, the wedding.\n**Plan:** Oslo -> riga, Graz (day 4)"
    assert read_plan(reply, OPTIONS) == ("Oslo", "Riga", "Graz")
    assert read_plan("Oslo, Riga", OPTIONS) == ()
    assert read_plan("Plan: Osloer", OPTIONS) == ()
