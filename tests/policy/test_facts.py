"""Facts and acts are frozen, and refuse what cannot be."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.acts import Archive, Compress, Evict, EvictByHead, Release
from sidequest_langchain.policy.facts import PACKED_BITS, checked
from tests.policy.making import ROW, cache, idle, segment


def test_arrays_are_copies_that_nobody_can_write():
    importance = np.ones(3, np.float32)
    facts = segment(1, 3, importance=importance)
    importance[0] = 9
    assert facts.importance.tolist() == [1, 1, 1]
    assert facts.importance.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        facts.importance[0] = 2
    with pytest.raises(FrozenInstanceError):
        facts.age = 3


def test_an_array_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"last must have one entry for each of 3 tokens.*\(2,\)"):
        segment(1, 3, last=np.zeros(2))


def test_parents_come_first():
    trunk = segment(1, 2)
    leaf = segment(2, 2, trunk)
    with pytest.raises(ValueError, match="segment 2 comes before its parent 1"):
        cache(leaf, trunk, tips=())


def test_bytes_follow_the_precision():
    mixed = segment(1, 4, bits=[0, 4, 8, 32])
    sizes = cache(mixed).row_bytes(mixed)
    expected = [0, ROW * PACKED_BITS[4] / 32, ROW * PACKED_BITS[8] / 32, ROW]
    assert sizes.tolist() == pytest.approx(expected)
    half = segment(1, 2, bits=[16, 8])
    assert cache(half).row_bytes(half).tolist() == pytest.approx([ROW, ROW * 9 / 16])


def test_what_is_packed_counts_against_fp16_if_nothing_is_dense():
    small = segment(1, 1, bits=[8])
    assert cache(small).full_bits == 16


def test_what_may_be_evicted():
    facts = segment(1, 4, bits=[0, 32, 32, 8], protected=[False, True, False, False])
    assert facts.evictable.tolist() == [False, False, True, True]
    pinned = segment(1, 4, may_change=False)
    assert not pinned.evictable.any()


def test_the_score_is_the_prediction_where_there_is_one():
    plain = segment(1, 2, importance=[1, 2])
    guessed = segment(1, 2, importance=[1, 2], predicted=[3, 4])
    assert plain.score.tolist() == [1, 2]
    assert guessed.score.tolist() == [3, 4]


def test_paths_and_leaves():
    trunk = segment(1, 3)
    left, right = segment(2, 2, trunk), idle(3, 2, trunk)
    facts = cache(trunk, left, right)
    assert [s.segment_id for s in facts.path(3)] == [1, 3]
    assert [s.segment_id for s in facts.leaves()] == [2, 3]
    assert facts.tips == ((1, 2),)
    assert (right.start, right.end, right.is_idle, left.is_idle) == (3, 5, True, False)
    with pytest.raises(KeyError):
        facts.segment(9)


@pytest.mark.parametrize("kind", [Evict, Archive, Compress])
@pytest.mark.parametrize("offsets", [(), (-1, 2), (2, 1), (1, 1)])
def test_offsets_ascend_each_once(kind, offsets):
    with pytest.raises(ValueError, match="offset"):
        kind(1, offsets)
    assert kind(1, (0, 2)).offsets == (0, 2)


def test_other_acts_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="bits are 4 or 8, found 2"):
        Compress(1, (0,), bits=2)
    with pytest.raises(ValueError, match="n_keep must be at least 0"):
        EvictByHead(1, -1)
    assert Release(1, "done").reason == "done"


def test_what_a_policy_returns_is_checked():
    assert checked([Release(1)]) == (Release(1),)
    with pytest.raises(ConfigError, match=r"returned \(1, 2\); it must return acts"):
        checked([(1, 2)])
