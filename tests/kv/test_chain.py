"""Segments in a row that share a storage: read as one block, and each still its own."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

from sidequest_langchain.errors import CacheCorrupted
from sidequest_langchain.kv import bunches, chain, tree_attention
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.storage import Storage
from tests.kv.attending import HEADS, WINDOWS, Fed, World, batch, features_for, grow, run
from tests.kv.growing import bytes_of, reachable_bytes, storage_bytes, text_of
from tests.kv.test_tree_machine import TreeMachine

TURNS = ["abcde", "fg", "hij", "k", "lmnop", "q"]


def conversation(grove, turns=TURNS):
    """One call a turn: its prompt is all that was said; then one more begins."""
    said = ""
    for turn in turns:
        said += turn
        grove.run(said, turn)
    return grove.begin(said + "x")


def storages(segment):
    return [id(s.storage) for s in segment.path() if s.n_rows]


def test_a_path_of_many_segments_is_read_from_few_storages(grove):
    path = conversation(grove)
    lineage = [s for s in path.tip.path() if s.n_rows]
    assert [s.n_rows for s in lineage] == [len(turn) for turn in TURNS]
    assert len(set(storages(path.tip))) <= chain.MOST_BLOCKS
    assert grove.tree.n_bytes == bytes_of(len("".join(TURNS))) == reachable_bytes(grove.tree)


def test_the_smallest_neighbours_move(grove):
    path = conversation(grove, ["a" * 40, "b", "c", "d" * 9, "e"])
    sizes = Counter(storages(path.tip))
    assert sizes[storages(path.tip)[0]] == 1, "the long trunk was copied"


@pytest.mark.parametrize("order", [range(6), reversed(range(6)), [2, 5, 0, 4, 1, 3]])
def test_each_release_frees_exactly_its_rows(grove, order):
    grove.tree.discard(conversation(grove))
    left = set(range(6))
    for n in order:
        left.discard(n)
        last = max(left, default=-1)
        before = grove.tree.n_bytes
        receipt = grove.release(TURNS[n])
        assert grove.tree.n_bytes == bytes_of(sum(len(TURNS[i]) for i in range(last + 1)))
        assert receipt.freed_bytes == before - grove.tree.n_bytes
        assert reachable_bytes(grove.tree) == grove.tree.n_bytes
        check_integrity(grove.tree)


def test_a_prompt_that_leaves_in_the_middle_cuts_without_a_copy(grove):
    conversation(grove)
    shared = next(s for s in grove.tree.segments() if s.fellows and s.n_rows > 1)
    storage, n_bytes = shared.storage, grove.tree.n_bytes
    said = "".join(map(chr, (t for s in shared.path() for t in s.token_ids)))
    branch = grove.begin(said[:-1] + "z")
    assert text_of(branch) == said[:-1]
    assert branch.tip.parent.storage is storage is shared.storage
    assert grove.tree.n_bytes == n_bytes


def test_a_segment_beside_the_path_keeps_its_storage(grove):
    conversation(grove)
    fork = grove.begin("abcdefgh" + "yz")
    grove.feed(fork, "yz")
    grove.tree.commit(fork)
    for n in range(1, 5):
        grove.run("abcdefghyz" + "!" * n)
    check_integrity(grove.tree)


def test_without_memory_to_join_the_path_stays_as_it_is(grove, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Storage, "joined", full)
    path = conversation(grove)
    assert len(set(storages(path.tip))) == len(TURNS)


def test_without_memory_to_move_what_is_left_the_bytes_stay_counted(grove, monkeypatch):
    grove.tree.discard(conversation(grove))
    n_bytes = grove.tree.n_bytes

    def full(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "joined", full)
        assert grove.release("q").freed_bytes == 0
    assert grove.tree.n_bytes == n_bytes == reachable_bytes(grove.tree)
    assert grove.release("lmnop").freed_bytes == bytes_of(6)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("seed", range(6))
def test_attention_over_shared_storages_is_exact(seed, windows, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    world, rng = World(seed), random.Random(seed)
    grove, running = grow(world, rng, n_done=20)
    fed = batch(rng, grove, running, ["decode", "prefill", "decode", "replay", "prefill"])
    assert any(s.fellows for s in grove.tree.segments()), "nothing was joined"
    run(world, grove, fed, features_for(world, windows, None, False))


def test_a_shared_storage_is_one_block(monkeypatch):
    made = []

    def counting(q, k, v, **given):
        made.append(k.shape[1])
        return cpu_partial(q, k, v, **given)

    monkeypatch.setattr(bunches, "COPY_BYTES", 0)  # blocks of any size stay where they are
    monkeypatch.setattr(chain, "MOST_BLOCKS", 1)
    monkeypatch.setitem(tree_attention._PARTIALS, "cpu", counting)
    world = World(0)
    grove = world.grove()
    path = conversation(grove)
    run(world, grove, [Fed(path, "x")], features_for(world, WINDOWS["all"], None, False))
    assert made == [len("".join(TURNS)), 1] * len(HEADS)


def test_the_audit_finds_a_storage_shared_wrongly(grove):
    grove.tree.discard(conversation(grove))
    shared = next(s for s in grove.tree.segments() if s.fellows)
    shared.move_to(shared.storage, shared.place[0] + 1, shared.fellows)
    with pytest.raises(CacheCorrupted, match="shares its storage wrongly"):
        check_integrity(grove.tree)
    shared.move_to(shared.storage, shared.place[0] - 1, shared.fellows)


def test_views_of_a_shared_storage_are_counted_once(grove):
    conversation(grove)
    tensors = [t for s in grove.tree.segments() for t in (*s.keys, *s.values)]
    assert storage_bytes(tensors) == sum(s.n_bytes for s in grove.tree.segments())


class JoiningMachine(TreeMachine):
    """The same acts, with every path joined into one storage as soon as a call begins."""

    def __init__(self):
        self.most, chain.MOST_BLOCKS = chain.MOST_BLOCKS, 1
        super().__init__()

    def teardown(self):
        chain.MOST_BLOCKS = self.most
        super().teardown()


TestJoiningMachine = JoiningMachine.TestCase
TestJoiningMachine.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
