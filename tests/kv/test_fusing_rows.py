"""Fusing leaves every row what it was: for attention, and for whatever is done afterwards."""

from __future__ import annotations

import random

import pytest
import torch

from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.step_plan import StepPlan
from tests.kv.attending import Fed, World, attend_layer, features_for
from tests.kv.fusing import held, line, sealed, shaken
from tests.kv.growing import TOKEN_BYTES, bytes_of, text_of

N_LAYERS = 3

# -- what attention sees -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("new", ["c", "cab"])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_is_what_it_was(seed, new, window):
    rng = random.Random(seed)
    world = World(seed)
    grove = world.grove()
    texts = ["".join(rng.choices("ab", k=rng.randint(1, 90))) for _ in range(6)]
    path = sealed(grove, *texts, is_kept=rng.random() < 0.8)
    shaken(rng, grove, path)
    features_of = features_for(world, (window,) * 3, None, has_sinks=True)

    def attended():
        fed = [Fed(path, new)]
        plan = StepPlan([fed[0].row(grove.tree)])
        return [attend_layer(world, plan, fed, i, features_of(i)) for i in range(N_LAYERS)]

    before, rows, n_bytes = attended(), held(path, N_LAYERS), grove.tree.n_bytes
    n_packed = sum(b.n_rows for s in path.tip.path() for b in s.packed)
    assert grove.tree.fuse(path.tip, 1000) > 2
    assert grove.tree.n_bytes - n_bytes <= 4 * N_LAYERS * n_packed
    assert held(path, N_LAYERS) == rows
    for found, wanted in zip(attended(), before, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    assert "".join(line(path)) == "".join(texts)


def test_a_path_of_many_short_segments_is_one_block(grove):
    path = sealed(grove, *["abcdefgh"] * 30)
    for segment in path.tip.path()[:-1]:
        grove.tree.evict(segment, range(1, 8))
    assert grove.tree.fuse(path.tip, 30) == 29
    assert line(path) == ["abcdefgh" * 30, ""]
    [fused, _] = path.tip.path()
    assert (fused.start, fused.n_rows, fused.kept) == (0, 30, tuple(range(0, 240, 8)))
    assert grove.tree.fuse(path.tip, 30) == 0
    grove.tree.commit(path)


def test_packed_blocks_of_a_kind_become_one(grove):
    path = sealed(grove, "a" * 70, "b" * 70)
    one, two, _ = path.tip.path()
    for segment in (one, two):
        grove.tree.compress(segment, range(0, 40, 2), 8)
        grove.tree.compress(segment, range(1, 40, 2), 8)
        grove.tree.compress(segment, range(40, 50), 8, exempt=(1,))
        grove.tree.compress(segment, range(50, 70), 4)
    rows = held(path, 2)
    assert grove.tree.fuse(path.tip, 1000) == 1
    assert held(path, 2) == rows
    assert [(b.bits, b.n_rows) for b in two.packed] == [(8, 80), (8, 20), (4, 40)]
    grove.tree.commit(path)


# -- what comes after ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_copies_come_back_as_they_would_have(seed):
    worlds = [World(0).grove() for _ in range(2)]
    found = []
    for n, grove in enumerate(worlds):
        rng = random.Random(seed)
        archive = grove.tree.archive = Archive(fingerprint={}, cpu_bytes=10**7)
        path = sealed(grove, *["ab" * 9, "ba" * 8, "bb" * 10])
        shaken(rng, grove, path)
        shaken(rng, grove, path)
        for segment in path.tip.path()[:-1]:
            grove.tree.evict(segment, rng.sample(range(16), 9))
        if n:
            assert grove.tree.fuse(path.tip, 99) == 2
        for segment in path.tip.path()[:-1]:
            grove.tree.restore(segment)
        found.append(held(path, N_LAYERS))
        grove.tree.commit(path)
        grove.release("call-0")
        assert archive.n_entries == 0
        archive.close()
    assert found[0] == found[1]


def test_a_cut_copy_that_is_whole_again_has_one_owner(grove):
    archive = grove.tree.archive = Archive(fingerprint={}, cpu_bytes=10**6)
    path = sealed(grove, "abcdef")
    [segment, _] = path.tip.path()
    grove.tree.archive_rows(segment, range(6))
    rows = held(path, 2)
    other = grove.begin("abcx")
    grove.tree.discard(other)
    assert line(path) == ["abc", "def", ""]
    for part in path.tip.path()[:-1]:
        grove.tree.evict(part, range(3))
    [entry] = archive._cpu.values()
    assert entry.n_owners == 2
    assert grove.tree.fuse(path.tip, 99) == 1
    assert entry.n_owners == 1
    [copy] = segment.archived
    assert (copy.offsets, copy.rows) == (tuple(range(6)), tuple(range(6)))
    grove.tree.restore(segment)
    assert held(path, 2) == rows
    assert archive.n_entries == 0
    archive.close()
    grove.tree.commit(path)


def test_prefixes_are_found_cut_and_shared_as_before(grove):
    path = sealed(grove, "abcd", "efgh", "ijkl")
    for segment in path.tip.path()[:-1]:
        grove.tree.evict(segment, [1, 2])
    other = grove.begin("x" * 9)
    grove.tree.fuse(path.tip, 99)
    grove.tree.commit(path)
    same = grove.begin("abcdefghijkl")
    assert same.n_reused == 12
    cut = grove.begin("abcdefgXY")
    assert cut.n_reused == 7
    assert grove.drawing() == "* abcdefg(* hijkl(*))"
    assert [s.kept for s in path.tip.path()] == [(0, 3, 4), (0, 1, 4)]
    for running in (same, cut, other):
        grove.tree.discard(running)
    assert grove.tree.fuse(path.tip, 99) == 1
    assert path.tip.kept == (0, 3, 4, 7, 8, 11)


def test_equal_rows_of_another_path_join_those_that_were_fused(grove):
    one = grove.begin("abcdefgh")
    two = grove.begin("abcdefgx")
    for n, letters in enumerate(("abcd", "efgh")):
        grove.feed(one, letters)
        grove.feed(two, ("abcd", "efgx")[n])
        grove.tree.seal(one)
    assert grove.tree.fuse(one.tip, 99) == 1
    assert grove.tree.seal(two) is not None
    assert grove.drawing() == "abcdefg(h(*) x(*))"
    for path in (one, two):
        grove.tree.commit(path)
    assert {text_of(one), text_of(two)} == {"abcdefgh", "abcdefgx"}


def test_what_was_fused_is_released_and_swept(grove):
    kept, gone = sealed(grove, "ab", "cd"), sealed(grove, "xy", "z")
    for path in (kept, gone):
        grove.tree.commit(path)
        assert grove.tree.fuse(path.tip, 99) == 1
    receipt = grove.release("call-1")
    assert (receipt.freed_tokens, receipt.freed_bytes) == (3, 3 * TOKEN_BYTES)
    assert grove.tree.sweep(lambda: True) == bytes_of(4)
    assert grove.drawing() == ""
