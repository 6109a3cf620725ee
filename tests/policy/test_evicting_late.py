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


def limits_of(n_bytes, **settings):
    """Limits of a tree that holds so many bytes, and the tree."""
    given = {"policy": "staged", "trigger": 0.8, "target": 0.7, **settings}
    tree = SimpleNamespace(
        n_bytes=n_bytes, n_tokens=n_bytes // 10, bytes_per_token=10, segments=list, paths={}
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


def test_segments_may_be_long_where_a_budget_bounds_time():
    of_rows, _ = limits_of(0, budget_tokens=2000)
    assert of_rows.spare_rows(64) == 400 + 64 - 32
    assert limits_of(0, budget_tokens=10_000)[0].spare_rows(64) == 512
    of_both, _ = limits_of(0, budget_tokens=2000, budget_bytes=4000)
    assert of_both.spare_rows(64) == 200 // 10
    assert limits_of(0, budget_bytes=4000)[0].spare_rows(64) == 200 // 10
