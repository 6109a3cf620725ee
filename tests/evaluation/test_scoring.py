"""Scorers look at words, whatever stands around them."""

from __future__ import annotations

import pytest

from sidequest_langchain.evaluation.scoring import lists, names, obeys


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("4821", 1.0),
        ("The code is 4821.", 1.0),
        ("**4821**\n", 1.0),
        ("48213", 0.0),
        ("No. 1482, then 4821", 1.0),
        ("9000 4821", 0.0),
        ("4821 9000", 1.0),
        ("", 0.0),
    ],
)
def test_names(answer, score):
    assert names("4821", ["9000"])(answer) == score


def test_names_of_several_words_stand_in_a_row():
    assert names("New York")("in new york.") == 1.0
    assert names("New York")("york, new") == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("apple, desk, kettle", 1.0),
        ("The three words are: kettle, Desk and APPLE.", 1.0),
        ("apple, apple, apple", 1 / 3),
        ("apple, desk, spoon, kettle", 2 / 3),
        ("spoon, tiger, vase, apple, desk, kettle", 0.0),
        ("1. apple 2. bird 3. desk", 2 / 3),
    ],
)
def test_lists(answer, score):
    pool = ["apple", "desk", "kettle", "spoon", "tiger", "vase"]

    assert lists(["apple", "desk", "kettle"], pool)(answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Captain, it is Rome, over.", 1.0),
        ("captain it is Rome OVER", 1.0),
        ("Captain, it is Rome.", 0.5),
        ("It is Rome, over.", 0.5),
        ("It is Rome, captain.", 0.0),
        ("", 0.0),
    ],
)
def test_obeys(answer, score):
    assert obeys(begins="Captain", ends="over")(answer) == score
