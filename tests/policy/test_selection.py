"""Which rows go: the lowest scores, just enough, each once."""

from __future__ import annotations

import numpy as np
import pytest

from sidequest_langchain.policy.acts import Evict, EvictByHead, Release
from sidequest_langchain.policy.choosing import Choice, messages, take_lowest
from sidequest_langchain.policy.selection import Draft, by_head
from tests.policy.making import ROW, cache, evicted, idle, packed, released, segment


def draft_of(*segments, **given):
    return Draft(cache(*segments, **given))


def test_the_lowest_scores_of_all_segments_go():
    trunk = segment(1, 3)
    leaf = segment(2, 3, trunk)
    draft = draft_of(trunk, leaf, rows=3)
    draft.evict({1: np.array([5, 1, 6]), 2: np.array([2, 9, 3])}, reason="low")
    assert evicted(draft.acts()) == {1: [1], 2: [0, 2]}
    assert draft.freed == 3 * ROW
    assert {a.reason for a in draft.acts()} == {"low"}


def test_ties_go_by_age_then_by_place():
    old = idle(1, 2, age=9)
    new = idle(2, 3, age=3)
    for rows, expected in [(1, {1: [0]}), (3, {1: [0, 1], 2: [0]})]:
        draft = draft_of(new, old, rows=rows)
        draft.evict({1: np.zeros(2), 2: np.zeros(3)})
        assert evicted(draft.acts()) == expected


def test_no_row_more_than_is_asked_for():
    draft = draft_of(segment(1, 5), rows=1)
    draft.to_free = draft.to_evict = ROW * 1.5
    draft.evict({1: np.arange(5)})
    assert evicted(draft.acts()) == {1: [0, 1]}
    exact = draft_of(segment(1, 5), rows=2)
    exact.evict({1: np.arange(5)})
    assert evicted(exact.acts()) == {1: [0, 1]}


def test_small_rows_free_little():
    draft = draft_of(segment(1, 4, bits=[4, 4, 32, 32]), rows=1)
    draft.evict({1: np.arange(4)})
    assert evicted(draft.acts()) == {1: [0, 1, 2]}


@pytest.mark.parametrize("given", [{"protected": [True] * 3}, {"may_change": False}])
def test_what_is_protected_or_pinned_stays(given):
    draft = draft_of(segment(1, 3, **given), rows=2)
    draft.evict({1: np.zeros(3)})
    draft.archive({1: np.zeros(3)})
    assert draft.acts() == []


def test_rows_away_are_no_candidates():
    draft = draft_of(segment(1, 4, bits=[0, 32, 0, 32]), rows=4)
    draft.evict({1: np.zeros(4)})
    assert evicted(draft.acts()) == {1: [1, 3]}


def test_among_limits_the_segments():
    a, b = idle(1, 2), idle(2, 2)
    draft = draft_of(a, b, rows=4)
    draft.evict({1: np.zeros(2), 2: np.zeros(2)}, [2])
    assert evicted(draft.acts()) == {2: [0, 1]}


def test_a_finished_draft_takes_no_more():
    draft = draft_of(segment(1, 4), idle(2, 4), rows=1, tiers=["int8", "cpu"])
    draft.evict({1: np.arange(4), 2: np.ones(4)})
    draft.evict({1: np.arange(4), 2: np.ones(4)})
    draft.release_idle()
    draft.archive({1: np.arange(4), 2: np.ones(4)})
    assert draft.acts() == [Evict(1, (0,))]


def test_weights_multiply_scores_and_lift_scores_below_zero():
    heavy = segment(1, 3, weights=[1, 9, 1])
    draft = draft_of(heavy, rows=1)
    draft.evict({1: np.array([3, 1, 4])})
    assert evicted(draft.acts()) == {1: [0]}
    below = draft_of(segment(1, 3, weights=[1, 1, 3]), rows=2)
    # From the lowest: 0, 1, 2 x 3: what weighs most stays, not what is most negative.
    below.evict({1: np.array([-3, -2, -1])})
    assert evicted(below.acts()) == {1: [0, 1]}


def test_an_unknown_score_is_the_lowest():
    draft = draft_of(segment(1, 3), rows=1)
    draft.evict({1: np.array([1, np.nan, 2])})
    assert evicted(draft.acts()) == {1: [0]}


def test_messages_are_runs_of_a_kind():
    assert messages(segment(1, "ddssdqqdqdaatt")).tolist() == [
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
    ]
    assert messages(segment(1, "")).tolist() == []
    assert messages(segment(1, "dd")).tolist() == [0, 0]


def test_fair_eviction_leaves_every_message_its_share():
    path = segment(1, "rrrraaaa")
    scores = {1: np.arange(8)}
    plain = draft_of(path, rows=4)
    plain.evict(scores)
    assert evicted(plain.acts()) == {1: [0, 1, 2, 3]}
    fair = draft_of(path, rows=4)
    fair.evict(scores, fair=1.0)
    assert evicted(fair.acts()) == {1: [0, 1, 4, 5]}
    half = draft_of(path, rows=4)
    half.evict(scores, fair=0.5)
    assert evicted(half.acts()) == {1: [0, 1, 2, 4]}


