"""From scores to acts: which rows go, so that enough bytes are freed and not more.

A policy makes a `Draft` of its facts, tells it what to sacrifice in order, and returns its acts.
Each step of a draft stops as soon as enough is freed, and does nothing once that is so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sidequest_langchain.policy.acts import (
    Act,
    Archive,
    Compress,
    Evict,
    EvictByHead,
    Release,
)
from sidequest_langchain.policy.choosing import Choice, take_groups, take_lowest
from sidequest_langchain.policy.facts import PACKED_BITS, CacheFacts, SegmentFacts

Scores = Mapping[int, npt.NDArray[Any]]
"""By segment id, numbers or flags of `[n_tokens]`: the higher, the longer a row stays."""


class Draft:
    """What a policy has decided so far. The facts are not changed.

    A row is taken once: what was evicted or archived is not packed too.
    """

    def __init__(self, facts: CacheFacts, to_free: float | None = None) -> None:
        """Begin with nothing decided.

        Args:
            facts: Of this cycle.
            to_free: Bytes, rows may be lost for all of them; by default `facts.to_free`, and
                `facts.lossy_bytes`.
        """
        self.facts = facts
        self.to_free = float(facts.to_free if to_free is None else to_free)
        self.to_evict = float(facts.lossy_bytes if to_free is None else to_free)
        self.freed = 0.0
        """Bytes that the acts free, by `CacheFacts.row_bytes`."""
        self._bytes = {s.segment_id: facts.row_bytes(s) for s in facts.segments}
        self._bits = {s.segment_id: np.where(s.resident, s.bits, 0) for s in facts.segments}
        self._archived = {s.segment_id: np.zeros(s.n_tokens, bool) for s in facts.segments}
        self._released: list[int] = []
        self._reasons: dict[tuple[str, int], str] = {}

    @property
    def left(self) -> float:
        """Bytes still to free; 0 or less: enough."""
        return self.to_free - self.freed

    @property
    def left_to_evict(self) -> float:
        """Bytes for which rows must still be lost; 0 or less: enough."""
        return self.to_evict - self.freed

    def evict(
        self,
        scores: Scores,
        among: Collection[int] | None = None,
        *,
        fair: float = 0.0,
        block: int = 1,
        reason: str = "",
    ) -> None:
        """Evict the rows of the lowest scores, of equal ones the oldest.

        Args:
            scores: Weights of the user are multiplied in here.
            among: Ids of the segments that may lose rows; all by default.
            fair: 0 looks at scores alone. 1 lets every message keep its proportional share of
                what stays, its best rows; in between, that part of it. Where that leaves too few
                rows to evict, the others go too: an instruction must not vanish while another
                stays whole (arXiv:2510.00231), but the budget is a promise.
            block: Rows that go together, neighbours from a multiple of it on, by their mean.
            reason: For the receipt.
        """
        if self.left_to_evict > 0:
            choice = self._choice(scores, among)
            taken = take_lowest(choice, self.left_to_evict, fair=fair, block=block)
            self._take(taken, "evict", reason)

    def archive(
        self, scores: Scores, among: Collection[int] | None = None, *, reason: str = ""
    ) -> None:
        """Move the rows of the lowest scores to the CPU or disk tier, as far as there is room."""
        room = self.facts.room("cpu") + self.facts.room("disk") - self._archived_bytes()
        if self.left > 0 and room > 0:
            choice = self._choice(scores, among)
            # The copy is of a row as it is now, even if this cycle would have packed it.
            costs = [self.facts.row_bytes(s) for s in choice.segments]
            choice = replace(choice, costs=costs)
            self._take(take_lowest(choice, self.left, room=room), "archive", reason)

    def compress(
        self,
        bits: Literal[4, 8],
        scores: Scores,
        among: Collection[int] | None = None,
        *,
        reason: str = "",
    ) -> None:
        """Pack the rows of the lowest scores, protected ones too, unless they stay precise.

        Rows go in groups of 64 neighbours, as they are quantised; a lone handful is left.
        Nothing happens where the tier does not exist.
        """
        if self.left <= 0 or self.facts.unit == "rows" or self.facts.room(f"int{bits}") <= 0:
            return
        choice = self._choice(scores, among, bits=bits)
        for segment_id, offsets in take_groups(choice, self.left).items():
            self._pack(segment_id, offsets, bits, reason)

    def release_idle(
        self,
        among: Collection[int] | None = None,
        *,
        is_last_resort: bool = False,
        reason: str = "",
    ) -> None:
        """Release idle segments that nothing builds on, the least recently read first.

        Args:
            among: Ids of the segments that may go; all by default.
            is_last_resort: Stop where no more rows need be lost.
            reason: For the receipt.
        """
        while (self.left_to_evict if is_last_resort else self.left) > 0:
            gone = set(self._released)
            parents = {s.parent_id for s in self.facts.segments if s.segment_id not in gone}
            idle = [
                s
                for s in self.facts.segments
                if s.is_idle
                and s.may_change
                and s.segment_id not in gone | parents
                and (among is None or s.segment_id in among)
            ]
            if not idle:
                return
            # Of equal age the deepest: it is the end of a path.
            oldest = max(idle, key=lambda s: (s.age, s.depth, s.segment_id))
            self._drop(oldest.segment_id, self._bytes[oldest.segment_id] > 0)
            self._released.append(oldest.segment_id)
            self._reasons["release", oldest.segment_id] = reason

    def add(self, acts: Sequence[Act]) -> None:
        """Take over the acts of another policy on the same rows, decided after these."""
        for act in acts:
            at = act.segment_id
            reason = str(getattr(act, "reason", ""))
            if isinstance(act, Compress):
                self._pack(at, np.asarray(act.offsets), act.bits, reason)
            elif isinstance(act, Evict | Archive):
                kind = "evict" if isinstance(act, Evict) else "archive"
                self._take({at: np.asarray(act.offsets)}, kind, reason)
            elif isinstance(act, Release):
                self._drop(at, self._bytes[at] > 0)
                self._released.append(at)
                self._reasons["release", at] = reason

    def after(self) -> CacheFacts:
        """The facts as they would be once the rows are packed and gone; releases do not show."""
        segments = tuple(
            replace(
                s,
                bits=self._bits[s.segment_id].astype(np.uint8),
                resident=self._bits[s.segment_id] > 0,
            )
            for s in self.facts.segments
        )
        return replace(
            self.facts,
            segments=segments,
            to_free=max(0, int(np.ceil(self.left))),
            to_evict=max(0, int(np.ceil(self.left_to_evict))),
            n_bytes=max(0, self.facts.n_bytes - int(self.freed)),
            # Once all rows are packed, none tells what full precision was.
            value_bits=self.facts.full_bits,
        )

    def acts(self) -> list[Act]:
        """The acts: copies are made first, from what is still whole, then the rest."""
        archives: list[Act] = []
        evictions: list[Act] = []
        packings: list[Act] = []
        for s in self.facts.segments:
            at, bits = s.segment_id, self._bits[s.segment_id]
            if at in self._released:
                continue
            gone = s.resident & (bits == 0)
            if found := _offsets(gone & self._archived[at]):
                archives.append(Archive(at, found, self._reason("archive", at)))
            if found := _offsets(gone & ~self._archived[at]):
                evictions.append(Evict(at, found, self._reason("evict", at)))
            for target in (8, 4):
                if found := _offsets(s.resident & (bits == target) & (s.bits != target)):
                    reason = self._reason(f"int{target}", at)
                    packings.append(Compress(at, found, 8 if target == 8 else 4, reason))
        releases = [Release(at, self._reason("release", at)) for at in self._released]
        return [*archives, *evictions, *packings, *releases]

    def _choice(
        self, scores: Scores, among: Collection[int] | None, bits: int | None = None
    ) -> Choice:
        """The rows that may be taken: into packed blocks of `bits`, or out of memory."""
        segments, rows, gains = [], [], []
        for s in self.facts.segments:
            at = s.segment_id
            if at in self._released or (among is not None and at not in among):
                continue
            if bits is None:
                rows.append(s.evictable & (self._bits[at] > 0))
                gains.append(self._bytes[at])
            else:
                rows.append(_packable(s) & (self._bits[at] > bits))
                gains.append(self._bytes[at] - self._packed_bytes(bits))
            segments.append(s)
        return Choice(segments, rows, [scores[s.segment_id] for s in segments], gains)

    def _take(self, taken: Mapping[int, npt.NDArray[np.intp]], kind: str, reason: str) -> None:
        for segment_id, offsets in taken.items():
            mask = np.zeros(len(self._bits[segment_id]), bool)
            mask[offsets] = True
            self._drop(segment_id, mask)
            if kind == "archive":
                self._archived[segment_id] |= mask
            self._reasons.setdefault((kind, segment_id), reason)

    def _drop(self, segment_id: int, mask: npt.NDArray[np.bool_]) -> None:
        self.freed += float(self._bytes[segment_id][mask].sum())
        self._bytes[segment_id] = np.where(mask, 0.0, self._bytes[segment_id])
        self._bits[segment_id] = np.where(mask, 0, self._bits[segment_id])

    def _pack(self, segment_id: int, offsets: npt.NDArray[np.intp], bits: int, reason: str) -> None:
        packed = self._packed_bytes(bits)
        self.freed += float((self._bytes[segment_id][offsets] - packed).sum())
        self._bytes[segment_id] = self._bytes[segment_id].copy()
        self._bytes[segment_id][offsets] = packed
        self._bits[segment_id] = self._bits[segment_id].copy()
        self._bits[segment_id][offsets] = bits
        self._reasons.setdefault((f"int{bits}", segment_id), reason)

    def _packed_bytes(self, bits: int) -> float:
        share = 1.0 if self.facts.unit == "rows" else PACKED_BITS[bits] / self.facts.full_bits
        return self.facts.bytes_per_row * min(1.0, share)

    def _archived_bytes(self) -> float:
        return sum(
            float(self.facts.row_bytes(s)[self._archived[s.segment_id]].sum())
            for s in self.facts.segments
        )

    def _reason(self, kind: str, segment_id: int) -> str:
        return self._reasons.get((kind, segment_id), "")


def by_head(facts: CacheFacts, acts: Sequence[Act]) -> list[Act]:
    """Evictions as so many rows of each KV head's own choice; other acts stay as they are."""
    resident = {s.segment_id: int(s.resident.sum()) for s in facts.segments}
    return [
        EvictByHead(act.segment_id, resident[act.segment_id] - len(act.offsets), act.reason)
        if isinstance(act, Evict)
        else act
        for act in acts
    ]


def _packable(segment: SegmentFacts) -> npt.NDArray[np.bool_]:
    rows = segment.resident & segment.may_change
    return rows if segment.precise is None else rows & ~segment.precise


def _offsets(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.flatnonzero(mask))
