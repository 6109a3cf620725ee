"""What a policy sees: plain numbers about every segment, frozen when a cycle begins.

It must not know tensors, the tree or a setting: a policy can be run on facts made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.acts import Act

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

Reason = Literal["interval", "budget", "node_end", "branch_switch", "prefill", "asked"]
Stage = Literal["early", "middle", "late"]
Unit = Literal["bytes", "rows"]

PACKED_BITS = {4: 5.0, 8: 9.0}
"""Bits a value takes once packed, scales and zeros included. On the safe side: groups of 64 rows
take a little less, so that what a policy counts as freed is freed."""


class Need(StrEnum):
    """Facts that cost something to gather; the monitor gathers those that the policy names."""

    IMPORTANCE = "importance"
    ACCUMULATED = "accumulated"
    LAST = "last"
    WINDOW = "window"
    REDUNDANCY = "redundancy"
    NORMS = "norms"


@dataclass(frozen=True, slots=True)
class Tier:
    """A slower or smaller place for rows: `"int8"`, `"int4"`, `"cpu"` or `"disk"`."""

    name: str
    free_bytes: int | None = None
    """`None` is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentFacts:
    """One segment. Arrays are of `[n_tokens]`, one entry a token, and read-only.

    Raises:
        ValueError: An array has another length.
    """

    segment_id: int
    parent_id: int | None
    start: int
    """Position of the first token."""
    n_tokens: int
    resident: Bools
    """Whether the token's row is in memory, at any precision."""
    bits: Bytes
    """0 away, 4 or 8 packed, 16 or 32 full precision."""
    kinds: Bytes
    """`TokenKind`s."""
    token_ids: Ids
    importance: Floats
    """Moving average of the attention probability: mean over the query heads, and over the
    queries that could see the token."""
    accumulated: Floats
    """Sum of it over all observed queries."""
    n_seen: Floats
    """Observed queries that could see the token."""
    last: Floats
    """Probability at the last observed query."""
    window: Floats
    """Mean over the last queries of the last prefill; 0 or NaN: that prefill did not see it."""
    mass: float
    """Moving average of the segment's exact attention mass a step."""
    age: int
    """Steps since a running path last read it."""
    n_reads: int
    n_readers: int
    """Running paths over it now."""
    is_active: bool
    depth: int
    may_change: bool
    """False: it is pinned, or a reader did not agree."""
    redundancy: Floats | None = None
    """Mean cosine similarity of the key to the other keys of its segment (R-KV)."""
    key_norm: Floats | None = None
    value_norm: Floats | None = None
    protected: Bools | None = None
    """Rows that no policy may take out of memory; see `protection.protect`, which fills it."""
    precise: Bools | None = None
    """Rows that may not be packed either."""
    weights: Floats | None = None
    """Factors of the user on whatever score a policy uses."""
    predicted: Floats | None = None
    """Expected future attention, where an importance predictor runs."""

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _frozen(name, given, dtype, self.n_tokens))

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.n_tokens

    @property
    def is_idle(self) -> bool:
        """Whether no running path reads it and the graph stands elsewhere."""
        return self.n_readers == 0 and not self.is_active

    @property
    def evictable(self) -> Bools:
        """Rows that a policy may take out of memory, `[n_tokens]`."""
        rows = self.resident & self.may_change
        return rows if self.protected is None else rows & ~self.protected

    @property
    def score(self) -> Floats:
        """Expected future attention: predicted if a predictor runs, else the moving average."""
        return self.importance if self.predicted is None else self.predicted


_ARRAYS: dict[str, type[np.generic]] = {
    "resident": np.bool_,
    "bits": np.uint8,
    "kinds": np.uint8,
    "token_ids": np.int64,
    **dict.fromkeys(("importance", "accumulated", "n_seen", "last", "window"), np.float32),
    **dict.fromkeys(("redundancy", "key_norm", "value_norm"), np.float32),
    **dict.fromkeys(("protected", "precise"), np.bool_),
    **dict.fromkeys(("weights", "predicted"), np.float32),
}


