"""Releases by example, to the byte: what goes, what stays, who is meant, what was predicted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sidequest_langchain.labels import PathSelector
from tests.kv.growing import bytes_of, text_of

# -- release -------------------------------------------------------------------------------


def test_releasing_a_branch_frees_its_own_rows_only(grove):
    grove.run("abcd", branch="trunk")
    leaf = grove.run("abcdef", branch="leaf")
    grove.run("abcdxyz", branch="other")
    leaf_id = leaf.tip.segment_id
    receipt = grove.release("leaf")
    assert (receipt.path, receipt.reason, receipt.exact) == ("leaf", "test", True)
    assert (receipt.freed_bytes, receipt.freed_tokens) == (bytes_of(2), 2)
    assert (receipt.segments, receipt.n_paths, receipt.n_deferred) == ((leaf_id,), 1, 0)
    assert grove.drawing() == "abcd(xyz)"
    assert (grove.tree.n_bytes, grove.tree.n_tokens) == (bytes_of(7), 7)
    assert json.loads(json.dumps(receipt.to_json()))["freed_tokens"] == 2


def test_an_inner_path_stays_resident_until_its_last_child_goes(grove):
    grove.run("abcd", branch="trunk")
    grove.run("abcdef", branch="one")
    grove.run("abcdxy", branch="two")
    assert grove.release("trunk").freed_bytes == 0
    assert grove.release("one").freed_bytes == bytes_of(2)
    assert grove.drawing() == "abcd(xy)"
    last = grove.release("two")
    assert (last.freed_bytes, len(last.segments)) == (bytes_of(6), 2)
    assert (grove.drawing(), grove.tree.n_bytes, grove.tree.paths) == ("", 0, {})


def test_a_split_goes_as_a_whole(grove):
    grove.run("abcdef", branch="long")
    grove.run("abx", branch="short")
    assert grove.drawing() == "ab(cdef x)"
    assert grove.release("long").freed_tokens == 4
    assert grove.release("short").freed_tokens == 3


def test_release_is_idempotent_and_an_unknown_name_is_a_no_op(grove):
    grove.run("abcd", branch="b")
    assert grove.release("b").n_paths == 1
    for name in ["b", "never heard of"]:
        receipt = grove.release(name)
        assert (receipt.n_paths, receipt.freed_bytes, receipt.segments) == (0, 0, ())


def test_calls_that_have_not_begun_are_counted_as_deferred(grove):
    grove.run("ab", branch="b")
    chosen = PathSelector(path_id="b")
    assert grove.tree.predict_release(chosen).is_known
    receipt = grove.tree.release(chosen, reason="test", n_waiting=2)
    assert (receipt.n_paths, receipt.n_deferred, receipt.is_known) == (3, 2, True)
    assert receipt.freed_bytes == bytes_of(2)
    waiting = grove.tree.release(chosen, reason="test", n_waiting=1)
    assert (waiting.n_paths, waiting.n_deferred, waiting.is_known) == (1, 1, True)
    assert not grove.tree.release(chosen, reason="test").is_known
    assert not grove.tree.predict_release(chosen).is_known


def test_two_paths_on_one_tip_are_two_claims(grove):
    grove.run("abcd", branch="one")
    grove.run("abcd", branch="two")
    for name, n_tokens in [("one", 0), ("two", 4)]:
        predicted = grove.tree.predict_release(PathSelector(path_id=name))
        assert predicted.freed_bytes == bytes_of(n_tokens)
        assert grove.release(name).freed_bytes == bytes_of(n_tokens)


def test_what_was_released_is_computed_again(grove):
    grove.run("abcdef", branch="b")
    grove.run("abcdxy")
    grove.release("b")
    again = grove.run("abcdef", branch="b")
    assert (again.n_reused, grove.drawing()) == (4, "abcd(ef xy)")


def test_every_release_is_told_and_counted(grove):
    grove.run("abcd", branch="one")
    grove.run("abcdef", branch="two")
    given = [grove.release("two"), grove.release("one"), grove.release("one")]
    assert grove.receipts == given
    assert grove.tree.n_released_bytes == bytes_of(6)


# -- release while running -----------------------------------------------------------------


def test_a_running_path_is_only_marked_and_goes_at_its_end(grove):
    grove.run("ab", branch="trunk")
    path = grove.begin("abcd", branch="b")
    grove.feed(path, "cd")
    receipt = grove.release("b")
    assert (receipt.freed_bytes, receipt.n_paths, receipt.n_deferred) == (0, 1, 1)
    grove.feed(path, "ef", at_once=False)
    grove.tree.commit(path)
    assert grove.drawing() == "ab"
    late = grove.receipts[-1]
    assert (late.path, late.reason) == ("b", "released while running")
    assert (late.freed_bytes, late.freed_tokens) == (bytes_of(4), 4)


def test_a_running_path_keeps_what_it_stands_on(grove):
    grove.run("abcd", branch="trunk")
    path = grove.begin("abcdef", branch="b")
    assert grove.release("trunk").freed_bytes == 0
    assert text_of(path) == "abcd"
    grove.feed(path, "ef")
    grove.tree.discard(path)
    assert (grove.drawing(), grove.tree.n_bytes) == ("", 0)


def test_a_marked_path_that_fails_is_gone_too(grove):
    path = grove.begin("abcd", branch="b")
    grove.feed(path, "ab")
    grove.release("b")
    grove.tree.discard(path)
    assert (grove.drawing(), grove.tree.paths) == ("", {})


def test_a_marked_path_that_ends_on_its_trunk_lets_the_trunk_go(grove):
    grove.run("abcd", branch="trunk")
    path = grove.begin("abcd", branch="b")
    grove.release("trunk")
    grove.release("b")
    grove.tree.commit(path)
    assert (grove.drawing(), grove.receipts[-1].freed_bytes) == ("", bytes_of(4))


# -- who is meant --------------------------------------------------------------------------

NAMES = {
    "top": {"checkpoint_ns": "a:1", "thread_id": "t1"},
    "longer name": {"checkpoint_ns": "ab:1", "thread_id": "t1"},
    "nested": {"checkpoint_ns": "a:1|b:2", "thread_id": "t1"},
    "other task": {"checkpoint_ns": "a:2", "thread_id": "t2"},
    "branched": {"checkpoint_ns": "a:3", "thread_id": "t2", "branch": "x"},
    "outside": {},
}
ALL = list(NAMES)


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        (PathSelector(path_id="a:1"), ["top", "nested"]),
        (PathSelector(path_id="1"), ["top", "longer name"]),
        (PathSelector(path_id="a"), []),
        (PathSelector(path_id="2"), ["nested", "other task"]),
        (PathSelector(path_id="x"), ["branched"]),
        (PathSelector(path_id="outside"), ["outside"]),
        (PathSelector(path_id="1", thread_id="t2"), []),
        (PathSelector(thread_id="t2"), ["other task", "branched"]),
        (PathSelector(checkpoint_ns="a:1"), ["top", "nested"]),
        (PathSelector(at_ns="a:1"), ["top"]),
        (PathSelector(under_ns=frozenset({"a:1|b:2", "ab:1"})), ["longer name", "nested"]),
        (PathSelector(under_ns=frozenset()), []),
        (PathSelector(n_serial_below=2), ["top", "longer name"]),
        (PathSelector(thread_id="t2", n_serial_below=4), ["other task"]),
        (PathSelector(), ALL),
    ],
)
def test_a_selector_frees_the_paths_it_means(grove, selector, meant):
    for i, (call, label) in enumerate(NAMES.items()):
        grove.run(f"ab{i}", call, **label)
    assert [p.label.call_id for p in grove.tree.select(selector)] == meant
    predicted = grove.tree.predict_release(selector)
    receipt = grove.tree.release(selector, reason="test")
    left = [c for c in ALL if c not in meant]
    assert [p.label.call_id for p in grove.tree.paths.values()] == left
    n_freed = len(meant) + (0 if left else 2)
    assert (receipt.n_paths, receipt.freed_tokens) == (len(meant), n_freed)
    assert receipt.freed_bytes == bytes_of(n_freed)
    assert replace(predicted, path="", reason="") == replace(receipt, path="", reason="")


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        (PathSelector(path_id="x", thread_id="t"), "x"),
        (PathSelector(checkpoint_ns="a:1", thread_id="t"), "a:1"),
        (PathSelector(thread_id="t"), "t"),
        (PathSelector(), "*"),
    ],
)
def test_a_receipt_says_what_was_asked(grove, selector, name):
    assert grove.tree.release(selector, reason="").path == name
    assert grove.tree.release(selector, reason="", name="given").path == "given"
    assert grove.tree.predict_release(selector).path == name
    assert grove.tree.predict_release(selector, name="given").path == "given"


# -- predict -------------------------------------------------------------------------------


def test_a_prediction_is_the_receipt_and_changes_nothing(grove):
    grove.run("abcd", thread_id="t", branch="trunk")
    grove.run("abcdef", thread_id="t")
    grove.run("abcdxy", thread_id="t")
    grove.run("abq", thread_id="u")
    running = grove.begin("abcdefg", thread_id="t")
    grove.feed(running, "g")
    before = grove.drawing(), grove.tree.n_bytes, list(grove.tree.paths)
    selector = PathSelector(thread_id="t")
    predicted = grove.tree.predict_release(selector)
    assert (grove.drawing(), grove.tree.n_bytes, list(grove.tree.paths)) == before
    assert (predicted.n_paths, predicted.n_deferred, predicted.freed_tokens) == (4, 1, 2)
    receipt = grove.tree.release(selector, reason="prediction", name=predicted.path)
    assert receipt == predicted
    assert receipt.freed_bytes == before[1] - grove.tree.n_bytes
