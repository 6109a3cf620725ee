"""Evicted rows: attention is that of the full cache with a mask at their true positions."""

from __future__ import annotations

import random

import pytest
import torch

from sidequest_langchain.kv import chain
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.storage import Storage
from tests.kv.attending import BATCHES, WINDOWS, Fed, World, batch, features_for, grow, run
from tests.kv.growing import Grove, bytes_of, check_rows, ids, reachable_bytes, text_of
from tests.kv.masking import Gone, closed_of, evict_some


@pytest.fixture(params=[chain.MOST_BLOCKS, 1], ids=["", "joined"])
def most_blocks(request, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", request.param)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kinds", BATCHES.values(), ids=BATCHES)
def test_equals_the_full_cache_with_a_mask(kinds, windows, softcap, has_sinks, most_blocks):
    for seed in range(2):
        rng = random.Random(seed)
        world = World(seed)
        grove, running = grow(world, rng, n_done=10)
        gone = Gone()
        evict_some(rng, grove, gone)
        features_of = features_for(world, windows, softcap, has_sinks)
        fed = batch(rng, grove, running, kinds)
        run(world, grove, fed, features_of, unseen=gone.unseen)
        evict_some(rng, grove, gone)
        again = [Fed(f.path, rng.choice("ab")) for f in fed]
        run(world, grove, again, features_of, unseen=gone.unseen)
        for f in again:
            grove.tree.commit(f.path)
        evict_some(rng, grove, gone)
        later = batch(rng, grove, [], [*kinds, "decode", "prefill"])
        run(world, grove, later, features_of, unseen=gone.unseen)
        assert gone.heads
        assert grove.tree.n_bytes == reachable_bytes(grove.tree)


def test_rows_go_and_tokens_and_positions_stay(grove):
    path = grove.run("abcdefgh")
    segment = path.tip
    assert grove.tree.evict(segment, [1, 6, 2]) == bytes_of(3)
    assert (segment.n_tokens, segment.n_rows, segment.n_resident, segment.end) == (8, 5, 5, 8)
    assert segment.kept == (0, 3, 4, 5, 7)
    assert (grove.tree.n_tokens, grove.tree.n_bytes) == (5, bytes_of(5))
    assert grove.tree.match("s", ids("abcdefgh")) == (segment, 8)
    assert grove.tree.evict(segment, [1, 6, 2]) == 0
    assert grove.tree.evict(segment, range(8)) == bytes_of(5)
    assert (segment.n_rows, segment.n_bytes, segment.n_tokens) == (0, 0, 8)


def test_the_copy_counts_in_the_peak(grove):
    path = grove.run("abcdefgh")
    grove.tree.peak_bytes = grove.tree.n_bytes
    grove.tree.evict(path.tip, [0, 1])
    assert grove.tree.peak_bytes == bytes_of(8 + 6)


@pytest.mark.parametrize("n", range(1, 8))
def test_a_cut_parts_what_is_left(grove, n):
    segment = grove.run("abcdefgh").tip
    grove.tree.evict(segment, [0, 3, 4, 7])
    head = grove.begin("abcdefgh"[:n] + "x").tip.parent
    kept = [1, 2, 5, 6]
    assert head.kept == (tuple(at for at in kept if at < n) if head.n_rows < n else None)
    assert segment.start == n
    assert [segment.start + at for at in segment.residency.dense] == [at for at in kept if at >= n]
    assert grove.tree.n_bytes == bytes_of(4)


def test_a_segment_in_a_shared_storage_gets_its_own(grove, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    for text in ["abc", "abcde", "abcdefg"]:
        grove.run(text)
    grove.tree.discard(grove.begin("abcdefgh"))
    middle = next(s for s in grove.tree.segments() if s.start == 3)
    others = [s for s in middle.fellows if s is not middle]
    assert len(others) == 2
    assert grove.tree.evict(middle, [1]) == bytes_of(1)
    assert middle.fellows == []
    assert [s.fellows for s in others] == [[], []]
    assert grove.tree.n_bytes == reachable_bytes(grove.tree) == bytes_of(6)
    grove.tree.discard(grove.begin("abcdefgh"))
    assert middle.fellows == [], "a managed segment was joined"


@pytest.mark.parametrize("n_fine", [0, 1])
def test_without_memory_nothing_happens(grove, monkeypatch, n_fine):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    for text in ["abc", "abcde"]:
        grove.run(text)
    grove.tree.discard(grove.begin("abcdef"))
    segment = closed_of(grove.tree)[0]
    assert segment.fellows
    before = (segment.storage, list(segment.fellows), segment.residency, grove.tree.n_bytes)
    made = []

    def full(real):
        def make(*args):
            made.append(args)
            if len(made) > n_fine:
                raise torch.OutOfMemoryError
            return real(*args)

        return make

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "gathered", full(Storage.gathered))
        patch.setattr(Storage, "joined", full(Storage.joined))
        with pytest.raises(torch.OutOfMemoryError):
            grove.tree.evict(segment, [0])
    after = (segment.storage, list(segment.fellows), segment.residency, grove.tree.n_bytes)
    assert after == before


def test_what_may_not_be_evicted(grove):
    path = grove.run("abcd")
    running = grove.begin("abcdef")
    grove.feed(running, "ef")
    with pytest.raises(ValueError, match="open"):
        grove.tree.evict(running.tip, [0])
    with pytest.raises(ValueError, match="offsets 0 to 3, found 4"):
        grove.tree.evict(path.tip, [0, 4])
    with pytest.raises(ValueError, match="found -1"):
        grove.tree.evict(path.tip, [-1])
    pinned = grove.tree.pin(running)
    with pytest.raises(ValueError, match="pinned"):
        grove.tree.evict(path.tip, [0])
    grove.tree.unpin(pinned)
    assert path.tip.residency is None


