"""The only writer: carries acts out on the tree, one by one. It must not know why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sidequest_langchain.kv import what_if
from sidequest_langchain.kv.parts import Part
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.acts import Act, Archive, Compress, Evict, EvictByHead, Release
from sidequest_langchain.policy.facts import Bools, CacheFacts
from sidequest_langchain.policy.monitor import Monitor

FEWEST_LAYERS = 6
"""Of a model whose first and last layer may stay unpacked: of fewer, too little is packed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An act that cannot be carried out, and why."""

    act: Act
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """What carrying out an act came to."""

    act: Act
    segment: Segment
    freed_bytes: int
    is_copied: bool = False
    """Whether copies of the rows lie in a tier below."""
    why_not: str = ""
    """Why nothing was done, if nothing was."""


class Executor:
    """Carries out acts on one tree."""

    def __init__(
        self,
        tree: SegmentTree,
        monitor: Monitor,
        *,
        mask_only: bool = False,
        exempt: Collection[int] = (),
    ) -> None:
        """Make an executor.

        Args:
            tree: Changed.
            monitor: Its scores by head choose what each head keeps.
            mask_only: Hide rows that are to be evicted.
            exempt: Layers that are not packed.
        """
        self._tree = tree
        self._monitor = monitor
        self._mask_only = mask_only
        self._exempt = tuple(exempt)
        self._has_tried_ends = False

    def exempt_ends(self) -> bool:
        """Leave the first and the last layer at full precision from now on.

        Returns:
            Whether that is new.
        """
        if self._has_tried_ends or len(self._tree.layout) < FEWEST_LAYERS:
            return False
        self._has_tried_ends = True
        self._exempt = tuple(sorted({*self._exempt, 0, len(self._tree.layout) - 1}))
        return True

    def check(
        self, acts: Sequence[Act], facts: CacheFacts, segments: dict[int, Segment]
    ) -> tuple[list[Act], list[Refusal]]:
        """Acts that may be carried out, cut down to what they may touch; and the others.

        A policy may ask for anything: protected rows, segments that are gone or that are read by
        whoever did not agree, offsets that do not exist.
        """
        known = {s.segment_id: s for s in facts.segments}
        fine: list[Act] = []
        refused: list[Refusal] = []
        released: set[int] = set()
        by_head = {act.segment_id for act in acts if isinstance(act, EvictByHead)}
        for act in acts:
            this = known.get(act.segment_id)
            segment = segments.get(act.segment_id)
            if this is None or segment is None:
                refused.append(Refusal(act, "there is no such segment"))
            elif not this.may_change:
                refused.append(Refusal(act, "it is pinned, runs, or a reader did not agree"))
            elif isinstance(act, Release):
                held = [c for c in segment.children if c.segment_id not in released]
                if held or this.n_readers or segment.n_pins:
                    refused.append(Refusal(act, "something stands on it"))
                else:
                    released.add(act.segment_id)
                    fine.append(act)
            elif isinstance(act, EvictByHead):
                if segment.packed or len({layer.n_kv_heads for layer in self._tree.layout}) > 1:
                    refused.append(Refusal(act, "its rows cannot be kept by head"))
                else:
                    fine.append(act)
            elif segment.kept_by_head is not None or act.segment_id in by_head:
                refused.append(Refusal(act, "its heads keep rows of their own"))
            elif isinstance(act, Archive) and self._tree.archive is None:
                refused.append(Refusal(act, "there is no tier for it"))
            elif isinstance(act, Evict | Archive | Compress):
                allowed = this.resident & ~_guarded(this.protected, this.n_tokens)
                if isinstance(act, Compress):
                    allowed = this.resident & ~_guarded(this.precise, this.n_tokens)
                    allowed = allowed & (this.bits > act.bits)
                offsets = tuple(at for at in act.offsets if at < this.n_tokens and allowed[at])
                if not offsets:
                    refused.append(Refusal(act, "all of it is protected, away or packed"))
                else:
                    fine.append(replace(act, offsets=offsets))
        return fine, refused

    def overlay(
        self, acts: Sequence[Act], facts: CacheFacts, segments: dict[int, Segment]
    ) -> dict[Segment, Sequence[Part]]:
        """What the acts would leave, as parts that are made as they are read: changes nothing."""
        found: dict[Segment, Sequence[Part]] = {}
        for act in acts:
            segment = segments[act.segment_id]
            if isinstance(act, EvictByHead):
                keep = self._keep(act, facts, segment)
                if keep is not None:
                    found[segment] = what_if.kept_by_head(segment, keep)
            elif isinstance(act, Compress):
                found[segment] = what_if.repacked(
                    segment, act.offsets, act.bits, self._exempt, parts=found.get(segment)
                )
            elif isinstance(act, Evict | Archive):
                found[segment] = what_if.without(segment, act.offsets, parts=found.get(segment))
        return found

    def carry_out(self, act: Act, facts: CacheFacts, segment: Segment) -> Done:
        """Do one act. All or nothing: what fails leaves the segment as it was.

        Raises:
            MemoryError: There is no room for the smaller copy; `torch` says `RuntimeError`.
        """
        tree = self._tree
        if isinstance(act, Release):
            return Done(act, segment, tree.release_leaf(segment))
        if isinstance(act, EvictByHead):
            keep = self._keep(act, facts, segment)
            if keep is None:
                return Done(act, segment, 0, why_not="a head would lose rows that are protected")
            return Done(act, segment, tree.evict_by_head(segment, keep))
        if isinstance(act, Compress):
            freed = tree.compress(segment, act.offsets, act.bits, self._exempt)
            return Done(act, segment, freed)
        assert isinstance(act, Evict | Archive)
        if self._mask_only:
            tree.hide(segment, act.offsets)
            return Done(act, segment, 0)
        is_copied = tree.archive is not None and tree.archive_rows(segment, act.offsets)
        if isinstance(act, Archive) and not is_copied:
            return Done(act, segment, 0, why_not="no tier has room for a copy")
        return Done(act, segment, tree.evict(segment, act.offsets), is_copied)

    def _keep(self, act: EvictByHead, facts: CacheFacts, segment: Segment) -> Tensor | None:
        """Which tokens each head of each layer keeps, long `[L, H, n_keep]`, ascending.

        `None` if one head holds fewer rows than another has protected ones: a cut between rows
        that heads chose for themselves leaves them with unlike numbers, and all must keep as many.
        """
        this = facts.segment(act.segment_id)
        layout = self._tree.layout
        n_layers, n_heads = len(layout), layout[0].n_kv_heads
        scores = self._monitor.notes_of(segment).heads
        n = segment.n_tokens
        table = torch.zeros(n_layers, n_heads, n) if scores is None else scores[..., :n].cpu()
        table = table.clone()
        protected = torch.from_numpy(_guarded(this.protected, n).copy())
        table[..., protected] = float("inf")
        managed = segment.residency
        if managed is not None and managed.kept_by_head is not None:
            held = torch.zeros(n_layers, n_heads, n + 1, dtype=torch.bool)
            held.scatter_(2, managed.kept_by_head.cpu(), True)  # noqa: FBT003 - torch's own
            table[~held[..., :n]] = -1.0
        else:
            table[..., torch.from_numpy(~this.resident)] = -1.0
        n_protected = int((table == float("inf")).sum(-1).max())
        n_held = int((table >= 0).sum(-1).min())
        if n_protected > n_held:
            return None
        n_keep = min(max(act.n_keep, n_protected), n_held)
        return table.topk(n_keep, dim=-1).indices.sort(-1).values


def _guarded(mask: Bools | None, n: int) -> Bools:
    return np.zeros(n, bool) if mask is None else mask
