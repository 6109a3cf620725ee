"""Letting go by example: release, predict, pin, supersede and sweep, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.labels import PathSelector
from tests.kv.growing import TOKEN_BYTES, Grove, check_rows, reachable_bytes, text_of


@pytest.fixture
def grove():
    """A tree that is audited, down to every row, when the test ends."""
    grove = Grove()
    yield grove
    check_integrity(grove.tree)
    check_rows(grove)
    assert reachable_bytes(grove.tree) == grove.tree.n_bytes


def bytes_of(n_tokens):
    return n_tokens * TOKEN_BYTES


def over(tree, n_tokens):
    """Whether more than `n_tokens` are resident, as a budget asks."""
    return lambda: tree.n_tokens > n_tokens


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


def test_two_paths_on_one_tip_are_two_claims(grove):
    grove.run("abcd", branch="one")
    grove.run("abcd", branch="two")
    assert grove.release("one").freed_bytes == 0
    assert grove.release("two").freed_bytes == bytes_of(4)


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


# -- pin -----------------------------------------------------------------------------------


def test_a_pin_outlives_releases_until_it_is_taken_off(grove):
    grove.run("ab", branch="trunk")
    path = grove.run("abcd", branch="b")
    pins = [grove.tree.pin(path), grove.tree.pin(path)]
    receipt = grove.release("b")
    assert (receipt.freed_bytes, receipt.n_deferred) == (0, 1)
    assert grove.release("trunk").freed_bytes == 0
    grove.tree.unpin(pins[0])
    assert grove.drawing() == "ab(cd)"
    grove.tree.unpin(pins[1])
    assert (grove.drawing(), grove.tree.paths) == ("", {})
    late = grove.receipts[-1]
    assert (late.path, late.reason, late.freed_bytes) == (
        "b",
        "released while pinned",
        bytes_of(4),
    )


def test_a_pin_taken_off_a_path_in_use_frees_nothing(grove):
    path = grove.run("abcd", branch="b")
    grove.tree.unpin(grove.tree.pin(path))
    assert (grove.drawing(), len(grove.receipts)) == ("abcd", 0)


def test_a_pin_holds_every_path_on_that_tip(grove):
    one = grove.run("abcd", branch="one")
    grove.run("abcd", branch="two")
    pinned = grove.tree.pin(one)
    assert grove.release("two").n_deferred == 1
    grove.tree.unpin(pinned)
    assert [p.label.branch for p in grove.tree.paths.values()] == ["one"]


def test_a_pinned_segment_that_is_split_stays_pinned_as_a_whole(grove):
    path = grove.run("abcdef", branch="b")
    pinned = grove.tree.pin(path)
    grove.run("abx", branch="other")
    grove.release("b")
    grove.release("other")
    assert grove.drawing() == "ab(cdef)"
    grove.tree.unpin(pinned)
    assert grove.drawing() == ""


def test_a_path_pinned_and_released_while_it_runs_goes_with_the_pin(grove):
    path = grove.begin("abcd", branch="b")
    grove.feed(path, "abcd")
    pinned = grove.tree.pin(path)
    grove.release("b")
    grove.tree.commit(path)
    assert (grove.drawing(), grove.receipts[-1].n_deferred) == ("abcd", 1)
    grove.tree.unpin(pinned)
    assert (grove.drawing(), grove.receipts[-1].freed_bytes) == ("", bytes_of(4))


# -- supersede -----------------------------------------------------------------------------


def test_supersede_frees_what_lies_beyond_the_common_head(grove):
    grove.run("ab<thought>c", "old")
    new = grove.begin("abcd")
    grove.tree.supersede(new, ["old", "unknown"])
    assert grove.drawing() == "ab(*)"
    grove.feed(new, "cd")
    grove.tree.commit(new)
    assert grove.drawing() == "ab(cd)"
    assert grove.tree.n_bytes == bytes_of(4)
    assert text_of(grove.tree.paths[0]) == "ab"


def test_supersede_leaves_the_branches_of_other_calls(grove):
    grove.run("abxxc", "old")
    grove.run("abxxd", "sibling")
    grove.run("abxxcff", "child")
    new = grove.begin("abc")
    grove.tree.supersede(new, ["old"])
    assert grove.drawing() == "ab(* xx(c(ff) d))"
    assert text_of(grove.tree.paths[0]) == "ab"
    grove.tree.supersede(new, ["child"])
    assert grove.drawing() == "ab(* xx(d))"


def test_supersede_leaves_a_call_that_runs_or_is_pinned(grove):
    running = grove.begin("abxx", "running")
    grove.feed(running, "abxx")
    pinned = grove.run("abyy", "pinned")
    grove.tree.pin(pinned)
    new = grove.begin("abc")
    grove.tree.supersede(new, ["running", "pinned"])
    assert grove.drawing() == "ab(* xx* yy)"


def test_supersede_of_a_call_with_nothing_in_common(grove):
    grove.run("xyz", "old")
    grove.run("pqr", "old too")
    grove.run("pqrst", "child")
    new = grove.begin("abc")
    grove.tree.supersede(new, ["old", "old too"])
    assert grove.drawing() == "* pqr(st)"
    assert [p.label.call_id for p in grove.tree.paths.values()] == ["child", new.label.call_id]


# -- sweep ---------------------------------------------------------------------------------


def test_sweep_frees_the_least_recently_used_leaf_first(grove):
    for text in ["abcc", "abdd", "abee"]:
        grove.run(text)
    grove.run("abcc")
    assert grove.tree.sweep(over(grove.tree, 7)) == bytes_of(2)
    assert grove.drawing() == "ab(cc ee)"
    grove.tree.sweep(over(grove.tree, 5))
    assert grove.drawing() == "ab(cc)"
    assert text_of(grove.tree.paths[1]) == "ab"


def test_sweep_stops_as_soon_as_it_can_and_does_nothing_below_the_budget(grove):
    grove.run("abcd")
    grove.run("xy")
    assert grove.tree.sweep(over(grove.tree, 6)) == 0
    assert grove.tree.sweep(over(grove.tree, 5)) == bytes_of(4)
    assert grove.drawing() == "xy"


def test_sweep_never_takes_what_runs_or_is_pinned(grove):
    grove.run("abcd")
    running = grove.begin("abcdef")
    grove.feed(running, "e")
    pinned = grove.run("xyz")
    grove.tree.pin(pinned)
    grove.run("qq")
    assert grove.tree.sweep(lambda: True) == bytes_of(2)
    assert grove.drawing() == "abcd(e*) xyz"


def test_sweep_of_a_shared_leaf_moves_all_its_paths_up(grove):
    grove.run("ab", "trunk")
    grove.run("abcd", "one")
    grove.run("abcd", "two")
    freed = grove.tree.sweep(over(grove.tree, 2))
    assert freed == bytes_of(2)
    assert [text_of(p) for p in grove.tree.paths.values()] == ["ab"] * 3
    grove.tree.sweep(over(grove.tree, 0))
    assert (grove.drawing(), grove.tree.paths, grove.tree.n_bytes) == ("", {}, 0)
