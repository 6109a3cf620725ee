"""The managed cache as the engine sees it: told of steps, asked for room, keeps the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import BudgetExceeded, CacheError
from sidequest_langchain.kv.segment import Path as TreePath
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.cycle import Cycles
from sidequest_langchain.policy.deciding import DecisionEngine
from sidequest_langchain.policy.executor import Executor
from sidequest_langchain.policy.facts import Reason
from sidequest_langchain.policy.foreseeing import Foresight
from sidequest_langchain.policy.gathering import Gatherer
from sidequest_langchain.policy.guard import Canary, Forward
from sidequest_langchain.policy.importance import Predictor
from sidequest_langchain.policy.joining import Joiner
from sidequest_langchain.policy.last_logits import LastLogits
from sidequest_langchain.policy.limits import Limits
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.probabilities import sampled_layers
from sidequest_langchain.policy.receipting import Decode
from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog
from sidequest_langchain.policy.registry import policy_for
from sidequest_langchain.policy.returning import Returns, archive_for
from sidequest_langchain.policy.schedule import next_interval

EXACT = "\x00exact"
"""Ends the scope of calls that agreed to nothing lossy: they share with nobody who did."""
FIRST_INTERVAL = 16
RECALLED_STEPS = 256
"""Steps for which rows that were called back stay."""


class Manager:
    """Monitor, decision engine, executor and guard over one tree, for one engine's thread.

    Lossy as its settings say; every act is in `log`.
    """

    def __init__(
        self,
        tree: SegmentTree,
        config: CacheConfig,
        *,
        forward: Forward,
        decode: Decode,
        block_rows: int,
        token_weights: Mapping[int, float],
        fingerprint: Callable[[], Mapping[str, str]],
        device_bytes: int | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        """Make a manager.

        Args:
            tree: Managed; gets an archive if the settings name tiers for one.
            config: Settings; `is_managed` must be true of them.
            forward: Runs rows over the tree, for the canary.
            decode: Token ids as text, for receipts.
            block_rows: Rows after which a running tip is sealed: what is copied at once.
            token_weights: Factors of the user by token id.
            fingerprint: What rows depend on now; a copy made under another one is refused.
            device_bytes: Memory of the device, for `budget_share`.
            predictor: Guesses attention; without one, its moving average is taken.

        Raises:
            ConfigError: There is no policy of that name.
            ArchiveError: Nothing can be written to the archive's folder.
        """
        self._tree, self._config = tree, config
        self._block_rows = block_rows
        limits = Limits(tree, config, device_bytes=device_bytes)
        policy = policy_for(
            config.policy,
            compress_first=config.compress_first,
            per_head=config.eviction == "per_head",
        )
        n_layers = len(tree.layout)
        self.monitor = Monitor(
            sampled_layers(config.observed_layers, n_layers),
            n_layers=n_layers,
            is_by_head=config.eviction == "per_head",
        )
        executor = Executor(tree, self.monitor, mask_only=config.mask_only)
        self.log = ReceiptLog(None if config.receipts_file is None else Path(config.receipts_file))
        self.last_logits = LastLogits(config.guard.canary_tokens, tree)
        self._joiner = Joiner(tree, self.monitor, limits, block_rows=block_rows)
        self._cycles = Cycles(
            tree,
            config,
            monitor=self.monitor,
            gatherer=Gatherer(
                tree,
                self.monitor,
                needs=policy.needs,
                may_change=self.may_change,
                may_release=lambda segment: segment not in self._recalled,
            ),
            decisions=DecisionEngine(policy, config, executor, token_weights, predictor),
            executor=executor,
            canary=Canary(forward, config.guard, self.last_logits),
            log=self.log,
            decode=decode,
            limits=limits,
        )
        self._recalled: dict[Segment, int] = {}
        """Segments that came back, and the step up to which they stay as they are."""
        self._fingerprint, self._known = fingerprint, dict(fingerprint())
        tree.on_fuse = self.monitor.notebook.join
        tree.most_joined_rows = block_rows
        tree.most_staged_rows = limits.copies(block_rows).staged
        tree.archive = self._archive = archive_for(config, self._known)
        self._returns = Returns(tree, self.monitor, make_room=self._make_room_to_return)
        due, refresh = self._cycles.is_due, self._refresh_fingerprint
        self.foresight = Foresight(tree, self._returns, self.log, is_due=due, refresh=refresh)
        self._is_adaptive = config.interval == "adaptive"
        self._interval = FIRST_INTERVAL if self._is_adaptive else int(config.interval)
        self._n_since = 0
        self._headroom_then = 0.0
        self._begun = 0.0
        self.seconds = 0.0
        """Spent on management, the monitor's part of a forward pass not counted."""

    # -- around a step -------------------------------------------------------------------

    def make_room(self, n_bytes: int, *, is_prefill: bool) -> None:
        """Before a step adds `n_bytes`: run a cycle if the budget asks for it.

        Raises:
            BudgetExceeded: The budget cannot be kept; nothing was lost.
        """
        self._make_room_for(n_bytes, "prefill" if is_prefill else "budget")

    def begin_step(self) -> None:
        """A forward pass begins."""
        self.last_logits.begin_step()
        self.monitor.begin(is_looking=self._n_since + 1 >= self._interval)
        self._begun = time.perf_counter()

    def end_step(self, paths: Sequence[TreePath], n_prefilled: int) -> None:
        """A forward pass went well, and its rows are counted.

        Args:
            paths: Those that took part and still run.
            n_prefilled: Prompt tokens that it computed.
        """
        begun = time.perf_counter()
        if n_prefilled > FIRST_INTERVAL:
            self._returns.costs.prefilled(n_prefilled, begun - self._begun)
        self.monitor.finish()
        for path in paths:
            if path.is_running and path.tip.n_rows >= self._block_rows:
                self.seal(path)
        if self._joiner.is_due and not n_prefilled:
            self._joiner.join()
        self._n_since += 1
        if self._n_since >= self._interval:
            self._tick()
        self.seconds += time.perf_counter() - begun

    def seal(self, path: TreePath) -> None:
        """Close what a running tip holds, so that it can be managed; exact."""
        self._joiner.is_due = True
        self.monitor.notes_of(path.tip)
        self._tree.seal(path)
        self.monitor.notes_of(path.tip)

    def node_ended(self) -> None:
        """A call ended: its path is idle until the graph moves on."""
        self._try("node_end")

    # -- paths that come back ------------------------------------------------------------

    def prepare(self, scope: str, ids: Sequence[int]) -> None:
        """Before a path begins: what it left in a slower tier comes back, or is computed again.

        Raises:
            BudgetExceeded: There is no room for what comes back.
        """
        if self._archive is not None:
            self._refresh_fingerprint()
            self.log.add(self._returns.prepare(scope, ids))

    def recall(self, tips: Sequence[Segment], reason: str) -> list[ActReceipt]:
        """Bring back what left of these paths, at its true positions; exact.

        Raises:
            BudgetExceeded: There is no room for it.
        """
        self._refresh_fingerprint()
        segments = list(dict.fromkeys(s for tip in tips for s in tip.path() if s.token_ids))
        until = self.monitor.n_steps + RECALLED_STEPS
        before = self._recalled
        self._recalled = {**before, **dict.fromkeys(segments, until)}
        try:
            receipts = self._returns.recall(segments, reason)
        except BaseException:
            self._recalled = before
            raise
        self.log.add(receipts)
        return receipts

    def manage(self) -> list[ActReceipt]:
        """Run a cycle now.

        Raises:
            BudgetExceeded: The budget cannot be kept.
        """
        self._refresh_fingerprint()
        return self._cycles.run("asked")

    def close(self) -> None:
        """Remove the archive. Idempotent."""
        if self._archive is not None:
            self._archive.close()
            self._tree.archive = None

    # -- inside --------------------------------------------------------------------------

    def _refresh_fingerprint(self) -> None:
        """Weights may have been written to, or an adapter switched: what was kept is strange."""
        now = dict(self._fingerprint())
        if now != self._known:
            self._known = now
            self.last_logits.forget()
        if self._archive is not None and now != self._archive.fingerprint:
            self._archive.fingerprint = now

    def may_change(self, segment: Segment) -> bool:
        """Whether all readers agreed to lossy acts, and nobody called its rows back just now."""
        if self._recalled:
            now = self.monitor.n_steps
            self._recalled = {s: until for s, until in self._recalled.items() if until >= now}
        return not segment.scope.endswith(EXACT) and segment not in self._recalled

    def _make_room_to_return(self, n_bytes: int) -> None:
        """Make room for rows that come back.

        Raises:
            BudgetExceeded: There is none.
        """
        self._make_room_for(n_bytes, "asked")
        if self._cycles.limits.is_tight(n_bytes):
            msg = (
                f"what is to come back takes {n_bytes:,} bytes, for which the cache's budget has "
                "no room, even without every other row that may go; give a larger budget, or "
                "recall fewer paths"
            )
            raise BudgetExceeded(msg)

    def _make_room_for(self, n_bytes: int, reason: Reason) -> None:
        begun = time.perf_counter()
        try:
            if self._cycles.is_due(n_bytes):
                self._refresh_fingerprint()
                if self._cycles.limits.is_tight(n_bytes):
                    self._seal_all()
                if self._cycles.run(reason, n_bytes):
                    self._joiner.join()
        finally:
            self.seconds += time.perf_counter() - begun

    def _seal_all(self) -> None:
        """Let go of open tips' older rows too, before the budget is said to be too small."""
        least = self._config.protection.recent_window
        for path in [p for p in self._tree.paths.values() if p.is_running and p.tip.n_rows > least]:
            self.seal(path)

    def _tick(self) -> None:
        has_acted = self._try("interval")
        if self._is_adaptive:
            limits = self._cycles.limits
            headroom = limits.headroom()
            growth = (headroom - self._headroom_then) / -max(1, self._n_since)
            self._headroom_then = headroom
            self._interval = next_interval(
                self._interval, has_acted=has_acted, growth=growth, headroom=headroom
            )
        self._n_since = 0

    def _try(self, reason: Reason) -> bool:
        """Run a cycle that need not be: what it cannot do waits for one that must."""
        if not self._cycles.is_due():
            return False
        self._refresh_fingerprint()
        try:
            has_acted = bool(self._cycles.run(reason))
        except CacheError:
            return False
        if has_acted:
            self._joiner.join()
        return has_acted
