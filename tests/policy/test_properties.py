"""What holds for every policy on any facts: protection, enough freed, no act twice, purity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.config import Protection
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.acts import Archive, Compress, Evict, Release
from sidequest_langchain.policy.choosing import GROUP_ROWS
from sidequest_langchain.policy.facts import CacheFacts, SegmentFacts, Tier
from sidequest_langchain.policy.protection import protect
from sidequest_langchain.policy.registry import policy_for, policy_names
from tests.policy.making import ROW

ACTIVE = [name for name in policy_names() if name != "none"]
POLICIES = [(name, False) for name in ACTIVE] + [("tova", True), ("lru", True)]


@st.composite
def trees(draw):
    """Any tree of up to six segments, any state of their rows, any budget and tiers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    segments = []
    for i in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.sampled_from(segments)) if segments else None
        segments.append(_segment(i + 1, parent, draw(st.integers(0, 150)), rng))
    tips = draw(
        st.lists(st.sampled_from(segments), max_size=3, unique_by=lambda s: s["segment_id"])
    )
    paths = tuple(_path(segments, tip) for tip in tips)
    made = []
    for fields in segments:
        n_readers = sum(fields["segment_id"] in path for path in paths)
        made.append(SegmentFacts(**fields, n_readers=n_readers, is_active=n_readers > 0))
    n_bytes = sum(int((s.bits > 0).sum()) * ROW for s in made)
    names = draw(st.lists(st.sampled_from(["int8", "int4", "cpu", "disk"]), unique=True))
    facts = CacheFacts(
        segments=tuple(made),
        bytes_per_row=ROW,
        n_bytes=n_bytes,
        budget_bytes=draw(st.none() | st.integers(1, max(1, n_bytes))),
        to_free=draw(st.integers(0, n_bytes + ROW)),
        n_seen=max(s.end for s in made),
        tiers=tuple(Tier(n, draw(st.none() | st.integers(0, n_bytes))) for n in names),
        step=draw(st.integers(0, 100)),
        tips=paths,
        stage=draw(st.sampled_from(["early", "middle", "late"])),
        value_bits=32,
    )
    rules = Protection(
        n_sink=draw(st.integers(0, 4)),
        recent_window=draw(st.integers(0, 30)),
        ends=draw(st.sampled_from([0.0, 0.1])),
        precise=draw(st.booleans()),
    )
    return protect(facts, rules, {3: 2.0, 4: float("inf")})


def _segment(segment_id, parent, n, rng):
    scores = ("importance", "accumulated", "last", "window", "redundancy")
    kinds = np.repeat(rng.integers(0, len(TokenKind), 10), 15)[:n]
    return {
        "segment_id": segment_id,
        "parent_id": None if parent is None else parent["segment_id"],
        "start": 0 if parent is None else parent["start"] + parent["n_tokens"],
        "n_tokens": n,
        "bits": (bits := rng.choice([0, 4, 8, 32], n, p=[0.1, 0.1, 0.2, 0.6])),
        "resident": bits > 0,
        "kinds": kinds,
        "token_ids": rng.integers(0, 50, n),
        # Few different values, so that ties are common.
        **{name: rng.integers(0, 5, n) / 10 for name in scores},
        "n_seen": rng.integers(0, 3, n),
        "mass": float(rng.random()),
        "age": int(rng.integers(0, 20)),
        "n_reads": 1,
        "depth": 0 if parent is None else parent["depth"] + 1,
        "may_change": bool(rng.random() < 0.8),
    }


def _path(segments, tip):
    known = {s["segment_id"]: s for s in segments}
    at, found = tip["segment_id"], []
    while at is not None:
        found.append(at)
        at = known[at]["parent_id"]
    return tuple(reversed(found))


def freed_by(facts, acts):
    """Bytes that the acts free, counted afresh from the facts."""
    size = {bits: ROW * packed / 32 for bits, packed in {0: 0, 4: 5, 8: 9, 32: 32}.items()}
    total = 0.0
    for act in acts:
        bits = facts.segment(act.segment_id).bits
        offsets = range(len(bits)) if isinstance(act, Release) else act.offsets
        then = size[act.bits] if isinstance(act, Compress) else 0
        total += sum(size[int(bits[i])] - then for i in offsets)
    return total


@pytest.mark.parametrize(("name", "compress_first"), POLICIES)
@settings(max_examples=40, deadline=None)
@given(facts=trees())
def test_every_policy_keeps_its_word(name, compress_first, facts):
    policy = policy_for(name, compress_first=compress_first)
    acts = policy(facts)
    assert list(policy(facts)) == list(acts)
    if facts.to_free == 0:
        assert not acts
    taken = {s.segment_id: np.zeros(s.n_tokens, int) for s in facts.segments}
    gone = {s.segment_id: np.zeros(s.n_tokens, bool) for s in facts.segments}
    released = []
    for act in acts:
        segment = facts.segment(act.segment_id)
        assert segment.may_change
        if isinstance(act, Release):
            children = {s.segment_id for s in facts.segments if s.parent_id == act.segment_id}
            assert segment.is_idle
            assert children <= set(released)
            released.append(act.segment_id)
            continue
        assert act.segment_id not in released
        offsets = np.array(act.offsets)
        assert (np.diff(offsets) > 0).all()
        assert segment.resident[offsets].all()
        taken[act.segment_id][offsets] += 1
        if isinstance(act, Compress):
            assert not segment.precise[offsets].any()
            assert (segment.bits[offsets] > act.bits).all()
            assert facts.room(f"int{act.bits}") > 0
        else:
            assert not segment.protected[offsets].any()
            gone[act.segment_id][offsets] = True
    assert all((n <= 1).all() for n in taken.values())
    check_tiers(facts, acts)
    check_enough(facts, acts, gone, released)


def check_tiers(facts, acts):
    """What is archived fits, and baselines use no tier."""
    archived = [act for act in acts if isinstance(act, Archive)]
    assert freed_by(facts, archived) <= facts.room("cpu") + facts.room("disk") + 1e-6


def check_enough(facts, acts, gone, released):
    """Enough is freed or nothing is left to take; and not a step more than needed."""
    freed = freed_by(facts, acts)
    waits = facts.stage == "early" and (
        facts.budget_bytes is None or facts.n_bytes <= facts.budget_bytes
    )
    if freed < facts.to_free - 1e-6 and not (waits and not acts):
        for segment in facts.segments:
            at = segment.segment_id
            assert at in released or not (segment.evictable & ~gone[at]).any()
    # The last step may pass the goal by a row, a group, or a segment that is released whole.
    largest = max((float(facts.row_bytes(facts.segment(i)).sum()) for i in released), default=0)
    group = GROUP_ROWS * ROW if any(isinstance(a, Compress) for a in acts) else ROW
    assert freed <= facts.to_free + max(largest, group) + 1e-6


@settings(max_examples=60, deadline=None)
@given(facts=trees(), fair=st.floats(0, 1), block=st.integers(1, 20))
def test_fair_and_in_blocks_too(facts, fair, block):
    scored = type(policy_for("tova"))(fair=fair, block=block)
    acts = scored(facts)
    rows = [a for a in acts if isinstance(a, Evict)]
    wanted = sum(float(facts.row_bytes(s)[s.evictable].sum()) for s in facts.segments)
    if not any(isinstance(a, Release) for a in acts):
        freed = freed_by(facts, rows)
        assert freed >= min(facts.to_free, wanted) - 1e-6
        assert freed < facts.to_free + ROW or not rows
