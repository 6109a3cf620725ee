"""Facts made by hand: a few words say what a segment is, the rest is plain."""

from __future__ import annotations

import numpy as np

from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.acts import Archive, Compress, Evict, Release
from sidequest_langchain.policy.facts import CacheFacts, SegmentFacts, Tier

ROW = 1000
"""Bytes of a row at full precision, unless said otherwise."""

LETTERS = {
    "o": TokenKind.OTHER,
    "s": TokenKind.SYSTEM,
    "q": TokenKind.QUESTION,
    "a": TokenKind.ANSWER,
    "t": TokenKind.THOUGHT,
    "c": TokenKind.TOOL_CALL,
    "r": TokenKind.TOOL_RESULT,
    "d": TokenKind.DELIMITER,
    "m": TokenKind.MARKED,
}


def segment(segment_id, kinds, parent=None, **given):
    """Facts of a segment; `kinds` is one letter a token, or how many `ANSWER` tokens.

    It begins where `parent` ends. Scores are 0 unless given, each token was seen once.
    """
    text = "a" * kinds if isinstance(kinds, int) else kinds
    n = len(text)
    plain = {
        "segment_id": segment_id,
        "parent_id": None if parent is None else parent.segment_id,
        "start": 0 if parent is None else parent.end,
        "n_tokens": n,
        "resident": np.ones(n, bool),
        "bits": np.full(n, 32),
        "kinds": [LETTERS[letter] for letter in text],
        "token_ids": np.arange(n),
        "n_seen": np.ones(n),
        "mass": 0.0,
        "age": 0,
        "n_reads": 0,
        "n_readers": 1,
        "is_active": True,
        "depth": 0 if parent is None else parent.depth + 1,
        "may_change": True,
    }
    zeros = dict.fromkeys(("importance", "accumulated", "last", "window"), np.zeros(n))
    made = {**plain, **zeros, **given}
    if "resident" not in given:
        made["resident"] = np.asarray(made["bits"]) > 0
    return SegmentFacts(**made)


def idle(segment_id, kinds, parent=None, **given):
    """A segment that nobody reads."""
    return segment(
        segment_id, kinds, parent, **{"n_readers": 0, "is_active": False, "age": 10, **given}
    )


def cache(*segments, rows=0, budget_rows=None, tiers=(), **given):
    """Facts of a cache; `rows` are to be freed, at full precision."""
    parents = {s.parent_id for s in segments}
    ends = [s for s in segments if s.segment_id not in parents and s.n_readers]
    plain = {
        "bytes_per_row": ROW,
        "n_bytes": sum(int(s.resident.sum()) for s in segments) * ROW,
        "budget_bytes": None if budget_rows is None else budget_rows * ROW,
        "to_free": int(rows * ROW),
        "n_seen": max((s.end for s in segments), default=0),
        "tiers": tuple(t if isinstance(t, Tier) else Tier(t) for t in tiers),
    }
    facts = CacheFacts(segments=segments, **{**plain, **given})
    if "tips" in given:
        return facts
    tips = tuple(tuple(s.segment_id for s in facts.path(end.segment_id)) for end in ends)
    return CacheFacts(segments=segments, **{**plain, **given, "tips": tips})


def evicted(acts):
    """Segment id to offsets evicted."""
    return {a.segment_id: list(a.offsets) for a in acts if isinstance(a, Evict)}


def archived(acts):
    """Segment id to offsets archived."""
    return {a.segment_id: list(a.offsets) for a in acts if isinstance(a, Archive)}


def packed(acts, bits):
    """Segment id to offsets packed."""
    return {
        a.segment_id: list(a.offsets) for a in acts if isinstance(a, Compress) and a.bits == bits
    }


def released(acts):
    """Ids of released segments, in order."""
    return [a.segment_id for a in acts if isinstance(a, Release)]