def test_a_release_frees_what_is_left_and_says_so(grove):
    path = grove.run("abcdefgh", "x")
    grove.tree.evict(path.tip, [0, 1])
    receipt = grove.release("x")
    assert (receipt.freed_bytes, receipt.freed_tokens) == (bytes_of(6), 6)
    assert grove.tree.n_bytes == grove.tree.n_tokens == 0


def test_a_reply_to_its_end_sees_its_own_last_token():
    world = World(1)
    grove = world.grove()
    path = grove.run("abab")
    gone = Gone()
    grove.tree.evict(path.tip, [1, 3])
    gone.take(path.tip, [1, 3])
    fed = Fed(grove.begin("abab"), "b", is_stored=False)
    run(world, grove, [fed], features_for(world, (None,) * 3, None, True), unseen=gone.unseen)


def test_kinds_follow_their_tokens(grove):
    path = grove.begin("abcdef")
    grove.feed(path, "abcdef")
    path.tip.kinds[:] = bytes([1, 2, 3, 4, 5, 6])
    grove.tree.commit(path)
    branch = grove.begin("abcx")
    assert (bytes(branch.tip.parent.kinds), bytes(path.tip.kinds)) == (b"\1\2\3", b"\4\5\6")
    grove.tree.reserve(branch, 1)
    grove.feed(branch, "x")
    assert bytes(branch.tip.kinds) == b"\0"
    grove.tree.crop(branch, 0)
    assert bytes(branch.tip.kinds) == b""


# -- sealing -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_running_path_that_is_sealed_and_evicted_goes_on(seed, most_blocks):
    world, rng = World(seed), random.Random(seed)
    features_of = features_for(world, WINDOWS["by layer"], None, True)
    grove, gone = world.grove(), Gone()
    grove.run("ab" * 9)
    paths = [grove.begin("ab" * rng.randint(1, 9)) for _ in range(3)]
    for _ in range(12):
        fed = [Fed(p, "".join(rng.choices("ab", k=rng.choice([1, 1, 7])))) for p in paths]
        run(world, grove, fed, features_of, unseen=gone.unseen)
        if rng.random() < 0.5:
            grove.tree.seal(rng.choice(paths))
        if rng.random() < 0.5:
            evict_some(rng, grove, gone)
    said = [text_of(p) for p in paths]
    for p in paths:
        grove.tree.commit(p)
    check_integrity(grove.tree)
    check_rows(grove)
    assert [text_of(p) for p in paths] == said
    assert all(s.capacity == s.n_rows for s in grove.tree.segments())


def test_sealing_copies_nothing_of_a_long_tip():
    grove = Grove()
    path = grove.begin("a" * 400)
    grove.feed(path, "a" * 400)
    grove.feed(path, "b")
    storage, n_bytes = path.tip.storage, grove.tree.n_bytes
    tip = path.tip
    sealed = grove.tree.seal(path)
    assert sealed.storage is storage
    assert (sealed.n_tokens, sealed.is_open, grove.tree.n_bytes) == (401, False, n_bytes)
    assert path.tip is tip
    assert (tip.parent, tip.start, tip.n_tokens, tip.is_open) == (sealed, 401, 0, True)
    check_integrity(grove.tree)
    assert grove.tree.seal(path) is None
    grove.tree.commit(path)
    assert (path.tip, sealed.capacity, grove.tree.n_bytes) == (sealed, 401, bytes_of(401))


def test_sealing_a_short_tip_gives_its_room_back(grove):
    path = grove.begin("ab")
    grove.feed(path, "ab", at_once=False)
    grove.tree.seal(path)
    assert grove.tree.n_bytes == bytes_of(2)
    grove.tree.discard(path)
    assert grove.tree.n_bytes == 0


def test_a_pinned_path_that_is_discarded_gives_its_room_back(grove):
    path = grove.begin("a" * 300)
    grove.feed(path, "a" * 300)
    grove.feed(path, "b")
    sealed = grove.tree.seal(path)
    assert sealed.capacity > sealed.n_rows
    pinned = grove.tree.pin(path)
    grove.tree.discard(path)
    assert grove.tree.n_bytes == bytes_of(301)
    check_integrity(grove.tree)
    grove.tree.unpin(pinned)
    assert grove.tree.n_bytes == 0


def test_sealed_rows_are_shared_with_a_closed_sibling(grove):
    first, second = grove.run("abcd"), grove.begin("q")
    grove.feed(second, "abcdx")
    grove.tree.evict(first.tip, [1])
    end = grove.tree.seal(second)
    assert (end.parent, end.n_tokens, second.tip.parent) == (first.tip, 1, end)
    assert grove.tree.n_bytes == bytes_of(3 + 1)
    assert text_of(second) == "abcdx"


def test_without_memory_to_share_the_tip_keeps_its_rows(grove, monkeypatch):
    grove.run("abcd")
    second = grove.begin("q")
    grove.feed(second, "abcdx")

    def full(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "copy", full)
        with pytest.raises(torch.OutOfMemoryError):
            grove.tree.seal(second)
    assert (second.tip.n_tokens, second.tip.start, second.tip.is_open) == (5, 0, True)
    check_integrity(grove.tree)
    check_rows(grove)


def test_an_ended_path_is_not_sealed(grove):
    path = grove.run("ab")
    with pytest.raises(ValueError, match="ended"):
        grove.tree.seal(path)
