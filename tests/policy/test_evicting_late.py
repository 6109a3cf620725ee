"""Precision is given up in good time, rows only for what does not fit packed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.policy.baselines import H2O, LRU, Window
from sidequest_langchain.policy.limits import Limits
from sidequest_langchain.policy.selection import Draft
from sidequest_langchain.policy.staged import EvictStaged, Staged
from sidequest_langchain.policy.wrapping import CompressFirst
from tests.policy.making import ROW, cache, evicted, idle, packed, released, segment


def n_evicted(acts):
    return sum(map(len, evicted(acts).values()))


def test_a_draft_evicts_for_less_than_it_packs_for():
    facts = cache(segment(1, 128), rows=100, tiers=["int8"], to_evict=80 * ROW)
    draft = Draft(facts)
    draft.compress(8, {1: np.arange(128)})
    packed_bytes = 128 * ROW * (1 - 9 / 32)
    assert draft.freed == packed_bytes
    assert draft.left_to_evict < 0 < draft.left
    draft.evict({1: np.arange(128)})
    assert evicted(draft.acts()) == {}
    after = draft.after()
    assert (after.to_free, after.to_evict) == (100 * ROW - int(packed_bytes), 0)


@pytest.mark.parametrize(
    "policy", [H2O(), Window(), LRU(), Staged(), EvictStaged(), CompressFirst(H2O())]
)
def test_policies_lose_rows_for_what_must_go_alone(policy):
    whole = cache(segment(1, 200), rows=60)
    assert n_evicted(policy(whole)) == 60
    assert n_evicted(policy(cache(segment(1, 200), rows=60, to_evict=10 * ROW))) == 10
    assert policy(cache(segment(1, 200), rows=60, to_evict=0)) in ((), [])


def test_what_idles_is_released_in_the_end_only_for_what_must_go():
    path = segment(1, 5, protected=[True] * 5)
    leaf = idle(2, 20, path, protected=[True] * 20)
    assert released(Staged()(cache(path, leaf, rows=10))) == [2]
    assert released(Staged()(cache(path, leaf, rows=10, to_evict=0))) == []
    leaves = [idle(n, 20, path, protected=[True] * 20, age=n) for n in (2, 3, 4)]
    for policy in (Staged(), H2O()):
        assert released(policy(cache(path, *leaves, rows=60, to_evict=10 * ROW))) == [4]


def test_packing_goes_on_to_the_target():
    acts = Staged()(cache(segment(1, 640), rows=200, tiers=["int8"], to_evict=0))
    rows_packed = sum(len(at) for at in packed(acts, 8).values())
    assert rows_packed * ROW * (1 - 9 / 32) >= 200 * ROW
    assert evicted(acts) == {}


def limits_of(n_bytes, n_layers=4, **settings):
    """Limits of a tree that holds so many bytes, and the tree."""
    given = {"policy": "staged", "trigger": 0.8, "target": 0.7, **settings}
    tree = SimpleNamespace(
        n_bytes=n_bytes,
        n_tokens=n_bytes // 10,
        bytes_per_token=10,
        segments=list,
        paths={},
        layout=range(n_layers),
    )
    return Limits(tree, CacheConfig(**given), device_bytes=None), tree


def test_a_cycle_is_due_at_the_trigger_and_then_when_there_is_more():
    limits, tree = limits_of(800, budget_bytes=1000)
    assert not limits.are_due()
    tree.n_bytes = 900
    assert limits.are_due()
    limits.settle()  # what is left could not go
    assert not limits.are_due()
    assert not limits.are_due(50)
    assert limits.are_due(51)
    tree.n_bytes = 951
    assert limits.are_due()
    limits.settle()
    tree.n_bytes = 1000
    assert not limits.are_due()
    tree.n_bytes = 1001
    assert limits.are_due()


def test_what_was_released_meanwhile_is_not_remembered():
    limits, tree = limits_of(960, budget_bytes=1000)
    limits.settle()
    tree.n_bytes = 300
    assert not limits.are_due()
    tree.n_bytes = 810
    assert limits.are_due()


def test_rows_go_down_to_a_twentieth_below_the_budget():
    limits, tree = limits_of(980, budget_bytes=1000)
    [limit] = limits.limits()
    assert limits.wanted(limit, 40) == 320
    assert limits.to_evict(limit) == 30
    tree.n_bytes = 940
    assert limits.to_evict(limit) <= 0
    tree.n_bytes = 1200
    assert limits.to_evict(limit) == 250
    assert limits.excess(limit) == 200
    tree.n_bytes = 940
    assert limits.to_evict(limit, 200) <= 0
    assert limits.to_evict(limit, 200, must_fit=True) == 140


def test_a_budget_in_rows_frees_all_at_once():
    limits, _ = limits_of(900, budget_tokens=100, budget_bytes=None)
    [limit] = limits.limits()
    assert limits.to_evict(limit) == limits.wanted(limit) == 200
    limits.settle()
    assert limits.are_due()


def copies_of(n_layers=4, block_rows=64, **settings):
    """Rows of a segment, and of a storage layer by layer, that may be there twice."""
    found = limits_of(0, n_layers, **settings)[0].copies(block_rows)
    return found.of_segment, found.by_layer


def test_in_bytes_a_segment_is_copied_where_rows_leave_slack():
    # A twentieth of the budget stays free where rows are lost: 200 bytes are 20 rows.
    assert copies_of(budget_bytes=4000) == (64, 0), "a chunk may always be copied"
    assert copies_of(budget_bytes=4000, block_rows=16) == (20, 0)
    assert copies_of(budget_bytes=400_000) == (2000, 0)
    assert copies_of(budget_bytes=40_000_000) == (200_000, 0)
    assert copies_of(budget_bytes=400_000, trigger=0.9) == (1000, 0)
    assert copies_of(budget_bytes=400_000, n_layers=80) == (2000, 0)


def test_bytes_decide_where_both_are_limited():
    for n_tokens in (100, 2000, 10**6):
        assert copies_of(budget_tokens=n_tokens, budget_bytes=400_000) == (2000, 0)


def test_in_rows_segments_may_be_long_and_lie_in_one_storage():
    # From 1600 to 2000 rows, and a chunk of 64 without 32 to grow: a quarter of it is a layer's.
    assert copies_of(budget_tokens=2000) == (324, 108)
    # A fortieth of all rows, where every layer is so little of a storage.
    assert copies_of(budget_tokens=2000, n_layers=40) == (382, 50)
    assert copies_of(budget_tokens=2001, n_layers=40) == (381, 51), "a layer of all rows, whole"
    assert copies_of(budget_tokens=2000, block_rows=512) == (660, 220)
    assert copies_of(budget_tokens=2000, trigger=0.9) == (174, 58)
    assert limits_of(0, budget_bytes=4000)[0].copies(64).staged is None


@pytest.mark.parametrize("n_tokens", [30_000, 10**6, 10**9])
def test_a_huge_budget_in_rows_copies_no_more_than_is_quick_to_read(n_tokens):
    assert copies_of(budget_tokens=n_tokens) == (3072, 1024)
    of_segment, by_layer = copies_of(budget_tokens=n_tokens, n_layers=200)
    assert by_layer == min(1024, n_tokens // 200)
    assert of_segment + by_layer == 4096


@pytest.mark.parametrize("n_layers", [1, 2, 28, 126])
@pytest.mark.parametrize("block_rows", [16, 64, 512])
@pytest.mark.parametrize("trigger", [0.75, 0.8, 0.95])
@pytest.mark.parametrize("n_tokens", [72, 500, 4096, 40_000])
def test_both_copies_fit_beside_what_a_step_adds(n_tokens, trigger, block_rows, n_layers):
    of_segment, by_layer = copies_of(
        n_layers, block_rows, budget_tokens=n_tokens, trigger=trigger, target=0.5
    )
    assert of_segment >= block_rows, "a chunk that was sealed cannot lose rows"
    assert by_layer >= 0
    room = round((1 - trigger) * n_tokens) + block_rows - 32
    if of_segment > block_rows:  # else a chunk takes what it must
        assert of_segment + by_layer <= room
    assert by_layer * n_layers < n_tokens + n_layers, "more than one layer of all rows"
    assert 4 * by_layer <= max(0, room)


def test_what_is_there_leaves_less_room_for_copies():
    """Rows that nobody may take can fill a budget, and exceed it for a step."""
    limits, tree = limits_of(0, budget_tokens=2000)
    for n_rows, expected in [(1700, (324, 108)), (1741, (323, 108)), (1999, (65, 65))]:
        tree.n_bytes = 10 * n_rows
        found = limits.copies(64)
        assert (found.of_segment, found.by_layer, found.staged) == (*expected, 32)
    for n_bytes in (20_631, 20_640, 30_000):
        tree.n_bytes = n_bytes
        found = limits.copies(64)
        assert (found.of_segment, found.by_layer) == (0, 0)
    tree.n_bytes = 20_621  # half a row is one
    assert limits.copies(64).of_segment == 1


def test_a_budget_without_room_for_a_layer_leaves_segments_where_they_are():
    assert copies_of(budget_tokens=72, block_rows=16) == (16, 0)
