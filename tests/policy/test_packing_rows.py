"""Packing and archiving: what a draft frees without losing rows."""

from __future__ import annotations

import numpy as np
import pytest

from sidequest_langchain.policy.acts import Archive, Compress
from sidequest_langchain.policy.facts import Tier
from sidequest_langchain.policy.selection import Draft
from tests.policy.making import ROW, archived, cache, evicted, idle, packed, segment


def draft_of(*segments, **given):
    return Draft(cache(*segments, **given))


def test_packing_frees_the_difference_and_takes_groups():
    path = segment(1, 200)
    scores = {1: np.where(np.arange(200) // 64 == 1, 0.0, 1.0)}
    draft = draft_of(path, rows=20, tiers=["int8"])
    draft.compress(8, scores, reason="cold")
    assert draft.acts() == [Compress(1, tuple(range(64, 128)), 8, "cold")]
    assert draft.freed == pytest.approx(64 * ROW * (1 - 9 / 32))


def test_a_handful_is_not_packed():
    draft = draft_of(segment(1, 23), segment(2, 24), rows=60, tiers=["int8"])
    draft.compress(8, {1: np.zeros(23), 2: np.zeros(24)})
    assert packed(draft.acts(), 8) == {2: list(range(24))}


def test_nothing_is_packed_without_the_tier():
    draft = draft_of(segment(1, 64), rows=60, tiers=["int8", Tier("int4", 0)])
    draft.compress(4, {1: np.zeros(64)})
    assert draft.acts() == []


def test_protected_rows_are_packed_and_precise_ones_are_not():
    mask = np.arange(64) < 32
    path = segment(1, 64, protected=np.ones(64, bool), precise=mask)
    draft = draft_of(path, rows=60, tiers=["int8"])
    draft.compress(8, {1: np.zeros(64)})
    assert packed(draft.acts(), 8) == {1: list(range(32, 64))}


def test_pinned_segments_are_not_packed():
    draft = draft_of(segment(1, 64, may_change=False), rows=60, tiers=["int8"])
    draft.compress(8, {1: np.zeros(64)})
    assert draft.acts() == []


def test_packing_twice_in_a_cycle_is_one_act():
    draft = draft_of(segment(1, 64), rows=55, tiers=["int8", "int4"])
    draft.compress(8, {1: np.zeros(64)}, reason="first")
    draft.compress(4, {1: np.zeros(64)}, reason="then")
    assert draft.acts() == [Compress(1, tuple(range(64)), 4, "then")]
    assert draft.freed == pytest.approx(64 * ROW * (1 - 5 / 32))


def test_packed_rows_are_not_packed_to_what_they_are():
    draft = draft_of(segment(1, 64, bits=np.full(64, 8)), rows=50, tiers=["int8", "int4"])
    draft.compress(8, {1: np.zeros(64)})
    assert draft.acts() == []
    draft.compress(4, {1: np.zeros(64)})
    assert packed(draft.acts(), 4) == {1: list(range(64))}


def test_what_is_evicted_is_not_packed_too():
    draft = draft_of(segment(1, 64), rows=60, tiers=["int8"])
    draft.compress(8, {1: np.zeros(64)})
    draft.evict({1: np.arange(64)})
    gone = evicted(draft.acts())[1]
    assert packed(draft.acts(), 8)[1] == list(range(len(gone), 64))
    assert draft.freed >= 60 * ROW > draft.freed - ROW


def test_the_archive_takes_what_fits():
    draft = draft_of(idle(1, 6), rows=5, tiers=[Tier("cpu", 2 * ROW), Tier("disk", ROW + 1)])
    draft.archive({1: np.array([5, 4, 3, 2, 1, 0])}, reason="idle")
    assert archived(draft.acts()) == {1: [3, 4, 5]}
    # Less than a row is left.
    draft.archive({1: np.arange(6)})
    assert archived(draft.acts()) == {1: [3, 4, 5]}
    none = draft_of(idle(1, 6), rows=5)
    none.archive({1: np.zeros(6)})
    assert none.acts() == []


def test_an_archive_without_limit_frees_all_that_is_asked():
    draft = draft_of(idle(1, 6), rows=2, tiers=["cpu"])
    draft.archive({1: np.arange(6)})
    assert draft.acts() == [Archive(1, (0, 1))]


def test_archived_rows_are_whole_even_if_they_were_to_be_packed():
    draft = draft_of(idle(1, 64), rows=64, tiers=["int8", Tier("cpu", 10 * ROW)])
    draft.compress(8, {1: np.zeros(64)})
    draft.archive({1: np.arange(64)})
    assert archived(draft.acts()) == {1: list(range(10))}
    assert packed(draft.acts(), 8) == {1: list(range(10, 64))}
