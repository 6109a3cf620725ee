"""How a path begins and grows, by example: match, begin, reserve, extend, crop."""

from __future__ import annotations

from sidequest_langchain.kv.segment import GROWTH_ROWS
from sidequest_langchain.labels import PathSelector, StepLabel
from tests.kv.growing import bytes_of, ids, text_of

# -- match ---------------------------------------------------------------------------------


def test_matches_the_longest_resident_head(grove):
    grove.run("abcd")
    grove.run("abxy")
    lengths = {
        t: grove.tree.match("s", ids(t))[1] for t in ["abcdz", "abxyz", "abq", "ab", "zab", ""]
    }
    assert lengths == {"abcdz": 4, "abxyz": 4, "abq": 2, "ab": 2, "zab": 0, "": 0}


def test_names_the_segment_in_which_the_match_ends(grove):
    grove.run("abcd")
    branch = grove.run("abxy")
    found, n = grove.tree.match("s", ids("abxz"))
    assert (found, n) == (branch.tip, 3)
    assert grove.tree.match("s", ids("q")) == (None, 0)


def test_matching_changes_nothing(grove):
    grove.run("abcd")
    last_used = [s.last_used for s in grove.tree.segments()]
    grove.tree.match("s", ids("abz"))
    grove.tree.match("elsewhere", ids("abz"))
    assert grove.drawing() == "abcd"
    assert [s.last_used for s in grove.tree.segments()] == last_used


def test_scopes_share_nothing(grove):
    grove.run("abcd", scope="mine")
    other = grove.run("abcd", scope="theirs")
    assert other.n_reused == 0
    assert (grove.drawing("mine"), grove.drawing("theirs")) == ("abcd", "abcd")
    assert grove.tree.n_bytes == bytes_of(8)


def test_matches_on_past_a_running_tip_that_repeats_a_part(grove):
    running = grove.begin("abx")
    grove.feed(running, "a")
    grove.run("abc")
    grove.run("abcdef")
    grove.feed(running, "bx")
    found, n = grove.tree.match("s", ids("abcdefg"))
    assert (n, found.is_open) == (6, False)
    assert not grove.tree.match("s", ids("ab"))[0].is_open, "the closed twin needs no cut"
    assert grove.begin("abcde").n_reused == 5
    grove.tree.commit(running)
    assert grove.drawing() == "a(b(c(de(* f)) x))"


def test_matches_rows_that_a_running_path_has_written(grove):
    path = grove.begin("abcd")
    grove.feed(path, "abc")
    assert grove.tree.match("s", ids("abcd")) == (path.tip, 3)


# -- begin ---------------------------------------------------------------------------------


def test_a_cold_path_begins_at_the_root_and_holds_nothing(grove):
    path = grove.begin("abc")
    assert (path.n_reused, path.serial, path.is_running, path.tip.start) == (0, 0, True, 0)
    assert grove.drawing() == "*"
    assert (grove.tree.n_bytes, grove.tree.n_tokens, grove.tree.serial) == (0, 0, 1)


def test_splits_a_segment_where_the_prompt_leaves_it(grove):
    old = grove.run("abcd")
    path = grove.begin("abxy")
    assert path.n_reused == 2
    assert path.tip.start == 2
    assert grove.drawing() == "ab(* cd)"
    assert text_of(old) == "abcd"
    assert grove.tree.n_bytes == bytes_of(4)


def test_splits_again_inside_of_a_tail(grove):
    grove.run("abcdef")
    grove.run("abx")
    grove.run("abcdy")
    assert grove.drawing() == "ab(cd(ef y) x)"
    assert grove.tree.n_bytes == bytes_of(8)


def test_begins_at_the_end_of_a_segment_without_a_split(grove):
    grove.run("abcd")
    follow_up = grove.run("abcdef")
    assert (follow_up.n_reused, grove.drawing()) == (4, "abcd(ef)")


def test_a_trunk_is_stored_once_for_eight_branches(grove):
    trunk = "".join(chr(0x100 + i) for i in range(1000))
    grove.run(trunk)
    branches = [grove.run(trunk + letter * 3) for letter in "abcdefgh"]
    assert [b.n_reused for b in branches] == [1000] * 8
    assert (grove.tree.n_tokens, grove.tree.n_bytes) == (1024, bytes_of(1024))


def test_a_prompt_that_is_resident_to_its_end_stores_nothing(grove):
    trunk = grove.run("abcd")
    again = grove.begin("abcd")
    assert (again.n_reused, grove.drawing()) == (4, "abcd(*)")
    grove.tree.commit(again)
    assert (again.tip, grove.drawing()) == (trunk.tip, "abcd")
    assert grove.tree.n_bytes == bytes_of(4)


