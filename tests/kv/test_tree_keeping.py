"""What else keeps or frees segments, by example: pin, supersede, sweep."""

from __future__ import annotations

from sidequest_langchain.kv.integrity import check_integrity
from tests.kv.growing import bytes_of, text_of


def over(tree, n_tokens):
    """Whether more than `n_tokens` are resident, as a budget asks."""
    return lambda: tree.n_tokens > n_tokens


# -- pin -----------------------------------------------------------------------------------


def test_a_pin_outlives_releases_until_it_is_taken_off(grove):
    grove.run("ab", branch="trunk")
    path = grove.run("abcd", branch="b")
    pins = [grove.tree.pin(path), grove.tree.pin(path)]
    receipt = grove.release("b")
    assert (receipt.freed_bytes, receipt.n_deferred) == (0, 1)
    assert grove.release("trunk").freed_bytes == 0
    n_told = len(grove.receipts)
    grove.tree.unpin(pins[0])
    assert (grove.drawing(), len(grove.receipts)) == ("ab(cd)", n_told)
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


def test_a_path_pinned_before_its_first_row_goes_with_the_pin(grove):
    trunk = grove.run("ab", branch="trunk")
    path = grove.begin("ab", branch="b")
    pinned = grove.tree.pin(path)
    grove.tree.commit(path)
    check_integrity(grove.tree)
    assert grove.release("trunk").freed_bytes == 0
    assert grove.release("b").n_deferred == 1
    grove.tree.unpin(pinned)
    assert (grove.drawing(), grove.tree.paths) == ("", {})
    assert trunk.tip.n_bytes == 0


def test_a_pin_taken_off_an_empty_tip_leaves_the_path_on_its_trunk(grove):
    trunk = grove.run("ab", branch="trunk")
    path = grove.begin("ab", branch="b")
    pinned = grove.tree.pin(path)
    grove.tree.commit(path)
    grove.tree.unpin(pinned)
    assert (grove.drawing(), path.tip) == ("ab", trunk.tip)


def test_a_pin_taken_off_a_path_that_never_had_a_row_leaves_nothing(grove):
    path = grove.begin("ab")
    pinned = grove.tree.pin(path)
    grove.tree.commit(path)
    check_integrity(grove.tree)
    grove.tree.unpin(pinned)
    assert (grove.drawing(), grove.tree.paths) == ("", {})


def test_a_pinned_path_that_fails_keeps_its_trunk_and_not_what_it_stored(grove):
    grove.run("ab", branch="trunk")
    path = grove.begin("abcd", branch="b")
    pinned = grove.tree.pin(path)
    grove.feed(path, "cde", at_once=False)
    grove.tree.discard(path)
    check_integrity(grove.tree)
    assert grove.tree.n_bytes == bytes_of(2)
    assert grove.release("trunk").freed_bytes == 0
    grove.tree.unpin(pinned)
    assert (grove.drawing(), grove.tree.n_bytes) == ("", 0)


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


def test_a_trunk_counts_as_used_when_its_branches_are(grove):
    grove.run("ab")
    grove.run("xy")
    grove.run("abcd", branch="b")
    grove.release("b")
    grove.tree.sweep(over(grove.tree, 2))
    assert grove.drawing() == "ab"


def test_a_path_counts_as_used_until_it_ends(grove):
    long = grove.begin("ab")
    grove.feed(long, "ab")
    grove.run("xy")
    grove.tree.commit(long)
    grove.tree.sweep(over(grove.tree, 2))
    assert grove.drawing() == "ab"


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
