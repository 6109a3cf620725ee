"""What left comes back: on request, and when a path is gone on with. Restore, or compute again?

Both are timed as they happen, so that the cheaper one is chosen by what this machine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import ArchiveError, BudgetExceeded
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.asking import EXACT_ACT
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.receipts import ActReceipt, Outcome, runs_of

logger = logging.getLogger(__name__)

GUESSED_BYTES_A_SECOND = 2e8
"""Of a restore, until one was timed: a slow disk."""
GUESSED_TOKENS_A_SECOND = 100.0
"""Of a prefill, until one was timed."""
KEPT = 0.7
"""Share of a moving average that stays."""


class CostModel:
    """How long it takes to restore bytes and to compute tokens again."""

    def __init__(self) -> None:
        self.bytes_a_second = GUESSED_BYTES_A_SECOND
        self.tokens_a_second = GUESSED_TOKENS_A_SECOND
        self._n_restores = self._n_prefills = 0

    def restored(self, n_bytes: int, seconds: float) -> None:
        """Take in a restore."""
        speed = n_bytes / max(seconds, 1e-6)
        is_first = self._n_restores == 0
        self.bytes_a_second = speed if is_first else KEPT * self.bytes_a_second + (1 - KEPT) * speed
        self._n_restores += 1

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Take in a step that prefilled so many tokens, and little else."""
        speed = n_tokens / max(seconds, 1e-6)
        is_first = self._n_prefills == 0
        kept = self.tokens_a_second
        self.tokens_a_second = speed if is_first else KEPT * kept + (1 - KEPT) * speed
        self._n_prefills += 1

    def is_restore_cheaper(self, n_bytes: int, n_tokens: int) -> bool:
        """Whether bytes come back sooner than tokens are computed again."""
        return n_bytes / self.bytes_a_second <= n_tokens / self.tokens_a_second


class Returns:
    """Brings rows back."""

    def __init__(
        self,
        tree: SegmentTree,
        monitor: Monitor,
        *,
        make_room: Callable[[int], None],
    ) -> None:
        """Make it.

        Args:
            tree: Changed.
            monitor: Knows which segments were archived while idle.
            make_room: Makes room for so many bytes, or raises `BudgetExceeded`.
        """
        self._tree, self._monitor = tree, monitor
        self._make_room = make_room
        self.costs = CostModel()

    def recall(self, segments: Sequence[Segment], reason: str) -> list[ActReceipt]:
        """Bring back all that is archived or hidden of some closed segments; exact.

        Raises:
            BudgetExceeded: There is no room for all of it; nothing came back.
        """
        self._make_room(sum(self.bytes_away(s) for s in segments if not s.is_open))
        return [
            receipt
            for segment in segments
            if (segment.archived or segment.hidden) and not segment.is_open
            for receipt in (self._restore(segment, reason),)
        ]

    def prepare(self, scope: str, ids: Sequence[int]) -> list[ActReceipt]:
        """Before a path begins: rows that idled in a slower tier come back, or their tokens go.

        Where computing is cheaper, there is no room, or a copy is lost, the segment and what hangs
        on it are released, so that the path begins before them. Never leaves a gap that nobody
        asked for.
        """
        away = self._left_idle(scope, ids)
        n_rows = sum(s.n_tokens - s.n_resident for s in away)
        receipts: list[ActReceipt] = []
        if away and self.costs.is_restore_cheaper(sum(map(self.bytes_away, away)), n_rows):
            for segment in self._with_room(scope, ids):
                receipts.append(self.bring_back(segment, "a path comes back to it"))
                if receipts[-1].outcome != "done":
                    break
        for segment in self._left_idle(scope, ids)[:1]:
            self._tree.release_subtree(segment)
        return receipts

    def bring_back(self, segment: Segment, reason: str) -> ActReceipt:
        """Bring back the rows of a segment that left while nobody read them; exact."""
        receipt = self._restore(segment, reason)
        if receipt.outcome == "done":
            self._monitor.notes_of(segment).is_archived_idle = False
        return receipt

    def is_left_idle(self, segment: Segment) -> bool:
        """Whether rows of a segment left while nobody read them."""
        return bool(segment.archived) and self._monitor.notes_of(segment).is_archived_idle

    def _left_idle(self, scope: str, ids: Sequence[int]) -> list[Segment]:
        """Segments on the way to a path's beginning whose rows left while nobody read them."""
        found, n = self._tree.match(scope, ids)
        return [
            segment
            for segment in (found.path() if found is not None and n else ())
            if self.is_left_idle(segment)
        ]

    def _with_room(self, scope: str, ids: Sequence[int]) -> list[Segment]:
        """The segments that come back, once there is room for all of them; none if there is none.

        For all at once: room for the second would be made of the first, which idles still.
        """
        n_made = 0
        try:
            while True:
                away = self._left_idle(scope, ids)
                n_bytes = sum(map(self.bytes_away, away))
                if n_bytes <= n_made:
                    return away
                self._make_room(n_bytes)
                n_made = n_bytes
        except BudgetExceeded:
            logger.debug("no room for what was to come back", exc_info=True)
            return []

    def bytes_away(self, segment: Segment) -> int:
        """What the copies of a segment's rows take once they are back."""
        full = self._tree.layout[0].dtype.itemsize * 8
        shares = [
            len(copy.offsets) * (1.0 if copy.bits is None else (copy.bits + 1) / full)
            for copy in segment.archived
        ]
        return int(sum(shares) * self._tree.bytes_per_token)

    def _restore(self, segment: Segment, reason: str) -> ActReceipt:
        tree = self._tree
        before = _resident(segment)
        outcome: Outcome = "done"
        n_bytes = 0
        begun = time.perf_counter()
        try:
            if segment.hidden:
                tree.unhide(segment)
            if segment.archived:
                n_bytes = tree.restore(segment)
                self.costs.restored(n_bytes, time.perf_counter() - begun)
        except (ArchiveError, MemoryError, RuntimeError, ValueError) as error:
            logger.debug("a restore failed", exc_info=True)
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        back = sorted(_resident(segment) - before)
        return ActReceipt(
            verb="restore",
            outcome=outcome,
            policy="",
            reason=reason,
            segment_id=segment.segment_id,
            path="",
            n_rows=len(back),
            bits=None,
            freed_bytes=-n_bytes,
            mass=0.0,
            kl=None,
            kl_reason=EXACT_ACT,
            is_forced=False,
            exact=True,
            step=self._monitor.n_steps,
            runs=runs_of([segment.start + at for at in back]),
            text="",
        )


def _resident(segment: Segment) -> set[int]:
    managed = segment.residency
    if managed is None:
        return set(range(segment.n_tokens))
    found = {at for block in managed.packed for at in block.offsets}
    if managed.kept_by_head is None:
        found |= set(managed.dense)
    return found - managed.hidden


def archive_for(config: CacheConfig, fingerprint: Mapping[str, str]) -> Archive | None:
    """The archive that settings name tiers for.

    Raises:
        ArchiveError: Nothing can be written to its folder.
    """
    tiers = config.tiers
    if not tiers.cpu_bytes and not tiers.disk_bytes:
        return None
    return Archive(
        fingerprint=fingerprint,
        cpu_bytes=tiers.cpu_bytes,
        disk_bytes=tiers.disk_bytes,
        folder=None if tiers.archive_folder is None else Path(tiers.archive_folder),
    )
