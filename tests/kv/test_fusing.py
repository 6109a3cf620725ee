"""Segments of a path that become one: who stays, what is copied, who is told."""

from __future__ import annotations

import pytest
import torch

from sidequest_langchain.kv import chain, residency
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.storage import Storage
from tests.kv.attending import World
from tests.kv.fusing import line, own, sealed, text
from tests.kv.growing import bytes_of, ids, tokens_to

# -- who stays -----------------------------------------------------------------------------


def test_the_greedy_one_begins_at_the_root(grove):
    path = sealed(grove, "abc", "de", "fgh", "i", "jk")
    assert grove.tree.fuse(path.tip, 5) == 2
    assert line(path) == ["abcde", "fghi", "jk", ""]
    assert grove.tree.fuse(path.tip, 4) == 0
    assert grove.tree.fuse(path.tip, 6) == 1
    assert line(path) == ["abcde", "fghijk", ""]
    grove.tree.commit(path)


def test_where_a_path_ends_is_a_border(grove):
    grove.run("abc")
    path = sealed(grove, "abc", "de", "fg")
    assert grove.tree.fuse(path.tip, 99) == 1
    assert line(path) == ["abc", "defg", ""]
    grove.tree.commit(path)
    assert path.tip.parent is not None
    grove.tree.fuse(path.tip, 99)
    assert line(path) == ["abc", "defg"]
    grove.release("call-0")
    assert grove.tree.fuse(path.tip, 99) == 1
    assert (line(path), path.tip.paths) == (["abcdefg"], {path})


def test_a_fork_is_a_border_and_its_child_is_none(grove):
    path = sealed(grove, "ab", "cd", "ef", "gh")
    other = grove.begin("abcdx")
    grove.feed(other, "x")
    assert grove.tree.fuse(path.tip, 99) == 2
    assert grove.drawing() == "abcd(efgh(*) x*)"
    assert {s.parent for s in path.tip.path()[1].parent.children} == {path.tip.path()[0]}
    grove.tree.discard(other)
    assert grove.tree.fuse(path.tip, 99) == 1
    grove.tree.commit(path)


def test_open_tips_stay(grove):
    path = sealed(grove, "ab")
    grove.feed(path, "cd")
    assert grove.tree.fuse(path.tip, 99) == 0
    grove.tree.commit(path)
    assert grove.tree.fuse(path.tip, 99) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_pinned_segments_stay(grove, which):
    path = sealed(grove, "ab", "cd")
    segment = path.tip.path()[which]
    segment.n_pins += 1
    assert grove.tree.fuse(path.tip, 99) == 0
    grove.tree.unpin(segment)
    assert grove.tree.fuse(path.tip, 99) == 1
    grove.tree.commit(path)


def test_what_stands_on_a_pin_below_may_be_fused(grove):
    path = sealed(grove, "ab", "cd", "ef")
    grove.tree.commit(path)
    pinned = grove.tree.pin(path)
    assert grove.tree.fuse(path.tip, 99) == 1
    assert line(path) == ["abcd", "ef"]
    grove.release("call-0")
    assert grove.drawing() == "abcd(ef)"
    grove.tree.unpin(pinned)
    assert (grove.drawing(), grove.tree.n_bytes) == ("", 0)


def test_kinds_stay_with_their_tokens(grove):
    path = sealed(grove, "abc", "de")
    first, second, _ = path.tip.path()
    first.kinds[:], second.kinds[:] = b"\x01\x02\x03", b"\x04\x05"
    grove.tree.fuse(path.tip, 99)
    assert second.kinds == bytearray(b"\x01\x02\x03\x04\x05")
    assert first.kinds == bytearray(b"\x01\x02\x03")
    grove.tree.commit(path)


def test_what_a_scratch_stands_on_stays(grove):
    path = sealed(grove, "ab", "cd")
    scratch = grove.tree.scratch(path.tip.path()[0], 2, 4)
    assert grove.tree.fuse(path.tip, 99) == 0
    assert tokens_to(scratch) == tuple(ids("ab"))
    grove.tree.discard_scratch(scratch)
    assert grove.tree.fuse(path.tip, 99) == 1
    grove.tree.commit(path)


@pytest.mark.parametrize("which", [0, 1])
def test_rows_by_head_stay(which):
    grove = World(0).grove()
    path = sealed(grove, "abc", "abd")
    segment = path.tip.path()[which]
    managed = residency.Residency(n_tokens=3, kept_by_head=torch.arange(3).expand(3, 2, 3))
    segment.residency = managed
    assert grove.tree.fuse(path.tip, 99) == 0


# -- storages ------------------------------------------------------------------------------


