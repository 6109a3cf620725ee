"""The tree and the notes as frozen facts: what a policy sees of a cycle. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidequest_langchain.kv.segment import Path, Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.facts import (
    CacheFacts,
    Floats,
    Ids,
    Need,
    Reason,
    SegmentFacts,
    Stage,
    Tier,
    Unit,
)
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.notes import Notes

MOST_COMPARED = 2048
"""Keys of one segment that are compared with each other for their redundancy, at most."""


class Gatherer:
    """Makes facts of one tree."""

    def __init__(
        self,
        tree: SegmentTree,
        monitor: Monitor,
        *,
        needs: Collection[Need],
        may_change: Callable[[Segment], bool],
        may_release: Callable[[Segment], bool] = lambda segment: True,
    ) -> None:
        """Make a gatherer.

        Args:
            tree: Looked at.
            monitor: Whose notes are read.
            needs: Facts that cost something to gather, and are wanted.
            may_change: Whether everybody who reads a segment agreed to lossy acts.
            may_release: Whether it may be released as a whole, which is exact, once it idles.
        """
        self._tree = tree
        self._monitor = monitor
        self._needs = frozenset(needs)
        self._may_change, self._may_release = may_change, may_release
        self._ids: dict[Segment, tuple[int, Ids]] = {}

    def segments(self) -> dict[int, Segment]:
        """The segments that hold tokens, by id, parents first."""
        return {s.segment_id: s for s in self._tree.segments() if s.token_ids}

    def gather(
        self,
        segments: dict[int, Segment],
        *,
        budget_bytes: int | None,
        to_free: int,
        to_evict: int | None = None,
        reason: Reason,
        stage: Callable[[int], Stage],
        tiers: Sequence[Tier],
        unit: Unit = "bytes",
    ) -> CacheFacts:
        """The facts of this moment.

        Args:
            segments: See `segments`.
            budget_bytes: What may stay.
            to_free: Bytes to give back.
            to_evict: Bytes of these for which rows may be lost; all by default.
            reason: Why the cycle runs.
            stage: From the tokens of the longest running path.
            tiers: Where rows may go.
            unit: What is counted.
        """
        self._monitor.read_masses()
        tips = running_tips(self._tree)
        lineages = [[s for s in tip.path() if s.token_ids] for tip in tips]
        readers: dict[Segment, int] = {}
        for lineage in lineages:
            for segment in lineage:
                readers[segment] = readers.get(segment, 0) + 1
        is_between = not any(p.is_running for p in self._tree.paths.values())
        pinned = _pinned(segments.values())
        facts = []
        depths: dict[int, int] = {}
        for segment in segments.values():
            parent = segment.parent
            parent_id = parent.segment_id if parent is not None and parent.parent else None
            depth = depths[segment.segment_id] = depths.get(parent_id or 0, -1) + 1
            n_readers = 0 if is_between else readers.get(segment, 0)
            facts.append(
                self._facts(
                    segment,
                    parent_id=parent_id,
                    depth=depth,
                    n_readers=n_readers,
                    is_active=segment in readers,
                    is_free=segment not in pinned,
                )
            )
        n_seen = max((tip.end for tip in tips), default=0)
        self._ids = {s: ids for s, ids in self._ids.items() if s.segment_id in segments}
        return CacheFacts(
            segments=tuple(facts),
            bytes_per_row=self._tree.bytes_per_token,
            n_bytes=self._tree.n_bytes
            if unit == "bytes"
            else self._tree.n_tokens * self._tree.bytes_per_token,
            unit=unit,
            budget_bytes=budget_bytes,
            to_free=to_free,
            to_evict=to_evict,
            n_seen=n_seen,
            tiers=tuple(tiers),
            step=self._monitor.n_steps,
            reason=reason,
            tips=tuple(tuple(s.segment_id for s in lineage) for lineage in lineages if lineage),
            stage=stage(n_seen),
            value_bits=self._tree.layout[0].dtype.itemsize * 8,
        )

    def _facts(
        self,
        segment: Segment,
        *,
        parent_id: int | None,
        depth: int,
        n_readers: int,
        is_active: bool,
        is_free: bool,
    ) -> SegmentFacts:
        n, notes = segment.n_tokens, self._monitor.notes_of(segment)
        bits, scores = self._bits(segment), _scores(notes, n)
        norms = self._norms(segment) if Need.NORMS in self._needs else (None, None)
        similar = self._redundancy(segment) if Need.REDUNDANCY in self._needs else None
        may_change = is_free and not segment.is_open
        is_agreed = self._may_change(segment)
        # Who agreed to nothing loses no row; but what idles may be released, which is exact.
        is_idle = not (is_active or n_readers)
        is_whole = may_change and not is_agreed and is_idle and self._may_release(segment)
        may_change = may_change and (is_agreed or is_whole)
        return SegmentFacts(
            segment_id=segment.segment_id,
            parent_id=parent_id,
            start=segment.start,
            n_tokens=n,
            resident=bits > 0,
            bits=bits,
            kinds=np.frombuffer(bytes(segment.kinds), np.uint8),
            token_ids=self._ids_of(segment),
            mass=notes.mass,
            age=max(0, self._monitor.n_steps - notes.last_step),
            n_reads=notes.n_reads,
            n_readers=n_readers,
            is_active=is_active,
            depth=depth,
            may_change=may_change,
            protected=np.ones(n, bool) if is_whole else None,
            redundancy=similar,
            key_norm=norms[0],
            value_norm=norms[1],
            importance=scores[0],
            accumulated=scores[1],
            n_seen=scores[2],
            last=scores[3],
            window=scores[4],
        )

    def _ids_of(self, segment: Segment) -> Ids:
        """Token ids as an array; those of a closed segment are kept from cycle to cycle."""
        start, found = self._ids.get(segment, (-1, None))
        if found is None or start != segment.start or len(found) != segment.n_tokens:
            found = np.array(segment.token_ids, np.int64)
            self._ids[segment] = (segment.start, found)
        return found

    def _bits(self, segment: Segment) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Precision of each token's row; what is hidden counts as away."""
        full = self._tree.layout[0].dtype.itemsize * 8
        managed = segment.residency
        if managed is None:
            return np.full(segment.n_tokens, full, np.uint8)
        bits = np.zeros(segment.n_tokens, np.uint8)
        if managed.kept_by_head is not None:
            # Heads differ in which tokens they hold, not in how many: those that most of them hold
            # stand for all, so that there are as many as there are rows.
            held = managed.kept_by_head.cpu()
            counts = torch.bincount(held.flatten(), minlength=segment.n_tokens + 1)
            n_rows = int((held < segment.n_tokens).sum(-1).max()) if held.numel() else 0
            most = counts[: segment.n_tokens].sort(descending=True, stable=True).indices[:n_rows]
            bits[most.numpy()] = full
            return bits
        bits[list(managed.dense)] = full
        for block in managed.packed:
            bits[list(block.offsets)] = block.bits
        bits[list(managed.hidden)] = 0
        return bits

    def _sampled_keys(self, segment: Segment) -> list[Tensor]:
        """K of some layers, `[H, n_rows, D]`, of a segment whose rows are all there."""
        if segment.residency is not None or not segment.n_rows:
            return []
        keys, _ = segment.rows(0, segment.n_rows)
        return [keys[layer].float() for layer in sorted(self._monitor.layers)]

    def _redundancy(self, segment: Segment) -> Floats:
        """Mean cosine similarity of each key to the others, over sampled layers and heads."""
        found = np.zeros(segment.n_tokens, np.float32)
        keys = self._sampled_keys(segment)
        n = min(segment.n_tokens, MOST_COMPARED)
        if keys and n > 1:
            total = torch.zeros(n, device=keys[0].device)
            for layer in keys:
                unit = torch.nn.functional.normalize(layer[:, :n], dim=-1)
                # The sum over all others is a product with the sum of all: no n x n matrix.
                total += ((unit * unit.sum(1, keepdim=True)).sum(-1) - 1).mean(0) / (n - 1)
            found[:n] = (total / len(keys)).cpu().numpy()
        return found

    def _norms(self, segment: Segment) -> tuple[Floats | None, Floats | None]:
        if segment.residency is not None or not segment.n_rows:
            return None, None
        found: list[Floats] = []
        for rows in segment.rows(0, segment.n_rows):
            layers = [rows[layer].float() for layer in sorted(self._monitor.layers)]
            norm = torch.stack([layer.norm(dim=-1).mean(0) for layer in layers]).mean(0)
            found.append(norm.cpu().numpy())
        return found[0], found[1]


