"""How a path ends, by example: commit and discard, and the storage they leave."""

from __future__ import annotations

import pytest

from tests.kv.growing import bytes_of, resident_heads, storage_bytes, text_of

# -- commit --------------------------------------------------------------------------------


def test_commit_gives_back_the_room_to_grow(grove):
    path = grove.begin("ab")
    grove.feed(path, "abc", at_once=False)
    assert grove.tree.n_bytes > bytes_of(3)
    grove.tree.commit(path)
    assert (path.tip.capacity, path.tip.is_open, path.is_running) == (3, False, False)
    assert grove.tree.n_bytes == bytes_of(3)


def test_a_path_without_a_single_row_leaves_nothing(grove):
    path = grove.begin("ab")
    grove.tree.commit(path)
    assert (grove.tree.paths, grove.drawing()) == ({}, "")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_siblings_with_equal_tokens_become_one(grove, order):
    pair = [grove.begin("ab"), grove.begin("ab")]
    for path in pair:
        grove.feed(path, "ab")
    assert grove.tree.n_bytes == bytes_of(4)
    for i in order:
        grove.tree.commit(pair[i])
    assert grove.drawing() == "ab"
    assert pair[0].tip is pair[1].tip
    assert grove.tree.n_bytes == bytes_of(2)
    assert grove.tree.n_tokens == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_siblings_with_an_equal_head_share_it(grove, order):
    texts = ["abcx", "abyyy"]
    pair = [grove.begin(text) for text in texts]
    for path, text in zip(pair, texts, strict=True):
        grove.feed(path, text)
    for i in order:
        grove.tree.commit(pair[i])
    assert grove.drawing() == "ab(cx yyy)"
    assert [text_of(path) for path in pair] == texts
    assert grove.tree.n_bytes == bytes_of(7)


def test_a_late_sibling_descends_through_what_is_there(grove):
    late = grove.begin("abcdez")
    grove.feed(late, "abcdez")
    grove.run("abcdef")
    assert grove.drawing() == "abcde(f z*)"
    later = grove.begin("qabc")
    grove.feed(later, "q")
    grove.run("qabxy")
    grove.feed(later, "abxyw")
    grove.tree.commit(later)
    assert grove.drawing() == "abcde(f z*) q(abxy(w))"


def test_shares_with_a_closed_sibling_before_a_longer_one_that_runs(grove):
    running, ending = grove.begin("abcd"), grove.begin("abcx")
    grove.run("abq")
    grove.feed(running, "abcd")
    grove.feed(ending, "abcx")
    grove.tree.commit(ending)
    assert grove.drawing() == "ab(cx q) abcd*"
    grove.tree.commit(running)
    assert grove.drawing() == "ab(c(d x) q)"


def test_shares_with_a_sibling_that_still_runs(grove):
    running = grove.begin("abcd")
    done = grove.begin("abx")
    grove.feed(running, "abcd")
    grove.feed(done, "abx")
    tip = running.tip
    grove.tree.commit(done)
    assert grove.drawing() == "ab(cd* x)"
    assert running.tip is tip
    grove.feed(running, "e")
    grove.tree.commit(running)
    assert grove.drawing() == "ab(cde x)"


# -- discard -------------------------------------------------------------------------------


def test_discard_undoes_the_path_exactly(grove):
    grove.run("abcd")
    before = grove.drawing(), grove.tree.n_bytes, grove.tree.n_tokens, resident_heads(grove.tree)
    path = grove.begin("abcdxy")
    grove.feed(path, "xyz", at_once=False)
    grove.tree.discard(path)
    after = grove.drawing(), grove.tree.n_bytes, grove.tree.n_tokens, resident_heads(grove.tree)
    assert after == before
    assert list(grove.tree.paths) == [0]


def test_discard_leaves_a_head_that_another_path_took_over(grove):
    failed = grove.begin("abcd")
    grove.feed(failed, "abcd")
    other = grove.begin("abx")
    grove.tree.discard(failed)
    assert grove.drawing() == "ab(*)"
    grove.tree.discard(other)
    assert (grove.drawing(), grove.tree.n_bytes) == ("", 0)


def test_discard_before_the_first_row(grove):
    grove.tree.discard(grove.begin("ab"))
    assert (grove.drawing(), grove.tree.paths) == ("", {})


# -- storage -------------------------------------------------------------------------------


def test_no_view_keeps_a_larger_storage_alive(grove):
    path = grove.begin("abcdefgh")
    grove.feed(path, "abcdefgh")
    grove.tree.commit(path)
    grove.run("abx")
    grove.run("abcdy")
    tensors = [t for s in grove.tree.segments() for t in (*s.keys, *s.values)]
    assert storage_bytes(tensors) == bytes_of(10) == grove.tree.n_bytes
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_the_peak_counts_what_was_resident_at_once(grove):
    first = grove.begin("abcd")
    grove.feed(first, "abcd")
    second = grove.begin("xy")
    grove.feed(second, "xy")
    grove.tree.discard(first)
    assert (grove.tree.n_bytes, grove.tree.peak_bytes) == (bytes_of(2), bytes_of(6))
