"""Recording traces: a monitor that listens to every step beside the one that manages.

It must not change what is managed. Nothing of it runs unless a trace is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sidequest_langchain.config import Protection
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.facts import Bools, Floats, Ids, Need
from sidequest_langchain.policy.gathering import Gatherer, running_tips
from sidequest_langchain.policy.importance import features_of
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.notes import Notes
from sidequest_langchain.policy.protection import protect
from sidequest_langchain.policy.traces import Cycle

if TYPE_CHECKING:
    from sidequest_langchain.kv.step_plan import StepPlan
    from sidequest_langchain.kv.watching import Decoded, Prefilled

EVERY = 32
"""Observed queries between two moments that are written down."""
HORIZON = 64
"""Observed queries whose attention is the target."""


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    """What was known at one moment; its future is still to come."""

    n_queries: int
    token_ids: Ids
    """Of the path, `[n]`: the future counts as far as a later path begins with them."""
    features: Floats
    """`[n, F]`"""
    may_go: Bools
    """What a policy could have chosen, `[n]`."""
    accumulated: Floats
    """What every token had got until then, `[n]`..."""
    n_seen: Floats
    """...from so many queries, `[n]`."""


class Recorder(Monitor):
    """Stands in for a manager's monitor, which sees all that it saw before.

    Features are those that the managing monitor would give a policy, its interval included; the
    future is heard at every step, by notes of its own. One path is recorded at a time: the one
    that runs, the first where several do. Rows that `protection` keeps are left out, since no
    policy chooses among them, and a sink's attention would drown theirs.
    """

    def __init__(
        self,
        inner: Monitor,
        tree: SegmentTree,
        *,
        protection: Protection,
        every: int = EVERY,
        horizon: int = HORIZON,
    ) -> None:
        """Make a recorder.

        Args:
            inner: The monitor that manages.
            tree: Looked at.
            protection: Which rows never go.
            every: Observed queries between two moments.
            horizon: Observed queries that make the future of a moment.
        """
        super().__init__(inner.layers, n_layers=len(tree.layout))
        self.inner = inner
        self.n_steps = inner.n_steps
        self.cycles: list[Cycle] = []
        """What was recorded so far."""
        self.sample = ""
        """Name of what runs now."""
        self._tree = tree
        self._protection = protection
        self._every, self._horizon = every, horizon
        self._gatherer = Gatherer(tree, inner, needs=(Need.NORMS,), may_change=lambda _: True)
        self._n_queries = 0
        self._next = every
        self._waiting: list[_Moment] = []
        self._on_fuse = tree.on_fuse
        tree.on_fuse = self._fused

    # -- a monitor's work, for both ------------------------------------------------------

    def begin(self, *, is_looking: bool) -> None:
        """Begin a step; the inner monitor looks where it would have looked."""
        self.inner.begin(is_looking=is_looking)
        super().begin(is_looking=True)

    def decoded(self, plan: StepPlan, layer: int, seen: Decoded) -> None:
        """Note what the decoding rows attended to in a layer."""
        self.inner.decoded(plan, layer, seen)
        super().decoded(plan, layer, seen)
        if layer == min(self.layers):
            self._n_queries += 1

    def prefilled(self, plan: StepPlan, layer: int, seen: Prefilled) -> None:
        """Note what the last queries of a chunk attended to in a layer."""
        self.inner.prefilled(plan, layer, seen)
        super().prefilled(plan, layer, seen)
        if layer == min(self.layers):
            self._n_queries += min(self._window, plan.rows[seen.row].n_new)

    def finish(self) -> None:
        """Fold what the step saw into both notes, and record if it is time."""
        self.inner.finish()
        super().finish()
        if self._waiting and self._n_queries >= self._waiting[0].n_queries + self._horizon:
            self._close(self._horizon)
        if self._n_queries >= self._next:
            self._remember()
            self._next = self._n_queries + self._every

    def notes_of(self, segment: Segment) -> Notes:
        """The inner monitor's notes; those of the future follow the cuts too."""
        super().notes_of(segment)
        return self.inner.notes_of(segment)

    # -- recording -----------------------------------------------------------------------

    def end(self) -> None:
        """Keep what has seen half of its future at least, and let go of the tree."""
        self._close(self._horizon // 2)
        self._waiting.clear()
        self._tree.on_fuse = self._on_fuse

    def _fused(self, parent: Segment, child: Segment) -> None:
        if self._on_fuse is not None:
            self._on_fuse(parent, child)
        self.notebook.join(parent, child)

    def _remember(self) -> None:
        facts = self._gatherer.gather(
            self._gatherer.segments(),
            budget_bytes=None,
            to_free=0,
            reason="asked",
            stage=lambda _: "middle",
            tiers=(),
        )
        if not facts.tips:
            return
        facts = protect(facts, self._protection)
        path = facts.path(facts.tips[0][-1])
        heard = self._heard([self._segment(s.segment_id) for s in path])
        may_go = [s.resident & ~(s.protected if s.protected is not None else False) for s in path]
        self._waiting.append(
            _Moment(
                self._n_queries,
                np.concatenate([s.token_ids for s in path]),
                np.concatenate([features_of(facts, s) for s in path]),
                np.concatenate(may_go),
                *heard,
            )
        )

    def _close(self, horizon: int) -> None:
        """Turn moments that have seen `horizon` queries into cycles."""
        is_due = [self._n_queries >= m.n_queries + horizon for m in self._waiting]
        tips = running_tips(self._tree) if any(is_due) else []
        path = [s for s in tips[0].path() if s.token_ids] if tips else []
        if path:
            token_ids = np.concatenate([np.array(s.token_ids, np.int64) for s in path])
            heard = self._heard(path)
            for moment, is_over in zip(self._waiting, is_due, strict=True):
                if is_over:
                    self._keep(moment, token_ids, *heard)
        self._waiting = [m for m, is_over in zip(self._waiting, is_due, strict=True) if not is_over]

    def _keep(self, moment: _Moment, token_ids: Ids, accumulated: Floats, n_seen: Floats) -> None:
        n = min(len(token_ids), len(moment.token_ids))
        differ = np.flatnonzero(token_ids[:n] != moment.token_ids[:n])
        n = int(differ[0]) if differ.size else n
        n_new = n_seen[:n] - moment.n_seen[:n]
        chosen = moment.may_go[:n] & (n_new > 0.5)
        if chosen.any():
            future = (accumulated[:n] - moment.accumulated[:n]) / np.maximum(n_new, 1e-6)
            self.cycles.append(
                Cycle(
                    self.sample,
                    moment.features[:n][chosen],
                    np.maximum(future[chosen], 0.0).astype(np.float32),
                )
            )

    def _heard(self, path: Sequence[Segment]) -> tuple[Floats, Floats]:
        """Sums of attention, and of queries, over all tokens of a path, `[n]` each."""
        notes = [(super(Recorder, self).notes_of(s), s.n_tokens) for s in path]
        accumulated = [note.accumulated[:n].cpu().numpy() for note, n in notes]
        n_seen = [note.n_seen[:n].cpu().numpy() for note, n in notes]
        return np.concatenate(accumulated), np.concatenate(n_seen)

    def _segment(self, segment_id: int) -> Segment:
        return next(s for s in self._tree.segments() if s.segment_id == segment_id)
