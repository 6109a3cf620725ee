"""The queue of idle leaves: least recently used first, without looking at the others."""

from __future__ import annotations

import random

import pytest

from sidequest_langchain.errors import CacheCorrupted
from sidequest_langchain.kv.idle import IdleLeaves
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.segment import Segment
from tests.kv.growing import Grove, bytes_of


def leaf(segment_id, last_used, root=None):
    segment = Segment(segment_id, "s", root or Segment(0, "s", None, ()), ())
    segment.last_used = last_used
    return segment


def test_gives_the_least_recently_used_first():
    idle = IdleLeaves()
    leaves = [leaf(n, used) for n, used in enumerate([5, 2, 9, 1], start=1)]
    for segment in leaves:
        idle.note(segment)
        idle.note(segment)
    assert [idle.pop() for _ in range(5)] == [leaves[3], leaves[1], leaves[0], leaves[2], None]


def test_one_that_was_used_meanwhile_takes_its_new_place():
    idle = IdleLeaves()
    old, young = leaf(1, 1), leaf(2, 2)
    idle.note(old)
    idle.note(young)
    old.last_used = 3
    assert [idle.pop(), idle.pop(), idle.pop()] == [young, old, None]


@pytest.mark.parametrize(
    "hold",
    [
        lambda s: setattr(s, "is_open", True),
        lambda s: setattr(s, "n_pins", 1),
        lambda s: s.children.append(leaf(9, 9, s)),
        lambda s: setattr(s, "parent", None),
    ],
    ids=["runs", "pinned", "has a child", "root"],
)
def test_one_that_is_held_is_passed_over_and_can_come_back(hold):
    idle = IdleLeaves()
    held, free = leaf(1, 1), leaf(2, 2)
    idle.note(held)
    idle.note(free)
    root = held.parent
    hold(held)
    assert idle.pop() is free
    assert idle.pop() is None
    idle.note(held)
    assert held not in idle
    held.is_open, held.n_pins, held.parent = False, 0, root
    held.children.clear()
    idle.note(held)
    assert idle.pop() is held


def test_keeps_nothing_of_segments_that_are_gone():
    idle = IdleLeaves()
    for n in range(1, 2000):
        segment = leaf(n, n)
        idle.note(segment)
        idle.forget(segment)
    assert len(idle._heap) < 100
    assert idle.pop() is None


def test_a_sweep_of_many_frees_in_the_order_of_use_and_looks_at_few(monkeypatch):
    grove, rng = Grove(), random.Random(0)
    names = [f"{chr(200 + n)}x" for n in range(500)]
    for name in names:
        grove.run(name)
    rng.shuffle(names)
    for name in names:
        grove.run(name)
    monkeypatch.setattr(Grove, "drawing", None)
    monkeypatch.setattr(grove.tree, "segments", None)  # a sweep that lists them would fail here
    looked_at = []
    original = Segment.is_idle_leaf.fget
    monkeypatch.setattr(
        Segment, "is_idle_leaf", property(lambda self: looked_at.append(self) or original(self))
    )
    freed = grove.tree.sweep(lambda: grove.tree.n_tokens > 980)
    assert freed == bytes_of(20)
    kept = {"".join(map(chr, p.tip.token_ids)) for p in grove.tree.paths.values()}
    assert kept == set(names[10:])
    # Those that were used again since they were noted come up once more, each in O(log n).
    assert len(looked_at) <= 2 * 500 + 40
    looked_at.clear()
    grove.tree.sweep(lambda: grove.tree.n_tokens > 960)
    assert len(looked_at) <= 40


def test_the_audit_misses_an_idle_leaf_that_no_sweep_would_find():
    grove = Grove()
    path = grove.run("ab")
    check_integrity(grove.tree)
    grove.tree.idle.forget(path.tip)
    with pytest.raises(CacheCorrupted, match="no sweep would find"):
        check_integrity(grove.tree)
