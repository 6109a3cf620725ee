"""Tasks: what they ask can be answered from what they say, and a seed makes the same sample."""

from __future__ import annotations

import itertools
import random

import pytest
from langchain_core.messages import AIMessage, SystemMessage, ToolMessage

from sidequest_langchain.evaluation.agents import AGENTS
from sidequest_langchain.evaluation.sample import Ask, Sample, Task, filled, sample_of, spread
from sidequest_langchain.evaluation.texts import TEXTS

TASKS = {task.name: task for task in (*TEXTS, *AGENTS)}
SCORED = [name for name, task in TASKS.items() if not task.is_forced]


def n_words(text: str) -> int:
    return len(text.split())


def made(name: str, *, number: int = 0, seed: int = 0, n_tokens: int = 900) -> Sample:
    return sample_of(TASKS[name], seed=seed, number=number, n_tokens=n_tokens, count=n_words)


def text_of(sample: Sample) -> str:
    return "\n".join(str(m.content) for ask in sample.asks for m in ask.messages)


def tool_text(ask: Ask) -> str:
    return "\n".join(str(m.content) for m in ask.messages if isinstance(m, ToolMessage))


@pytest.mark.parametrize("name", TASKS)
class TestEveryTask:
    def test_the_same_seed_makes_the_same_sample(self, name):
        assert text_of(made(name)) == text_of(made(name))

    def test_another_number_or_seed_makes_another(self, name):
        texts = {text_of(s) for s in (made(name), made(name, number=1), made(name, seed=1))}

        assert len(texts) == 3

    @pytest.mark.parametrize("n_tokens", [400, 900, 3000])
    def test_its_context_is_about_as_long_as_asked(self, name, n_tokens):
        sample = made(name, n_tokens=n_tokens)
        n_calls = sum(isinstance(m, ToolMessage) for ask in sample.asks for m in ask.messages)
        n = n_words(text_of(sample)) + 40 * n_calls  # what a template puts around calls

        assert 0.6 * n_tokens < n < 1.4 * n_tokens

    def test_every_call_ends_with_the_user(self, name):
        assert all(ask.messages[-1].type == "human" for ask in made(name).asks)

    def test_a_system_message_stands_first_only(self, name):
        messages = [m for ask in made(name).asks for m in ask.messages]

        assert isinstance(messages[0], SystemMessage)
        assert not any(isinstance(m, SystemMessage) for m in messages[1:])


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("number", range(5))
class TestScored:
    def test_the_right_answer_scores_1(self, name, number):
        for ask in made(name, number=number).asks:
            if ask.score is not None:
                assert ask.score(ask.expected) == 1.0
                assert ask.score(f" {ask.expected}.\n".upper()) == 1.0

    def test_a_wrong_answer_scores_0(self, name, number):
        for ask in made(name, number=number).asks:
            if ask.score is not None:
                assert ask.score("I do not know.") == 0.0
                assert ask.score("") == 0.0

    def test_the_question_does_not_give_it_away(self, name, number):
        """A later question may hold the answer only among two others that look as likely."""
        for ask in made(name, number=number).asks[1:]:
            question = str(ask.messages[-1].content)
            if ask.score is not None:
                assert ask.expected not in question or question.count(", ") == 2


@pytest.mark.parametrize("name", ["needle", "keys", "variables"])
def test_the_fact_stands_in_the_text_once(name):
    for ask in made(name).asks:
        if ask.score is not None:
            assert text_of(made(name)).count(ask.expected) == 1


def test_needles_are_spread_over_the_whole_text():
    places = []
    for number in range(40):
        first = made("needle", number=number).asks[0]
        text = tool_text(first)
        places.append(text.index(first.expected) / len(text))

    assert min(places) < 0.3
    assert max(places) > 0.7


def test_another_key_of_the_text_is_wrong():
    first, second, _ = made("keys").asks
    assert first.score is not None

    assert first.score(second.expected) == 0.0
    assert first.score(f"{first.expected} {second.expected}") == 1.0


def test_the_value_of_another_variable_before_the_right_one_is_wrong():
    first, second = made("variables").asks
    assert first.score is not None

    assert first.score(f"{second.expected}, no: {first.expected}") == 0.0


def test_common_words_are_the_most_common():
    ask = made("common").asks[0]
    words = tool_text(ask).replace(",", " ").split()
    ranked = sorted(set(words), key=words.count, reverse=True)

    assert set(ranked[:3]) == set(ask.expected.split(", "))
    assert words.count(ranked[2]) > 3 * words.count(ranked[3])


def test_the_frequent_choice_has_most_of_the_votes():
    for number in range(10):
        ask = made("frequent", number=number).asks[0]
        votes = [line.split()[-1].strip(".") for line in tool_text(ask).split("\n")]

        assert votes.count(ask.expected) > len(votes) / 2


class TestRevival:
    def test_facts_stand_in_tool_results_and_nowhere_else(self):
        sample = made("revival")
        said = [m for ask in sample.asks for m in ask.messages]
        results = "\n".join(str(m.content) for m in said if isinstance(m, ToolMessage))
        others = "\n".join(str(m.content) for m in said if not isinstance(m, ToolMessage))

        for ask in sample.asks:
            if ask.score is not None:
                assert results.count(ask.expected) == 1
                assert ask.expected not in others

    def test_the_first_fact_is_asked_again_after_other_turns(self):
        asks = made("revival").asks
        scored = [i for i, ask in enumerate(asks) if ask.score is not None]

        assert asks[scored[0]].expected == asks[scored[2]].expected
        between = asks[scored[0] + 1 : scored[2]]
        assert any(isinstance(m, ToolMessage) for ask in between for m in ask.messages)

    def test_one_fact_is_asked_for_the_first_time_at_the_end(self):
        *before, last = made("revival").asks

        assert last.expected not in {ask.expected for ask in before}

    def test_every_call_has_its_result(self):
        said = [m for ask in made("revival").asks for m in ask.messages]
        for one, other in itertools.pairwise(said):
            if isinstance(one, AIMessage) and one.tool_calls:
                assert isinstance(other, ToolMessage)
                assert other.tool_call_id == one.tool_calls[0]["id"]


def test_half_of_the_instructions_is_half_of_the_score():
    ask = made("fairness").asks[0]
    begins, *_, ends = ask.expected.strip(".").replace(",", "").split()
    assert ask.score is not None

    assert ask.score(f"{begins}, it is somewhere.") == 0.5
    assert ask.score(f"It is somewhere, {ends}!") == 0.5


class TestParts:
    def test_filled_takes_one_line_at_least(self):
        assert filled(iter(["a b c", "d"]), 1, n_words) == ["a b c"]

    def test_filled_stops_at_the_number(self):
        assert filled(iter(["a b", "c d", "e f"]), 4, n_words) == ["a b", "c d"]

    def test_spread_keeps_order_and_lines(self):
        lines = [str(i) for i in range(20)]
        found = spread(["x", "y"], lines, random.Random(0))

        assert [line for line in found if line not in ("x", "y")] == lines
        assert found.index("x") < 11 <= found.index("y")

    def test_a_task_that_runs_an_application_says_nothing(self):
        task = Task(name="t", about="")

        assert sample_of(task, seed=0, number=0, n_tokens=9, count=n_words).asks == ()
