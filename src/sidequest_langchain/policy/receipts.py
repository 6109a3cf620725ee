"""What one act of the managed cache did, as plain facts; the log that keeps them."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

logger = logging.getLogger(__name__)

Verb: TypeAlias = Literal[
    "evict", "evict_by_head", "compress", "archive", "hide", "release", "restore"
]
Outcome: TypeAlias = Literal["done", "observed", "refused", "failed"]

N_KEPT = 1000
"""Receipts kept in memory; older ones are in the file, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActReceipt:
    """One act on one segment. All but `restore`, `release` and idle `archive` are lossy."""

    verb: Verb
    outcome: Outcome
    """`"observed"`: observe mode, nothing was changed; `"refused"`: the guard or the executor
    said no, and nothing was changed; `"failed"`: it was tried, and the cache is as it was."""
    policy: str
    reason: str
    segment_id: int
    path: str
    """A label of the segment: its branch, task or node."""
    n_rows: int
    bits: int | None
    """Precision afterwards; `None` where no row is left or precision did not change."""
    freed_bytes: int
    """At the allocator; negative where rows came back."""
    mass: float
    """Share of the attention of the running path, as last observed, that the rows had."""
    kl: float | None
    """Divergence of the next-token distribution over the canary tokens, nats a token, of all acts
    of the cycle together; `None` where nothing was measured, as `kl_reason` says."""
    is_forced: bool
    """Whether the budget left no other choice than to go past the guard's limit."""
    exact: bool
    step: int
    runs: tuple[tuple[int, int], ...]
    """Positions, as runs of first and last."""
    text: str
    """What the rows that went had said; runs are divided by an ellipsis."""
    kl_reason: str = ""
    """Why `kl` is `None`, where something was done."""

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReceipt:
    """The managed cache's work in sum, as the receipts tell it."""

    n_acts: int
    n_rows_evicted: int
    n_rows_compressed: int
    n_rows_archived: int
    n_rows_restored: int
    freed_bytes: int
    mass: float
    """Most that one cycle's acts had."""
    most_kl: float | None
    n_refused: int
    n_forced: int

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON-ready values."""
        return asdict(self)


class ReceiptLog:
    """Keeps receipts in memory and, if asked to, as JSON lines in a file."""

    def __init__(self, file: Path | None = None, n_kept: int = N_KEPT) -> None:
        """Make a log.

        Args:
            file: Appended to; its folder must exist. A file that cannot be written is given up
                with one warning: the cache's work does not depend on it.
            n_kept: Receipts kept in memory.
        """
        self._file = file
        self._kept: deque[ActReceipt] = deque(maxlen=n_kept)
        self._totals = RunReceipt(
            n_acts=0, n_rows_evicted=0, n_rows_compressed=0, n_rows_archived=0,
            n_rows_restored=0, freed_bytes=0, mass=0.0, most_kl=None, n_refused=0, n_forced=0,
        )  # fmt: skip
        self.observers: list[Callable[[ActReceipt], None]] = []

    def add(self, receipts: Sequence[ActReceipt]) -> None:
        """Take in the receipts of one cycle."""
        if not receipts:
            return
        self._kept.extend(receipts)
        self._totals = _summed(self._totals, receipts)
        self._write(receipts)
        for receipt in receipts:
            for observer in tuple(self.observers):
                try:
                    observer(receipt)
                except Exception:
                    logger.exception("an observer of receipts failed")

    def receipts(self) -> tuple[ActReceipt, ...]:
        """The most recent ones, oldest first."""
        return tuple(self._kept)

    def summary(self) -> RunReceipt:
        """All of them in sum, the forgotten ones too."""
        return self._totals

    def _write(self, receipts: Sequence[ActReceipt]) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                for receipt in receipts:
                    file.write(json.dumps(receipt.to_json(), ensure_ascii=False) + "\n")
        except OSError as error:
            logger.warning("receipts are no longer written to %s: %s", self._file, error)
            self._file = None


def runs_of(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as runs of first and last."""
    if not positions:
        return ()
    breaks = [i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1]
    starts, ends = [0, *breaks], [*breaks, len(positions)]
    return tuple((positions[a], positions[b - 1]) for a, b in zip(starts, ends, strict=True))


def _summed(totals: RunReceipt, receipts: Sequence[ActReceipt]) -> RunReceipt:
    done = [r for r in receipts if r.outcome == "done"]

    def rows(*verbs: Verb) -> int:
        return sum(r.n_rows for r in done if r.verb in verbs)

    measured = [r.kl for r in done if r.kl is not None]
    if totals.most_kl is not None:
        measured.append(totals.most_kl)
    return RunReceipt(
        n_acts=totals.n_acts + len(done),
        n_rows_evicted=totals.n_rows_evicted + rows("evict", "evict_by_head", "hide"),
        n_rows_compressed=totals.n_rows_compressed + rows("compress"),
        n_rows_archived=totals.n_rows_archived + rows("archive"),
        n_rows_restored=totals.n_rows_restored + rows("restore"),
        freed_bytes=totals.freed_bytes + sum(r.freed_bytes for r in done),
        mass=max(totals.mass, sum(r.mass for r in done)),
        most_kl=max(measured, default=None),
        n_refused=totals.n_refused + sum(r.outcome == "refused" for r in receipts),
        n_forced=totals.n_forced + sum(r.is_forced for r in done),
    )