def test_a_prompt_that_ends_inside_of_a_segment(grove):
    grove.run("abcd")
    short = grove.run("ab")
    assert (short.n_reused, text_of(short), grove.drawing()) == (2, "ab", "ab(cd)")


def test_cuts_the_open_tip_of_a_running_path(grove):
    first = grove.begin("abcd")
    grove.feed(first, "abcd")
    tip = first.tip
    second = grove.begin("abxy")
    assert first.tip is tip
    assert (grove.drawing(), second.n_reused) == ("ab(* cd*)", 2)
    grove.feed(first, "ef")
    grove.feed(second, "xy")
    grove.tree.commit(first)
    grove.tree.commit(second)
    assert (grove.drawing(), text_of(first)) == ("ab(cdef xy)", "abcdef")
    assert grove.tree.n_bytes == bytes_of(8)


def test_cuts_an_open_tip_even_at_its_very_end(grove):
    first = grove.begin("ab")
    grove.feed(first, "ab")
    second = grove.begin("abcd")
    assert (second.n_reused, grove.drawing()) == (2, "ab(* *)")
    grove.feed(first, "x")
    grove.feed(second, "cd")
    grove.tree.commit(second)
    grove.tree.commit(first)
    assert grove.drawing() == "ab(cd x)"


def test_heads_cut_off_two_running_tips_are_stored_once(grove):
    pair = [grove.begin("abcx"), grove.begin("abcy")]
    for path, text in zip(pair, ["abcx", "abcy"], strict=True):
        grove.feed(path, text)
    others = [grove.begin("abcxz"), grove.begin("abcyz")]
    for path in [*others, *pair]:
        grove.tree.commit(path)
    assert grove.drawing() == "abc(x y)"
    assert grove.tree.n_bytes == bytes_of(5)


def test_a_number_taken_beforehand_counts_as_the_time_of_the_call(grove):
    early = grove.tree.next_serial()
    late = grove.run("xy", branch="late")
    waited = grove.tree.begin("s", ids("ab"), StepLabel(call_id="c"), serial=early)
    assert (early, late.serial, waited.serial, grove.tree.serial) == (0, 1, 0, 2)
    assert grove.tree.select(PathSelector(n_serial_below=1)) == [waited]


# -- reserve, extend, crop -----------------------------------------------------------------


def test_a_prefill_takes_just_the_room_it_needs(grove):
    path = grove.begin("abcde")
    grove.feed(path, "abc")
    assert (path.tip.capacity, grove.tree.n_bytes) == (3, bytes_of(3))
    grove.feed(path, "de")
    assert (path.tip.capacity, grove.tree.n_bytes) == (5, bytes_of(5))


def test_a_decoded_token_brings_room_for_more(grove):
    path = grove.begin("ab")
    grove.feed(path, "ab")
    grove.feed(path, "c")
    assert path.tip.capacity == 2 + GROWTH_ROWS
    assert grove.tree.n_bytes == bytes_of(2 + GROWTH_ROWS)
    assert grove.tree.n_tokens == 3
    before = path.tip.keys[0].data_ptr()
    grove.feed(path, "d" * (GROWTH_ROWS - 1), at_once=False)
    assert path.tip.keys[0].data_ptr() == before
    assert path.tip.n_rows == path.tip.capacity


def test_room_grows_with_a_long_segment(grove):
    path = grove.begin("a")
    grove.feed(path, "a" * 800)
    grove.feed(path, "b")
    assert path.tip.capacity == 800 + 801 // 8
    assert path.tip.capacity_for(50) == path.tip.capacity
    assert path.tip.capacity_for(101) == 801 + 101


def test_crop_keeps_the_first_rows_of_the_tip(grove):
    trunk = grove.run("ab")
    path = grove.begin("abcd")
    grove.feed(path, "cd")
    grove.feed(path, "efg", at_once=False)
    grove.tree.crop(path, 3)
    assert (text_of(path), grove.tree.n_tokens) == ("abcde", 5)
    assert grove.tree.n_bytes == bytes_of(5)
    grove.feed(path, "z")
    grove.tree.commit(path)
    assert (grove.drawing(), text_of(trunk)) == ("ab(cdez)", "ab")


def test_a_path_cropped_to_nothing_ends_where_it_began(grove):
    trunk = grove.run("ab")
    path = grove.begin("abcd")
    grove.feed(path, "cd")
    grove.tree.crop(path, 0)
    grove.tree.commit(path)
    assert (path.tip, grove.drawing()) == (trunk.tip, "ab")