def _frozen(name: str, given: Any, dtype: type[np.generic], n: int) -> npt.NDArray[Any]:
    array = np.asarray(given, dtype=dtype)
    if array.shape != (n,):
        msg = f"{name} must have one entry for each of {n} tokens, found shape {array.shape}"
        raise ValueError(msg)
    if array.flags.writeable:
        # A copy: whoever made the facts goes on writing into its own array.
        array = array.copy()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheFacts:
    """The whole tree in one management cycle.

    Raises:
        ValueError: A parent comes after its child or is missing.
    """

    segments: tuple[SegmentFacts, ...]
    """Parents first."""
    bytes_per_row: int
    """Of a row at full precision, all layers."""
    n_bytes: int
    budget_bytes: int | None
    to_free: int
    """Bytes to give back in this cycle; 0 is none."""
    n_seen: int
    """Tokens of the longest running path."""
    tiers: tuple[Tier, ...] = ()
    """Those that exist, with the room left in them."""
    step: int = 0
    reason: Reason = "asked"
    tips: tuple[tuple[int, ...], ...] = ()
    """For each running path, its segments' ids from root to tip."""
    stage: Stage = "middle"
    """Of the schedule; see `schedule.stage_of`."""
    unit: Unit = "bytes"
    """What is counted. `"rows"`: a row counts as the bytes of full precision whatever it takes, so
    that packing it frees nothing."""
    to_evict: int | None = None
    """Bytes of `to_free` for which rows may be lost, packing counted; `None` is all. Less where
    what is resident still fits: precision is given up in good time, rows only when they must."""
    value_bits: int | None = None
    """Bits of a value at full precision; where not given, those of the rows that are, or 16."""

    def __post_init__(self) -> None:
        known: set[int] = set()
        for segment in self.segments:
            if segment.parent_id is not None and segment.parent_id not in known:
                msg = (
                    f"segment {segment.segment_id} comes before its parent {segment.parent_id}, "
                    "or that is missing: list parents first"
                )
                raise ValueError(msg)
            known.add(segment.segment_id)
        if self.value_bits is None:
            most = max((int(s.bits.max(initial=0)) for s in self.segments), default=0)
            bits = most if most > max(PACKED_BITS) else 16
            object.__setattr__(self, "value_bits", bits)

    @property
    def lossy_bytes(self) -> int:
        """Bytes for which rows may be lost: `to_evict`, or all that is to be freed."""
        return self.to_free if self.to_evict is None else min(self.to_evict, self.to_free)

    def segment(self, segment_id: int) -> SegmentFacts:
        """The segment of this id.

        Raises:
            KeyError: There is none.
        """
        for segment in self.segments:
            if segment.segment_id == segment_id:
                return segment
        raise KeyError(segment_id)

    @property
    def full_bits(self) -> int:
        """Bits of a value at full precision."""
        assert self.value_bits is not None
        return self.value_bits

    def row_bytes(self, segment: SegmentFacts) -> npt.NDArray[np.float64]:
        """Bytes that each token's row takes now, `[n_tokens]`; packed rows by `PACKED_BITS`."""
        table = np.zeros(256)
        table[9:] = self.bytes_per_row
        for bits, taken in PACKED_BITS.items():
            share = 1.0 if self.unit == "rows" else min(1.0, taken / self.full_bits)
            table[bits] = self.bytes_per_row * share
        return np.asarray(np.where(segment.resident, table[segment.bits], 0.0))

    def room(self, tier: str) -> float:
        """Bytes that fit into the tier; 0 if there is no such tier."""
        for known in self.tiers:
            if known.name == tier:
                return np.inf if known.free_bytes is None else float(known.free_bytes)
        return 0.0

    def leaves(self) -> tuple[SegmentFacts, ...]:
        """Segments without children: where paths end."""
        parents = {s.parent_id for s in self.segments}
        return tuple(s for s in self.segments if s.segment_id not in parents)

    def path(self, segment_id: int) -> tuple[SegmentFacts, ...]:
        """The segments from the root to this one."""
        known = {s.segment_id: s for s in self.segments}
        found = []
        at: int | None = segment_id
        while at is not None:
            found.append(known[at])
            at = known[at].parent_id
        return tuple(reversed(found))


class Policy(Protocol):
    """Decides what to do with the cache. Pure: the same facts give the same acts."""

    @property
    def name(self) -> str:
        """In receipts and tables."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """Facts it reads that cost something to gather."""
        ...

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """Acts that free about `facts.to_free` bytes, in order; none where that is 0."""
        ...


def checked(acts: Sequence[object]) -> tuple[Act, ...]:
    """What a policy of the user gave, as acts.

    Raises:
        ConfigError: Something else came back.
    """
    found = []
    for act in acts:
        if not isinstance(act, Act):
            msg = (
                f"a policy returned {act!r}; it must return acts of sidequest_langchain.policy.acts"
                " (Evict, EvictByHead, Compress, Archive, Release)"
            )
            raise ConfigError(msg)
        found.append(act)
    return tuple(found)