def test_fairness_gives_way_to_the_budget():
    draft = draft_of(segment(1, "rraa", protected=[False, False, True, True]), rows=2)
    draft.evict({1: np.arange(4)}, fair=1.0)
    assert evicted(draft.acts()) == {1: [0, 1]}


def test_the_last_row_of_a_message_is_kept_while_others_have_rows():
    path = segment(1, "r" + "a" * 99)
    draft = draft_of(path, rows=50)
    draft.evict({1: np.arange(100)}, fair=1.0)
    # One row's share of a half is less than a row: it may go, as the floor is rounded down.
    assert len(evicted(draft.acts())[1]) == 50


def test_blocks_go_together_and_the_last_is_cut_short():
    scores = {1: np.array([9, 0, 9, 9, 3, 3, 3, 3, 1, 9, 9, 9])}
    draft = draft_of(segment(1, 12), rows=4)
    draft.evict(scores, block=4)
    assert evicted(draft.acts()) == {1: [4, 5, 6, 7]}
    short = draft_of(segment(1, 12), rows=6)
    short.evict(scores, block=4)
    assert evicted(short.acts()) == {1: [0, 1, 4, 5, 6, 7]}


def test_blocks_of_two_segments_are_not_one():
    draft = draft_of(idle(1, 2), idle(2, 2), rows=2)
    draft.evict({1: np.array([4, 4]), 2: np.array([0, 6])}, block=4)
    assert evicted(draft.acts()) == {2: [0, 1]}


def test_idle_segments_are_released_from_the_leaves_up_the_oldest_first():
    trunk = segment(1, 2)
    old = idle(2, 2, trunk, age=30)
    child = idle(3, 2, old, age=20)
    other = idle(4, 2, trunk, age=25)
    draft = draft_of(trunk, old, child, other, rows=6)
    draft.release_idle(reason="idle")
    assert released(draft.acts()) == [4, 3, 2]
    few = draft_of(trunk, old, child, other, rows=1)
    few.release_idle()
    assert released(few.acts()) == [4]


def test_what_is_read_pinned_or_active_is_not_released():
    trunk = segment(1, 2)
    kept = [
        segment(2, 2, trunk),
        idle(3, 2, trunk, may_change=False),
        idle(4, 2, trunk, is_active=True),
        idle(5, 2, trunk),
    ]
    draft = draft_of(trunk, *kept, rows=99)
    draft.release_idle([1, 2, 3, 4])
    assert draft.acts() == []


def test_a_released_segment_needs_no_other_act():
    draft = draft_of(idle(1, 4, protected=[True, True, False, False]), rows=4)
    draft.evict({1: np.zeros(4)})
    assert draft.left == 2 * ROW
    draft.release_idle()
    assert draft.acts() == [Release(1)]
    assert draft.freed == 4 * ROW


def test_the_acts_of_another_policy_join():
    draft = draft_of(segment(1, 70), idle(2, 3), rows=70, tiers=["int8"])
    draft.compress(8, {1: np.zeros(70), 2: np.zeros(3)})
    after = draft.after()
    assert after.to_free == pytest.approx(draft.left, abs=1)
    assert after.segments[0].bits.tolist() == [8] * 64 + [32] * 6
    freed = draft.freed
    draft.add([Evict(1, (0, 69), "x"), Release(2, "y")])
    assert evicted(draft.acts()) == {1: [0, 69]}
    assert packed(draft.acts(), 8) == {1: list(range(1, 64))}
    assert released(draft.acts()) == [2]
    assert draft.freed == pytest.approx(freed + ROW * (1 + 9 / 32) + 3 * ROW)


def test_by_head_counts_what_stays():
    facts = cache(segment(1, 6, bits=[32, 32, 0, 32, 32, 32]))
    acts = by_head(facts, [Evict(1, (0, 1), "low"), Release(2)])
    assert acts == [EvictByHead(1, 3, "low"), Release(2)]


def test_room_counts_over_both_passes_of_a_fair_choice():
    sizes = np.array([2.0] * 9 + [20.0])
    rows, scores = np.ones(10, bool), np.arange(10)
    choice = Choice([segment(1, 10)], [rows], [scores], [sizes], costs=[sizes])
    assert take_lowest(choice, 18.0, room=7.0)[1].tolist() == [0, 1, 2]
    # Two rows are reserved, the others free 16 bytes: the reserved ones must go, too.
    assert take_lowest(choice, 30.0, fair=1.0)[1].tolist() == list(range(10))
    assert take_lowest(choice, 30.0, fair=1.0, room=37.0)[1].tolist() == list(range(9))
