"""Rows packed, archived, brought back, hidden: books, bytes and bits."""

from __future__ import annotations

import random

import pytest
import torch

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv import chain
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.storage import Storage
from tests.kv.growing import bytes_of, check_rows, reachable_bytes, storage_bytes


@pytest.fixture
def archive(grove):
    archive = Archive(fingerprint={"model": "m"}, cpu_bytes=2**20)
    grove.tree.archive = archive
    yield archive
    n_owned = len({a.ticket for s in grove.tree.segments() for a in s.archived})
    assert archive.n_entries == n_owned
    grove.tree.archive = None
    archive.close()


def snapshot(segment):
    """Everything that is to be as it was, bit for bit."""
    packed = [(b.bits, b.offsets, b.load(0), b.load(1)) for b in segment.packed]
    rows = [t[:, : segment.n_rows].clone() for t in (*segment.keys, *segment.values)]
    return segment.kept, rows, packed


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def by_offset(packed):
    return {
        at: row
        for _, offsets, (keys, _), _ in packed
        for at, row in zip(offsets, keys.unbind(1), strict=True)
    }


LETTERS = "abcdefghijklmnopqrstuvwxyz" * 5


def packed_bytes_of(segment):
    return storage_bytes(t for b in segment.packed for n, t in b.tensors().items() if n != "header")


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_rows_are_those_of_a_block_of_the_originals(grove, bits):
    segment = grove.run(LETTERS).tip
    offsets = list(range(1, 100, 3))
    keys, values = ([t[:, offsets].clone() for t in ts] for ts in (segment.keys, segment.values))
    wanted = PackedBlock.pack(keys, values, offsets, bits=bits, exempt=(1,))
    before = grove.tree.n_bytes
    freed = grove.tree.compress(segment, reversed(offsets), bits, exempt=(1,))
    assert freed == before - grove.tree.n_bytes
    (block,) = segment.packed
    assert block.offsets == tuple(offsets)
    assert all(same(block.load(layer), wanted.load(layer)) for layer in (0, 1))
    assert (segment.n_rows, segment.n_resident) == (len(LETTERS) - 33, len(LETTERS))
    assert grove.tree.n_bytes == bytes_of(len(LETTERS) - 33) + packed_bytes_of(segment)
    assert grove.tree.n_tokens == len(LETTERS)


def test_int8_rows_go_on_to_int4_and_others_stay(grove):
    segment = grove.run(LETTERS).tip
    grove.tree.compress(segment, range(64), 8)
    grove.tree.compress(segment, range(96, 120), 4)
    kept = segment.packed[1].load(0)
    grove.tree.compress(segment, range(32, 110), 4)
    assert [(b.bits, b.offsets[0], b.offsets[-1]) for b in segment.packed] == [
        (8, 0, 31),
        (4, 96, 119),
        (4, 32, 95),
    ]
    assert same(segment.packed[1].load(0), kept)
    before = grove.tree.n_bytes
    assert grove.tree.compress(segment, range(32), 8) == 0 == before - grove.tree.n_bytes


def test_packed_rows_can_be_evicted_and_cut(grove):
    segment = grove.run(LETTERS).tip
    grove.tree.compress(segment, range(10, 110), 8)
    grove.tree.evict(segment, [0, 10, 11, 109])
    held = dict(zip(segment.packed[0].offsets, segment.packed[0].load(0)[0].unbind(1), strict=True))
    branch = grove.begin(LETTERS[:70] + "!")
    head = branch.tip.parent
    assert (head.n_resident, segment.n_resident) == (67, len(LETTERS) - 71)
    for part, shift in ((head, 0), (segment, 70)):
        (block,) = part.packed
        for at, row in zip(block.offsets, block.load(0)[0].unbind(1), strict=True):
            assert torch.equal(row, held[at + shift])
    check_integrity(grove.tree)


def test_the_moment_of_packing_counts_in_the_peak(grove):
    segment = grove.run(LETTERS).tip
    n = grove.tree.peak_bytes = grove.tree.n_bytes
    grove.tree.compress(segment, range(128), 8)
    packed = segment.packed[0].n_bytes
    assert grove.tree.peak_bytes == n + packed + bytes_of(len(LETTERS) - 128)


@pytest.mark.parametrize("bits", [3, 16])
def test_other_bits_are_refused(grove, bits):
    segment = grove.run("abcd").tip
    with pytest.raises(ValueError, match="8 or 4"):
        grove.tree.compress(segment, [0], bits)


# -- archive -------------------------------------------------------------------------------


