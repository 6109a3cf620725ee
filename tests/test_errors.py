"""The tree of errors is the one its docstring draws; each can be caught as Python's own."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from sidequest_langchain import errors
from sidequest_langchain.errors import ContextLengthError, SideQuestError

LINE = re.compile(r"^ {4}([│ ]*)[├└]── (\w+)(?: \((\w+)\))?  +\S")
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException)
}


def drawn():
    """(name, parent, Python's own base or None) of every class in the drawing, root first."""
    lines = errors.__doc__.splitlines()
    start = lines.index("    SideQuestError")
    rows, above = [("SideQuestError", "Exception", None)], ["SideQuestError"]
    for line in lines[start + 1 : lines.index("", start)]:
        found = LINE.match(line)
        assert found, f"not readable: {line!r}"
        depth = len(found[1]) // 4 + 1
        del above[depth:]
        rows.append((found[2], above[-1], found[3]))
        above.append(found[2])
    return rows


def test_the_drawing_holds_every_class_once():
    names = [name for name, _, _ in drawn()]
    assert sorted(names) == sorted(CLASSES)


@pytest.mark.parametrize(("name", "parent", "own"), drawn())
def test_the_bases_are_the_drawn_ones(name, parent, own):
    bases = {base.__name__ for base in CLASSES[name].__bases__}
    assert bases == {parent, own} - {None}


@pytest.mark.parametrize("name", CLASSES)
def test_each_says_what_it_means(name):
    assert CLASSES[name].__doc__
    assert issubclass(CLASSES[name], SideQuestError)
    assert not issubclass(CLASSES[name], (AssertionError, TypeError))


def test_a_prompt_that_is_too_long_names_both_numbers_and_a_way_out():
    error = ContextLengthError(2049, 2048)
    assert (error.n_prompt_tokens, error.context_length) == (2049, 2048)
    assert "2049 tokens" in str(error)
    assert "2048" in str(error)
    assert "trim_messages" in str(error)


@pytest.mark.parametrize("way", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("name", CLASSES)
def test_an_error_survives_a_copy(name, way):
    given = (2049, 2048) if name == "ContextLengthError" else ("what was found",)
    error = CLASSES[name](*given)
    again = way(error)
    assert (type(again), str(again)) == (type(error), str(error))
    assert vars(again) == vars(error)