def running_tips(tree: SegmentTree) -> list[Segment]:
    """Tips of the running paths; where none runs, of the one that ran last in each scope."""
    running = [p for p in tree.paths.values() if p.is_running]
    if not running:
        latest: dict[str, Path] = {}
        for path in tree.paths.values():
            before = latest.get(path.tip.scope)
            if before is None or _recency(before) < _recency(path):
                latest[path.tip.scope] = path
        newest = max(latest.values(), key=_recency, default=None)
        running = [] if newest is None else [newest]
    return [path.tip for path in running]


def _recency(path: Path) -> tuple[int, int]:
    """Orders paths by when they ran. One that grew out of another was read with it: the longer."""
    return path.tip.last_used, path.tip.end


def _pinned(segments: Collection[Segment]) -> set[Segment]:
    """Segments that a pin holds, themselves or by what stands on them."""
    found: set[Segment] = set()
    for segment in segments:
        if segment.n_pins:
            at: Segment | None = segment
            while at is not None and at not in found:
                found.add(at)
                at = at.parent
    return found


def _scores(notes: Notes, n: int) -> Any:
    """Importance, accumulated, seen, last and window, `[5, n]`: one copy from the device."""
    arrays = (notes.importance, notes.accumulated, notes.n_seen, notes.last, notes.window)
    return torch.stack([array[:n] for array in arrays]).cpu().numpy()
