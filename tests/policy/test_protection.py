"""What no policy may take, and what keeps full precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sidequest_langchain.config import Protection
from sidequest_langchain.policy.protection import protect, protected_bytes
from tests.policy.making import ROW, cache, idle, segment

NONE = {
    "n_sink": 0,
    "recent_window": 0,
    "system": False,
    "question": False,
    "delimiters": False,
    "marked": False,
    "newest_tool_call": False,
    "ends": 0.0,
}


def only(**given):
    return Protection(**{**NONE, **given})


def marks(facts, rules, weights=None, *, field="protected"):
    """Per segment a text: `x` where the mask is set."""
    made = protect(facts, rules, weights or {})
    return ["".join("x" if m else "." for m in getattr(s, field)) for s in made.segments]


def test_nothing_is_protected_that_no_rule_names():
    assert marks(cache(segment(1, "sqdmcaa")), only()) == ["......."]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("system", "x......"),
        ("question", ".x....."),
        ("delimiters", "..x...."),
        ("marked", "...x..."),
    ],
)
def test_kinds_by_their_rule(rule, expected):
    assert marks(cache(segment(1, "sqdmcaa")), only(**{rule: True})) == [expected]


def test_sinks_are_the_first_positions_even_over_segments():
    trunk = segment(1, 2)
    leaf = segment(2, 4, trunk)
    assert marks(cache(trunk, leaf), only(n_sink=3)) == ["xx", "x..."]


def test_the_recent_window_is_that_of_every_path():
    trunk = segment(1, 5)
    left, right = segment(2, 2, trunk), idle(3, 4, trunk)
    facts = cache(trunk, left, right)
    # Running: two tokens of its own and one of the trunk. Idle: its last three.
    assert marks(facts, only(recent_window=3)) == ["....x", "xx", ".xxx"]
    assert marks(facts, only(recent_window=3), field="precise") == ["....x", "xx", "...."]


def test_an_empty_tip_does_not_shorten_the_window():
    trunk = segment(1, 5)
    tip = segment(2, 0, trunk)
    assert marks(cache(trunk, tip), only(recent_window=2)) == ["...xx", ""]


def test_the_newest_tool_call_with_the_delimiters_in_it():
    path = segment(1, "ccaacdcrra")
    assert marks(cache(path), only(newest_tool_call=True)) == ["....xxx..."]


def test_the_newest_tool_call_over_segments():
    trunk = segment(1, "aac")
    leaf = segment(2, "ccr", trunk)
    assert marks(cache(trunk, leaf), only(newest_tool_call=True)) == ["..x", "xx."]


def test_ends_are_shares_of_the_budget_at_both_ends_of_the_prompt():
    # 20 rows of budget: two at each end; the answer after the prompt is not its end.
    path = segment(1, "ooooooodaaa")
    assert marks(cache(path, budget_rows=20), only(ends=0.1)) == ["xx....xx..."]
    assert marks(cache(path), only(ends=0.1)) == ["..........."]


def test_running_paths_share_the_ends():
    trunk = segment(1, "oooo")
    leaves = [segment(i, "oooo", trunk) for i in (2, 3)]
    facts = cache(trunk, *leaves, budget_rows=20)
    assert marks(facts, only(ends=0.1)) == ["xx..", "...x", "...x"]


def test_weights_by_token():
    path = segment(1, 4, token_ids=[5, 6, 7, 5])
    made = protect(cache(path), only(), {5: 2.0, 7: math.inf}).segments[0]
    assert made.weights.tolist() == [2, 1, 1, 2]
    assert made.protected.tolist() == [False, False, True, False]
    assert protect(cache(path), only(), {}).segments[0].weights is None


def test_only_sinks_and_the_recent_window_stay_precise_unless_all_shall():
    path = segment(1, "aasqaaaa")
    rules = {"n_sink": 1, "recent_window": 2, "system": True, "question": True}
    assert marks(cache(path), only(**rules)) == ["x.xx..xx"]
    assert marks(cache(path), only(**rules), field="precise") == ["x.....xx"]
    assert marks(cache(path), only(**rules, precise=True), field="precise") == ["x.xx..xx"]


def test_the_facts_given_are_not_changed():
    facts = cache(segment(1, "ss"))
    protect(facts, Protection())
    assert facts.segments[0].protected is None


def test_bytes_that_cannot_be_freed():
    trunk = segment(1, "ssaa")
    pinned = segment(2, 3, trunk, may_change=False)
    left = idle(3, "sss", trunk)
    facts = protect(cache(trunk, pinned, left), only(system=True))
    # The idle segment could be released whole.
    assert protected_bytes(facts) == (2 + 3) * ROW
    packed = protect(cache(segment(1, "ss", bits=[8, 32])), only(system=True))
    assert protected_bytes(packed) == math.ceil(ROW * (1 + 9 / 32))


def test_the_defaults_protect_what_they_say():
    text = "ddddssssdqqqqdaaaa" + "r" * 400 + "a" * 60
    made = protect(cache(segment(1, text), budget_rows=200), Protection()).segments[0]
    kinds = np.array(list(text))
    assert made.protected[np.isin(kinds, list("dsq"))].all()
    assert made.protected[:20].all()
    assert made.protected[-50:].all()
    # The last 20 tokens of the prompt: the end of the result.
    assert made.protected[398:418].all()
    assert not made.protected[20:398].any()
    assert not made.protected[418:428].any()


def test_roots_share_the_first_end():
    paths = [segment(i, "o" * 10) for i in (1, 2)]
    facts = cache(*paths, budget_rows=40)
    assert marks(facts, only(ends=0.1)) == ["xx......xx"] * 2


def test_idle_paths_keep_their_newest_tool_call():
    trunk = segment(1, "ca")
    left, right = segment(2, "aa", trunk), idle(3, "rca", trunk)
    facts = cache(trunk, left, right)
    assert marks(facts, only(newest_tool_call=True)) == ["x.", "..", ".x."]