def test_a_round_trip_is_exact(grove, archive):
    segment = grove.run(LETTERS).tip
    grove.tree.compress(segment, range(20, 90), 8)
    grove.tree.evict(segment, [3, 30])
    before, n_bytes = snapshot(segment), grove.tree.n_bytes
    gone = [0, 2, 3, 25, 26, 27, 100, 101]
    assert grove.tree.archive_rows(segment, gone)
    assert grove.tree.n_bytes == n_bytes
    assert {(a.bits, a.offsets) for a in segment.archived} == {
        (None, (0, 2, 100, 101)),
        (8, (25, 26, 27)),
    }
    freed = grove.tree.evict(segment, gone)
    assert grove.tree.n_bytes == n_bytes - freed
    assert grove.tree.restore(segment) == grove.tree.n_bytes - (n_bytes - freed)
    assert segment.archived == ()
    kept, rows, packed = snapshot(segment)
    assert same((kept, rows), before[:2])
    once, now = by_offset(before[2]), by_offset(packed)
    assert once.keys() == now.keys()
    assert all(torch.equal(once[at], now[at]) for at in once)
    assert grove.tree.archive.n_entries == 0
    assert reachable_bytes(list(grove.tree.segments())) == grove.tree.n_bytes


def test_the_original_takes_the_place_of_packed_rows(grove, archive):
    segment = grove.run(LETTERS).tip
    before = snapshot(segment)
    assert grove.tree.archive_rows(segment, range(128))
    grove.tree.compress(segment, range(128), 4)
    assert grove.tree.archive_rows(segment, range(128))
    assert archive.n_entries == 1, "a coarse copy beside the original"
    grove.tree.evict(segment, range(64))
    grove.tree.restore(segment)
    assert segment.residency is None
    assert same(snapshot(segment), before)


def test_some_rows_come_back_and_the_rest_can_later(grove, archive):
    segment = grove.run("abcdefgh").tip
    grove.tree.archive_rows(segment, range(8))
    grove.tree.evict(segment, range(8))
    assert grove.tree.restore(segment, [1, 6]) == bytes_of(2)
    assert (segment.kept, segment.archived[0].offsets) == ((1, 6), (0, 2, 3, 4, 5, 7))
    check_rows(grove)
    assert grove.tree.restore(segment) == bytes_of(6)
    assert segment.residency is None


def test_some_packed_rows_come_back_and_the_rest_can_later(grove, archive):
    segment = grove.run(LETTERS).tip
    grove.tree.compress(segment, range(20, 90), 4)
    before = by_offset(snapshot(segment)[2])
    grove.tree.archive_rows(segment, range(20, 90))
    grove.tree.evict(segment, range(20, 90))
    for some in ([25, 40, 88], [21], None):
        grove.tree.restore(segment, some)
        check_integrity(grove.tree)
        assert reachable_bytes(list(grove.tree.segments())) == grove.tree.n_bytes
    now = by_offset(snapshot(segment)[2])
    assert now.keys() == before.keys()
    assert all(torch.equal(now[at], before[at]) for at in now)
    assert archive.n_entries == 0


def test_copies_follow_a_cut_and_are_dropped_once_by_each_part(grove, archive):
    path = grove.run("abcdefgh", "x")
    grove.tree.archive_rows(path.tip, [1, 2, 5, 6])
    grove.tree.evict(path.tip, [1, 2, 5, 6])
    other = grove.begin("abcdz")
    head = other.tip.parent
    assert (head.archived[0].offsets, path.tip.archived[0].offsets) == ((1, 2), (1, 2))
    assert archive.n_entries == 1
    grove.release("x")
    assert archive.n_entries == 1
    assert grove.tree.restore(head) == bytes_of(2)
    assert archive.n_entries == 0
    check_rows(grove)
    grove.tree.discard(other)


def test_a_freed_segment_drops_its_copies(grove, archive):
    grove.tree.archive_rows(grove.run("abcd", "x").tip, [1])
    grove.release("x")
    assert archive.n_entries == 0


def test_a_lost_copy_changes_nothing(grove, archive):
    segment = grove.run("abcdefgh").tip
    grove.tree.archive_rows(segment, [1])
    grove.tree.archive_rows(segment, [3])
    grove.tree.evict(segment, [1, 3])
    archive.drop(segment.archived[1].ticket)
    facts = segment.residency
    with pytest.raises(ArchiveError):
        grove.tree.restore(segment)
    assert segment.residency is facts
    assert grove.tree.restore(segment, [1]) == bytes_of(1)
    segment.residency = segment.residency.__class__(n_tokens=8, kept=segment.kept)


def test_without_room_nothing_is_copied(grove):
    segment = grove.run("abcdefgh").tip
    assert not grove.tree.archive_rows(segment, [1])
    grove.tree.archive = Archive(fingerprint={}, cpu_bytes=bytes_of(1))
    grove.tree.evict(segment, [0])
    assert not grove.tree.archive_rows(segment, [1, 2])
    assert segment.archived == ()
    grove.tree.archive.close()
    grove.tree.archive = None


def test_copies_go_to_the_archive_in_pieces(grove, archive):
    """So that few rows are there twice at once."""
    tree, segment = grove.tree, grove.run("abcdefgh").tip
    before = snapshot(segment)
    tree.most_staged_rows, tree.peak_bytes = 3, tree.n_bytes
    assert tree.archive_rows(segment, range(8))
    assert tree.peak_bytes == tree.n_bytes + bytes_of(3)
    assert [a.offsets for a in segment.archived] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    tree.evict(segment, range(8))
    assert tree.restore(segment, [2, 6]) == bytes_of(2)
    assert tree.restore(segment) == bytes_of(6)
    assert segment.residency is None
    assert same(snapshot(segment), before)


