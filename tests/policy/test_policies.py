"""Each policy on facts made by hand, where the right answer is known."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from sidequest_langchain.config import Protection
from sidequest_langchain.policy.acts import Evict, EvictByHead
from sidequest_langchain.policy.baselines import (
    H2O,
    LRU,
    RKV,
    TOVA,
    Nothing,
    Random,
    SnapKV,
    Window,
)
from sidequest_langchain.policy.facts import Need
from sidequest_langchain.policy.protection import protect
from sidequest_langchain.policy.scoring import distance, pooled, with_prior
from sidequest_langchain.policy.staged import EvictStaged, Staged, ranks
from sidequest_langchain.policy.wrapping import CompressFirst, PerHead, Plain
from tests.policy.making import ROW, archived, cache, evicted, idle, packed, released, segment


def test_none_never_acts():
    assert Nothing()(cache(segment(1, 5), rows=5)) == ()


@pytest.mark.parametrize("policy", [LRU(), Window(), H2O(), Staged(), CompressFirst(TOVA())])
def test_nothing_is_done_when_nothing_has_to_be_freed(policy):
    assert policy(cache(segment(1, 500), idle(2, 5), rows=0, tiers=["int8", "cpu"])) == ()


def test_lru_releases_idle_segments_then_evicts_from_the_oldest():
    trunk = segment(1, 4, protected=[True, False, False, False])
    left, right = idle(2, 2, trunk, age=7), idle(3, 2, trunk, age=9)
    acts = LRU()(cache(trunk, left, right, rows=2))
    assert (released(acts), evicted(acts)) == ([3], {})
    acts = LRU()(cache(trunk, left, right, rows=6))
    assert (released(acts), evicted(acts)) == ([3, 2], {1: [1, 2]})


def test_the_window_keeps_sinks_and_the_newest():
    path = segment(1, 10)
    facts = protect(cache(path, rows=4), Protection(n_sink=2, recent_window=1))
    assert evicted(Window()(facts)) == {1: [2, 3, 4, 5]}


def test_distance_is_to_the_nearest_running_end():
    trunk = segment(1, 3)
    long, short = segment(2, 6, trunk), segment(3, 2, trunk)
    gone = idle(4, 1, trunk, age=50)
    facts = cache(trunk, long, short, gone)
    steps = distance(facts)
    # The trunk's last row is two steps behind the shorter path's end; the idle leaf is far.
    assert steps[1].tolist() == [5, 4, 3]
    assert steps[2].tolist() == [6, 5, 4, 3, 2, 1]
    assert steps[4].tolist() == [51]
    other_order = cache(trunk, short, long, gone, tips=((1, 3), (1, 2)))
    assert distance(other_order)[1].tolist() == [5, 4, 3]


def test_distance_on_idle_paths_counts_from_their_leaves():
    trunk = idle(1, 2, age=4)
    leaf = idle(2, 3, trunk, age=4)
    assert distance(cache(trunk, leaf))[1].tolist() == [5 + 4, 4 + 4]


def test_h2o_divides_by_those_who_could_see():
    # Seen 100 times for 10 in all, and twice for 1: the young one is the heavier hitter.
    path = segment(1, 2, accumulated=[10, 1], n_seen=[100, 2])
    facts = cache(path, rows=1)
    assert evicted(H2O(recent_share=0)(facts)) == {1: [0]}
    assert evicted(H2O(recent_share=0, is_normalised=False)(facts)) == {1: [1]}


def test_h2o_gives_the_newest_half_of_what_stays():
    path = segment(1, 8, accumulated=[8, 7, 6, 5, 4, 3, 2, 1])
    # Four stay: the two newest, and the two heaviest of the rest.
    assert evicted(H2O()(cache(path, rows=4))) == {1: [2, 3, 4, 5]}


def test_a_token_nobody_could_see_yet_is_not_the_first_to_go():
    path = segment(1, 4, accumulated=[4, 1, 3, 0], n_seen=[1, 1, 1, 0])
    assert evicted(H2O(recent_share=0)(cache(path, rows=1))) == {1: [1]}
    scores = with_prior(cache(path), {1: np.array([4.0, 1.0, 3.0, 0.0])})
    assert scores[1].tolist() == pytest.approx([4, 1, 3, 8 / 3])


def test_pooling_takes_the_highest_neighbour():
    values = np.array([0, 5, 0, 0, 0, 1], np.float32)
    assert pooled(values, 3).tolist() == [5, 5, 5, 0, 1, 1]
    assert pooled(values, 1).tolist() == values.tolist()
    assert pooled(np.zeros(0, np.float32), 7).size == 0


def test_snapkv_keeps_the_neighbours_of_what_the_window_looked_at():
    window = np.full(20, 0.01)
    window[10] = 0.9
    path = segment(1, 20, window=window)
    gone = evicted(SnapKV(pool=7)(cache(path, rows=13)))[1]
    assert sorted(set(range(20)) - set(gone)) == list(range(7, 14))


@pytest.mark.parametrize("unseen", [0.0, np.nan])
def test_snapkv_ranks_what_came_after_by_its_average(unseen):
    path = segment(1, 3, window=[0.5, 0.1, unseen], importance=[0, 0, 0.3])
    assert evicted(SnapKV(pool=1)(cache(path, rows=2))) == {1: [1, 2]}
    assert evicted(SnapKV(pool=1)(cache(path, rows=1))) == {1: [1]}


def test_tova_drops_what_the_last_query_did_not_look_at():
    path = segment(1, 4, last=[0.4, 0.1, 0.3, 0.2], importance=[0, 9, 9, 9])
    assert evicted(TOVA()(cache(path, rows=2))) == {1: [1, 3]}


def test_r_kv_drops_the_redundant_one_of_two_equally_important():
    path = segment(1, 4, importance=[0.3, 0.3, 0.3, 0.3], redundancy=[0.1, 0.9, 0.1, 0.8])
    assert evicted(RKV(pool=1)(cache(path, rows=2))) == {1: [1, 3]}
    important = segment(1, 3, importance=[0.9, 0.0, 0.1], redundancy=[0.9, 0.1, 0.1])
    assert evicted(RKV(pool=1, importance=1.0)(cache(important, rows=1))) == {1: [1]}
    assert evicted(RKV(pool=1, importance=0.0)(cache(important, rows=1))) == {1: [0]}
    assert Need.REDUNDANCY in RKV.needs


def test_r_kv_compares_segments():
    a = segment(1, 2, importance=[0.5, 0.5], redundancy=[0.5, 0.5])
    b = segment(2, 2, a, importance=[0.5, 0.5], redundancy=[0.9, 0.1])
    assert evicted(RKV(pool=1)(cache(a, b, rows=1))) == {2: [0]}


def test_random_is_repeatable_and_follows_seed_and_step():
    path = segment(1, 100)
    gone = [
        evicted(Random(seed=seed)(cache(path, rows=50, step=step)))[1]
        for seed, step in [(0, 0), (0, 0), (1, 0), (0, 1)]
    ]
    assert gone[0] == gone[1]
    assert len({tuple(g) for g in gone}) == 3


@pytest.mark.parametrize("policy", [Window(), H2O(), SnapKV(), TOVA(), RKV(), Random()])
def test_baselines_never_pack_or_archive_and_release_at_the_end(policy):
    path = segment(1, 100, protected=np.arange(100) < 90)
    facts = cache(path, idle(2, 100, protected=np.ones(100, bool)), rows=50, tiers=["int8", "cpu"])
    acts = policy(facts)
    assert evicted(acts) == {1: list(range(90, 100))}
    assert released(acts) == [2]
    assert len(acts) == 2


def tree():
    """A running path 1-2 of 200 tokens, a sibling 3, and an idle subtree 3-4 and 5."""
    trunk = segment(1, 100)
    leaf = segment(2, 100, trunk, importance=np.full(100, 0.1))
    sibling = idle(3, 100, trunk)
    below = idle(4, 100, sibling)
    other = idle(5, 100)
    return trunk, leaf, sibling, below, other


def test_ranks_by_nearness_to_what_runs():
    assert ranks(cache(*tree())) == ([4, 5], [3], [1, 2])
    waiting = idle(6, 3, is_active=True)
    assert ranks(cache(waiting)) == ([], [], [6])


def test_staged_packs_idle_rows_first_then_siblings_then_what_runs():
    saved = 100 * (1 - 9 / 32)
    tiers = ["int8", "int4"]
    for rows, expected in [
        (1, [[4, 5]]),
        (saved * 2 + 1, [[4, 5], [3]]),
        (saved * 3 + 1, [[4, 5], [3], [1]]),
        (saved * 4 + 1, [[4, 5], [3], [1], [2]]),
    ]:
        acts = Staged()(cache(*tree(), rows=rows, tiers=tiers))
        touched = set(packed(acts, 8))
        assert not evicted(acts)
        assert touched <= set(chain.from_iterable(expected))
        assert touched & set(expected[-1])


def test_staged_goes_down_the_tiers_in_order():
    every = ["int8", "int4", "cpu"]
    at8 = 500 * (1 - 9 / 32)
    idle4 = 300 * (9 - 5) / 32
    acts = Staged()(cache(*tree(), rows=at8 + 1, tiers=every))
    assert packed(acts, 4)
    assert set(packed(acts, 4)) <= {4, 5}
    acts = Staged()(cache(*tree(), rows=at8 + idle4 + 1, tiers=every))
    assert set(archived(acts)) <= {3, 4, 5}
    assert archived(acts)
    assert not evicted(acts)
    assert not set(packed(acts, 4)) & {1, 2}
    # All idle rows archived: running paths go to INT4, and only then rows are evicted.
    rows = 300 + 200 * (1 - 9 / 32) + 1
    acts = Staged()(cache(*tree(), rows=rows, tiers=every))
    assert set(archived(acts)) == {3, 4, 5}
    assert set(packed(acts, 4)) & {1, 2}
    assert not evicted(acts)
    acts = Staged()(cache(*tree(), rows=300 + 200 * (1 - 5 / 32) + 1, tiers=every))
    assert set(evicted(acts)) <= {1, 2}
    assert evicted(acts)


def test_staged_without_tiers_evicts_idle_rows_first():
    for rows, expected in [(150, {4, 5}), (250, {3, 4, 5}), (350, {1, 3, 4, 5})]:
        assert set(evicted(Staged()(cache(*tree(), rows=rows)))) == expected


def test_early_it_waits_while_the_budget_holds():
    facts = {"rows": 10, "budget_rows": 520, "tiers": ["int8"]}
    assert Staged()(cache(*tree(), stage="early", **facts)) == ()
    assert EvictStaged()(cache(*tree(), stage="early", **facts)) == ()
    assert Staged()(cache(*tree(), stage="middle", **facts))
    full = {**facts, "budget_rows": 499}
    assert Staged()(cache(*tree(), stage="early", **full))


def test_late_it_releases_idle_subtrees_before_running_rows_go():
    rows = 500 * (1 - 9 / 32) + 1
    acts = Staged()(cache(*tree(), rows=rows, tiers=["int8"], stage="late"))
    assert released(acts) == [4] or released(acts) == [5]
    assert not evicted(acts)
    assert not released(Staged()(cache(*tree(), rows=rows, tiers=["int8"], stage="middle")))


def test_a_tools_words_go_before_thoughts_before_the_rest():
    path = segment(1, "aattrr", importance=[0.1] * 6)
    policy = EvictStaged(fair=0)
    assert evicted(policy(cache(path, rows=2))) == {1: [4, 5]}
    assert evicted(policy(cache(path, rows=4))) == {1: [2, 3, 4, 5]}
    # But the one result that is looked at outlives the filler.
    needle = segment(1, "aattrr", importance=[0.1] * 5 + [0.9])
    assert evicted(policy(cache(needle, rows=5))) == {1: [0, 1, 2, 3, 4]}


def test_ours_is_fair_to_messages():
    importance = np.concatenate([np.full(10, 0.9), np.full(10, 0.1)])
    path = segment(1, "a" * 10 + "t" * 10, importance=importance)
    gone = evicted(EvictStaged()(cache(path, rows=10)))[1]
    assert len([i for i in gone if i >= 10]) == 8


def test_pack_first_evicts_only_what_is_then_left():
    path = segment(1, 100, last=np.arange(100))
    enough = CompressFirst(TOVA())(cache(path, rows=50, tiers=["int8"]))
    assert packed(enough, 8)
    assert not evicted(enough)
    acts = CompressFirst(TOVA())(cache(path, rows=90, tiers=["int8"]))
    gone = evicted(acts)[1]
    # All rows are small by then, and the lowest go.
    assert gone == list(range(len(gone)))
    n_left = (100 - len(gone)) * 9 / 32
    assert n_left <= 10 < n_left + 9 / 32
    assert set(packed(acts, 8)[1]) == set(range(100)) - set(gone)


def test_pack_first_does_not_ask_the_other_where_packing_is_enough():
    inner = Plain(lambda facts: [Evict(1, (0,))])
    path = segment(1, 100)
    assert not evicted(CompressFirst(inner)(cache(path, rows=50, tiers=["int8"])))
    assert evicted(CompressFirst(inner)(cache(path, rows=90, tiers=["int8"]))) == {1: [0]}


def test_wrappers_carry_names_and_needs():
    wrapped = PerHead(CompressFirst(TOVA()))
    assert wrapped.name == "per_head(compress_first(tova))"
    assert wrapped.needs == {Need.LAST, Need.IMPORTANCE}


def test_per_head_evicts_by_count():
    path = segment(1, 10, last=np.arange(10))
    assert PerHead(TOVA())(cache(path, rows=4)) == [EvictByHead(1, 6, "tova")]


def test_a_plain_function_is_a_policy():
    def first_row(facts):
        return [Evict(facts.segments[0].segment_id, (0,))]

    policy = Plain(first_row)
    assert policy.name == "first_row"
    assert policy(cache(segment(7, 3), rows=1)) == (Evict(7, (0,)),)
    assert ROW == 1000