def test_neighbours_in_one_storage_are_not_copied(grove, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    path = sealed(grove, "ab", "cd", "ef", is_kept=False)
    storage = path.tip.path()[0].storage
    grove.tree.peak_bytes = grove.tree.n_bytes
    assert grove.tree.fuse(path.tip, 99) == 2
    [fused, _] = path.tip.path()
    assert fused.storage is storage
    assert fused.fellows == []
    assert grove.tree.peak_bytes == grove.tree.n_bytes == bytes_of(6)
    grove.tree.commit(path)


def test_those_who_share_with_somebody_else_stay(grove, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    path = sealed(grove, "ab", "cd", "ef", is_kept=False)
    grove.tree.pin(path)
    first, second, third, _ = path.tip.path()
    first.n_pins += 1
    own(grove, third)
    assert second.fellows == [first, second]
    assert grove.tree.fuse(path.tip, 99) == 0
    grove.tree.unpin(first)
    assert grove.tree.fuse(path.tip, 99) == 2  # first side by side, then with a copy
    grove.tree.unpin(path.tip)
    grove.tree.commit(path)


def test_those_beside_them_in_one_storage_keep_theirs(grove, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    path = sealed(grove, "ab", "cd", "ef", "gh", is_kept=False)
    parts = path.tip.path()[:-1]
    parts[0].n_pins, parts[3].n_pins = 1, 1
    assert grove.tree.fuse(path.tip, 99) == 1
    assert line(path) == ["ab", "cdef", "gh", ""]
    assert parts[2].fellows == [parts[0], parts[2], parts[3]]
    assert parts[2].place == (2, 6)
    for part in (parts[0], parts[3]):
        grove.tree.unpin(part)
    assert grove.tree.fuse(path.tip, 99) == 2
    assert parts[3].fellows == []
    grove.tree.commit(path)


def test_a_gap_between_them_in_one_storage_is_not_taken_in(grove, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    path = sealed(grove, "ab", "cd", is_kept=False)
    first, second, _ = path.tip.path()
    # As a storage is that could not be made smaller: a b c c d.
    gapped = Storage.joined([first.storage] * 2, [(0, 3), (2, 4)])
    first.move_to(gapped, 0, first.fellows)
    second.move_to(gapped, 3, second.fellows)
    grove.tree._account(bytes_of(1))
    assert grove.tree.fuse(path.tip, 99) == 0
    grove.tree._settle(gapped, first.fellows)
    assert grove.tree.fuse(path.tip, 99) == 1
    grove.tree.commit(path)


def test_the_copy_counts_and_slack_goes(grove):
    path = grove.begin("x")
    grove.feed(path, "a" * 300)
    grove.tree.seal(path)
    grove.feed(path, "b" * 300)
    grove.feed(path, "b", at_once=False)  # leaves room to grow
    two = grove.tree.seal(path)
    own(grove, path.tip.path()[0])
    slack = two.capacity - two.n_rows
    tree = grove.tree
    tree.peak_bytes = tree.peak_resident_bytes = tree.n_bytes
    n_bytes = tree.n_bytes
    assert n_bytes == bytes_of(601 + slack)
    assert slack > 0
    assert tree.fuse(path.tip, 601) == 1
    assert tree.n_bytes == bytes_of(601)
    assert tree.peak_bytes == n_bytes + bytes_of(601)
    assert tree.peak_resident_bytes == n_bytes
    tree.commit(path)


def test_copies_of_packed_rows_count(grove):
    path = sealed(grove, "a" * 128, "b" * 128)
    for segment in path.tip.path()[:-1]:
        grove.tree.compress(segment, range(128), 8)
    n = grove.tree.peak_bytes = grove.tree.n_bytes
    assert grove.tree.fuse(path.tip, 256) == 1
    assert grove.tree.n_bytes == n  # two whole groups each
    assert grove.tree.peak_bytes == 2 * n
    grove.tree.commit(path)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", [(Storage, "joined"), (PackedBlock, "joined")])
def test_without_memory_nothing_happens(grove, monkeypatch, where, error):
    path = sealed(grove, "abcd", "efgh", "ijkl")
    for segment in path.tip.path()[:-1]:
        grove.tree.compress(segment, [1, 2], 8)
    before = [(s.storage, s.residency, text(s)) for s in path.tip.path()]
    told = []
    grove.tree.on_fuse = lambda *pair: told.append(pair)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*where, fail)
        assert grove.tree.fuse(path.tip, 99) == 0
    assert [(s.storage, s.residency, text(s)) for s in path.tip.path()] == before
    assert told == []
    assert grove.tree.fuse(path.tip, 99) == 2
    grove.tree.commit(path)


# -- those who keep notes ------------------------------------------------------------------


def test_listeners_see_the_pair_before_it_is_one(grove):
    path = sealed(grove, "ab", "cd", "ef")
    seen = []

    def look(parent, child):
        assert child.parent is parent
        assert child.start == parent.end
        seen.append((text(parent), text(child), parent.start))

    grove.tree.on_fuse = look
    assert grove.tree.fuse(path.tip, 99) == 2
    assert seen == [("ab", "cd", 0), ("abcd", "ef", 0)]
    grove.tree.commit(path)


def test_a_listener_that_fails_leaves_a_sound_tree(grove):
    path = sealed(grove, "ab", "cd", "ef")

    def fail(parent, child):
        raise ZeroDivisionError

    grove.tree.on_fuse = fail
    with pytest.raises(ZeroDivisionError):
        grove.tree.fuse(path.tip, 99)
    assert line(path) == ["abcdef", ""]
    grove.tree.commit(path)


def test_the_parent_keeps_nothing_alive(grove):
    path = sealed(grove, "ab", "cd")
    [parent, child, _] = path.tip.path()
    grove.tree.evict(parent, [0])
    grove.tree.fuse(path.tip, 99)
    assert (parent.n_bytes, parent.n_resident, parent.children) == (0, 0, [])
    assert child.parent is not parent
    assert parent not in child.parent.children
    grove.tree.commit(path)


def test_no_sweep_finds_the_parent(grove):
    one = grove.run("ab")
    parent = one.tip
    two = grove.begin("abcd")
    grove.feed(two, "cd")
    grove.tree.commit(two)
    assert parent in grove.tree.idle
    grove.release(one.label.call_id)
    assert grove.tree.fuse(two.tip, 99) == 1
    assert parent not in grove.tree.idle
    assert grove.tree.sweep(lambda: True) == bytes_of(4)