def test_what_no_tier_could_hold_is_not_copied_first(grove):
    tree, segment = grove.tree, grove.run("abcdefgh").tip
    tree.archive = archive = Archive(fingerprint={}, cpu_bytes=bytes_of(4))
    tree.peak_bytes = tree.n_bytes
    for staged in (None, 2):
        tree.most_staged_rows = staged
        assert not tree.archive_rows(segment, range(5))
        assert (tree.peak_bytes, archive.n_entries) == (tree.n_bytes, 0)
        assert tree.archive_rows(segment, range(4))
        tree.evict(segment, range(4))
        tree.restore(segment)
        tree.peak_bytes = tree.n_bytes
    tree.compress(segment, [0, 1, 2, 3], 8)
    n_packed = packed_bytes_of(segment)
    archive.cpu_bytes = max(n_packed, bytes_of(4))  # each alone would fit
    assert not tree.archive_rows(segment, range(8))
    assert (segment.archived, archive.n_entries) == ((), 0)
    tree.archive = None
    archive.close()


def test_copies_that_drive_each_other_out_are_none(grove, tmp_path):
    """The rows would fit, but not with the names and strings of so many files."""
    tree, segment = grove.tree, grove.run("abcdefgh").tip
    tree.archive = archive = Archive(fingerprint={}, disk_bytes=2**20, folder=tmp_path)
    assert tree.archive_rows(segment, range(8))
    archive.disk_bytes = archive.n_disk_bytes  # enough for one file
    tree.evict(segment, range(8))
    tree.restore(segment)
    tree.most_staged_rows = 2
    assert not tree.archive_rows(segment, range(8))
    assert (segment.archived, archive.n_entries, archive.n_disk_bytes) == ((), 0, 0)
    tree.most_staged_rows = None
    assert tree.archive_rows(segment, range(8))
    tree.evict(segment, range(8))
    tree.restore(segment)
    tree.archive = None
    archive.close()


def test_without_memory_to_restore_nothing_happens(grove, archive, monkeypatch):
    segment = grove.run("abcdefgh").tip
    grove.tree.archive_rows(segment, [1, 2])
    grove.tree.evict(segment, [1, 2])
    facts, n_bytes = segment.residency, grove.tree.n_bytes

    def full(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "of", full)
        with pytest.raises(torch.OutOfMemoryError):
            grove.tree.restore(segment)
    assert (segment.residency, grove.tree.n_bytes, archive.n_entries) == (facts, n_bytes, 1)
    assert grove.tree.restore(segment) == bytes_of(2)


def test_restoring_into_a_joined_segment(grove, archive, monkeypatch):
    """Copies alone do not make a segment leave the storage that it shares."""
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    for text in ["abc", "abcde", "abcdefg"]:
        grove.run(text)
    grove.tree.discard(grove.begin("abcdefgh"))
    middle = next(s for s in grove.tree.segments() if s.start == 3)
    assert grove.tree.archive_rows(middle, [0, 1])
    assert middle.fellows
    assert grove.tree.restore(middle) == 0
    grove.tree.evict(middle, [0, 1])
    assert grove.tree.restore(middle) == bytes_of(2)
    check_rows(grove)


# -- hidden --------------------------------------------------------------------------------


def test_hiding_moves_no_byte_and_is_undone(grove):
    path = grove.run("abcdefgh")
    storage = path.tip.storage
    grove.tree.hide(path.tip, [1, 2])
    grove.tree.hide(path.tip, [2, 3])
    assert path.tip.hidden == {1, 2, 3}
    assert (path.tip.storage, grove.tree.n_tokens) == (storage, 8)
    head = grove.begin("abcx").tip.parent
    assert (head.hidden, path.tip.hidden) == ({1, 2}, {0})
    grove.tree.unhide(head)
    grove.tree.unhide(path.tip)
    assert head.residency is path.tip.residency is None


def test_random_acts_keep_the_books(grove, archive):
    rng = random.Random(0)
    texts = [LETTERS[:40], LETTERS[:25] + "1234567890" * 2, LETTERS[:10] + "qrst" * 6]
    paths = [grove.run(text) for text in texts]
    for _ in range(60):
        segment = rng.choice(list(grove.tree.segments()))
        offsets = [at for at in range(segment.n_tokens) if rng.random() < 0.3]
        n_bytes = grove.tree.n_bytes
        act = rng.choice(["evict", "8", "4", "archive", "restore", "hide"])
        if act == "evict":
            assert grove.tree.evict(segment, offsets) == n_bytes - grove.tree.n_bytes
        elif act in "84":
            assert grove.tree.compress(segment, offsets, int(act)) == n_bytes - grove.tree.n_bytes
        elif act == "archive":
            assert grove.tree.archive_rows(segment, offsets)
        elif act == "restore":
            assert grove.tree.restore(segment, offsets) == grove.tree.n_bytes - n_bytes
        else:
            grove.tree.hide(segment, offsets)
        check_integrity(grove.tree)
        check_rows(grove)
    assert [p.tip.end for p in paths] == [len(text) for text in texts]
