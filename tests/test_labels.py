"""Whose tokens these are: what a label answers to, and which labels a selector means."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from sidequest_langchain.labels import PathSelector, StepLabel


def label(checkpoint_ns=None, *, call="call", **given):
    return StepLabel(call_id=call, checkpoint_ns=checkpoint_ns, **given)


def test_a_label_is_frozen_and_named_by_keywords():
    with pytest.raises(FrozenInstanceError):
        label().call_id = "other"
    with pytest.raises(TypeError):
        StepLabel("call")
    assert label(branch="b") == label(branch="b") != label()
    assert len({label(), label()}) == 1


@pytest.mark.parametrize(
    ("checkpoint_ns", "task"),
    [
        (None, None),
        ("node:task", "task"),
        ("outer:1|inner:2", "2"),
        ("outer:1|inner", "inner"),
        ("a:b:c", "c"),
    ],
)
def test_the_task_is_the_tail_of_the_namespace(checkpoint_ns, task):
    assert label(checkpoint_ns).task_id == task


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (label(), "call"),
        (label("node:task"), "task"),
        (label("node:task", branch="b"), "b"),
        (label(branch="b"), "b"),
        (label(node="node", thread_id="t", step=3), "call"),
    ],
)
def test_a_path_is_named_by_branch_then_task_then_call(given, name):
    assert given.path_id == name
    assert given.answers_to(name)


@pytest.mark.parametrize(
    ("checkpoint_ns", "other", "is_under"),
    [
        ("a:1", "a:1", True),
        ("a:1|b:2", "a:1", True),
        ("a:1|b:2|c:3", "a:1|b:2", True),
        ("a:1|b:2", "a:1|b:2", True),
        ("a:1", "a:1|b:2", False),
        ("a:1|b:2", "b:2", False),
        ("ab:1", "a", False),
        ("a:1", "a", False),
        ("a:b", "a", False),
        ("a:12", "a:1", False),
        ("a:1|bc:2", "a:1|b", False),
        (None, "a:1", False),
        (None, "", False),
    ],
)
def test_namespaces_are_compared_part_by_part(checkpoint_ns, other, is_under):
    given = label(checkpoint_ns)
    assert given.is_under(other) is is_under
    assert given.is_under_any(frozenset({other, "z:9"})) is is_under
    assert given.answers_to(other) is is_under or other == given.task_id


def test_under_any_of_none_is_nowhere():
    assert not label("a:1").is_under_any(frozenset())
    assert label("a:1|b:2").is_under_any(frozenset({"z:1", "a:1|b:2"}))


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("b", True),  # the branch
        ("2", True),  # the task
        ("call", True),
        ("a:1", True),  # the namespace above
        ("a:1|n:2", True),
        ("1", False),  # the task of the graph above is not this one
        ("n", False),  # a node runs often
        ("n:2", False),  # not without what is above
        ("t", False),
        ("parent", False),
        ("", False),
    ],
)
def test_what_a_label_answers_to(name, answers):
    given = label("a:1|n:2", branch="b", parent_branch="parent", node="n", thread_id="t", step=4)
    assert given.answers_to(name) is answers


def test_a_call_outside_of_a_graph_answers_to_its_call_alone():
    assert label().answers_to("call")
    assert not label().answers_to("None")
    assert not label(call="call-1").answers_to("call")


IN_A = label("a:1", thread_id="t")
BELOW_A = label("a:1|b:2", thread_id="t", branch="x")
IN_AB = label("ab:1", thread_id="u")


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        (PathSelector(), [IN_A, BELOW_A, IN_AB]),
        (PathSelector(path_id="x"), [BELOW_A]),
        (PathSelector(path_id="1"), [IN_A, IN_AB]),
        (PathSelector(thread_id="t"), [IN_A, BELOW_A]),
        (PathSelector(checkpoint_ns="a:1"), [IN_A, BELOW_A]),
        (PathSelector(at_ns="a:1"), [IN_A]),
        (PathSelector(at_ns="a"), []),
        (PathSelector(under_ns=frozenset({"ab:1", "a:1|b:2"})), [BELOW_A, IN_AB]),
        (PathSelector(under_ns=frozenset()), []),
        (PathSelector(path_id="1", thread_id="u"), [IN_AB]),
        (PathSelector(path_id="x", at_ns="a:1"), []),
        (PathSelector(checkpoint_ns="a:1", thread_id="u"), []),
    ],
)
def test_every_field_given_must_match(selector, meant):
    assert [given for given in (IN_A, BELOW_A, IN_AB) if selector.selects(given, 0)] == meant


def test_only_paths_begun_before_the_counter_stood_there():
    before = PathSelector(n_serial_below=3)
    assert [n for n in range(5) if before.selects(IN_A, n)] == [0, 1, 2]
    assert not PathSelector(n_serial_below=0).selects(IN_A, 0)
    assert not PathSelector(path_id="x", n_serial_below=3).selects(IN_A, 0)
    assert PathSelector().selects(IN_A, 10**9)
