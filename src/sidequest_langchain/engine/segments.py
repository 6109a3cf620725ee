"""What users see of the cache: `model.kv`. Every act is a message to the engine's thread."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from sidequest_langchain.config import Protection
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.drawing import draw
from sidequest_langchain.engine.naming import info_of, named
from sidequest_langchain.engine.pin import Pin
from sidequest_langchain.engine.prefetching import Prefetcher
from sidequest_langchain.engine.saving import ThreadFiles, saved_file
from sidequest_langchain.engine.tokenizer import Template
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.receipts import (
    KVUsage,
    LoadReceipt,
    ReleaseReceipt,
    SaveReceipt,
    SegmentInfo,
)
from sidequest_langchain.labels import PathSelector
from sidequest_langchain.policy.manager import Manager
from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog, RunReceipt
from sidequest_langchain.policy.recording import Recorder

logger = logging.getLogger(__name__)

N_RECEIPTS = 1000
"""Receipts kept; older ones are forgotten."""

Observer = Callable[[ReleaseReceipt], None]


class KVSegments:
    """The segments of one engine's tree: look, release, pin. All methods are thread-safe.

    Each waits for the step that runs now, but for `post_release`, `receipts` and `serial`.
    """

    def __init__(self, core: EngineCore, log: ReceiptLog, files: ThreadFiles) -> None:
        self._core, self._files = core, files
        self._template: Template | None = None
        self.prefetcher = Prefetcher(core)
        self._receipts: deque[ReleaseReceipt | ActReceipt] = deque(maxlen=N_RECEIPTS)
        self._observers: list[Observer] = []
        core.tree.on_release = self._note
        log.observers.append(self._receipts.append)

    def segments(self, thread_id: str | None = None) -> list[SegmentInfo]:
        """The resident segments, parents first; with `thread_id`, those of its paths only."""

        def look() -> list[SegmentInfo]:
            tree = self._core.tree
            chosen = set(tree.segments())
            if thread_id is not None:
                tips = [p.tip for p in tree.paths.values() if p.label.thread_id == thread_id]
                chosen = {s for tip in tips for s in tip.path()}
            return [info_of(segment) for segment in tree.segments() if segment in chosen]

        return self._core.call(look).result()

    def usage(self) -> KVUsage:
        """What is resident now, and the totals since the engine started."""

        def look() -> KVUsage:
            tree, counters = self._core.tree, self._core.counters
            return KVUsage(
                n_bytes=tree.n_bytes,
                n_tokens=tree.n_tokens,
                n_segments=sum(1 for _ in tree.segments()),
                n_paths=len(tree.paths),
                peak_bytes=tree.peak_bytes,
                peak_resident_bytes=tree.peak_resident_bytes,
                n_prompt_tokens=counters.n_prompt_tokens,
                n_reused_tokens=counters.n_reused_tokens,
                n_prefilled_tokens=counters.n_prompt_tokens - counters.n_reused_tokens,
                n_generated_tokens=counters.n_generated_tokens,
                n_released_bytes=tree.n_released_bytes,
                n_steps=counters.n_steps,
            )

        return self._core.call(look).result()

    def reset_peak(self) -> None:
        """Begin to measure both peaks anew, from what is resident now."""

        def reset() -> None:
            tree = self._core.tree
            tree.peak_bytes = tree.peak_resident_bytes = tree.n_bytes

        self._core.call(reset).result()

    def release(
        self, path: str, *, thread_id: str | None = None, reason: str = "released"
    ) -> ReleaseReceipt:
        """Free what only the paths named `path` need: a branch, task, namespace or message id.

        Exact: if the prefix comes back it is recomputed. Idempotent; an unknown path is a no-op
        whose receipt has `is_known=False`. Paths in use are freed when their last reader leaves.
        """
        return self.post_release(named(path, thread_id), reason=reason, name=path).result()

    def predict_release(self, path: str, *, thread_id: str | None = None) -> ReleaseReceipt:
        """The receipt that `release(path)` would give now; changes nothing."""
        selector = named(path, thread_id)
        tree = self._core.tree
        return self._core.call(lambda: tree.predict_release(selector, name=path)).result()

    def post_release(
        self, selector: PathSelector, *, reason: str, name: str | None = None
    ) -> Future[ReleaseReceipt]:
        """Ask for a release without waiting for it; takes effect at the next step boundary."""
        return self._core.release(selector, reason=reason, name=name)

    def clear(self, thread_id: str | None = None) -> ReleaseReceipt:
        """Release every path, or every path of one thread."""
        selector = PathSelector(thread_id=thread_id)
        return self.post_release(selector, reason="cleared", name=thread_id or "*").result()

    def pin(self, path: str, *, thread_id: str | None = None) -> Pin:
        """Keep the paths named `path` resident, against releases and the budget alike."""
        selector = named(path, thread_id)
        tree = self._core.tree
        pins = self._core.call(lambda: [tree.pin(p) for p in tree.select(selector)]).result()
        return Pin(self._core, pins)

    def receipts(self) -> tuple[ReleaseReceipt | ActReceipt, ...]:
        """The most recent releases and acts of the managed cache, oldest first."""
        return tuple(self._receipts)

    def run_receipt(self) -> RunReceipt:
        """All that the managed cache did since the engine started, in sum.

        Raises:
            ConfigError: The settings name no policy.
        """
        return self._manager().log.summary()

    def recall(
        self, path: str, *, thread_id: str | None = None, reason: str = "recalled"
    ) -> tuple[ActReceipt, ...]:
        """Bring back what left the paths named `path`, at its true positions.

        Exact, as far as copies are kept in a slower tier: `CacheConfig(tiers=...)`. Rows that were
        hidden are seen again. Packed rows come back at full precision if their originals are kept.

        Raises:
            ConfigError: The settings name no policy.
            BudgetExceeded: There is no room for what would come back.
        """
        manager, tree = self._manager(), self._core.tree
        selector = named(path, thread_id)

        def recall() -> list[ActReceipt]:
            return manager.recall([p.tip for p in tree.select(selector)], reason)

        return tuple(self._core.call(recall).result())

    def prefetch(self, path: str, *, thread_id: str | None = None) -> tuple[ActReceipt, ...]:
        """Bring back what idled in a slower tier of the paths named `path`, before they go on.

        Exact. Does nothing where the budget has no room without giving something up, and where
        there are no tiers: what is missing comes back, or is computed, when it is read.
        """
        return self.post_prefetch(named(path, thread_id)).result()

    def post_prefetch(self, selector: PathSelector) -> Future[tuple[ActReceipt, ...]]:
        """Ask for a prefetch without waiting for it; what is on disk is read by another thread."""
        return self.prefetcher.paths(selector)

    def manage(self) -> tuple[ActReceipt, ...]:
        """Run a management cycle now, and return what it did.

        Raises:
            ConfigError: The settings name no policy.
            BudgetExceeded: The budget cannot be kept.
        """
        return tuple(self._core.call(self._manager().manage).result())

    def for_template(self, template: Template) -> KVSegments:
        """The same, for a chat model with a chat template of its own: saved threads name it."""
        other = copy.copy(self)
        other._template = template
        return other

    def save(self, thread_id: str, folder: str | Path) -> SaveReceipt:
        """Write what a thread's paths hold to one file of a folder; exact. See `ThreadFiles`.

        Raises:
            OSError: The file could not be written; an older one stays.
            CacheError: The model was changed since the engine began, or its weights are offloaded.
        """
        return self._files.save(thread_id, folder, template=self._template)

    def load(self, source: str | Path, thread_id: str | None = None) -> LoadReceipt:
        """Take in what `save` wrote, from its folder or the file, as the budget has room; exact.

        Raises:
            SavedThreadError: The file is absent, damaged, or another thread's or model's.
            BudgetExceeded: There is room for nothing of it. Either way nothing was changed.
        """
        return self._files.load(source, thread_id, template=self._template)

    @staticmethod
    def saved_file(folder: str | Path, thread_id: str) -> Path:
        """Where `save` puts a thread: a name made of a digest, whatever its id holds."""
        return saved_file(folder, thread_id)

    @property
    def serial(self) -> int:
        """How many paths were begun so far; does not wait."""
        return self._core.tree.serial

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` with every receipt, in the engine's thread. Returns the undo."""
        self._observers.append(observer)

        def undo() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return undo

    @contextlib.contextmanager
    def recording(
        self, sample: str, protection: Protection, *, every: int, horizon: int
    ) -> Iterator[Recorder]:
        """Record a trace of what runs meanwhile, for training; see `Recorder`.

        Raises:
            ConfigError: The settings neither manage nor observe.
        """
        core, manager = self._core, self._manager()

        def begin() -> Recorder:
            recorder = Recorder(
                manager.monitor, core.tree, protection=protection, every=every, horizon=horizon
            )
            recorder.sample = sample
            manager.monitor = recorder
            return recorder

        def end() -> None:
            recorder.end()
            manager.monitor = recorder.inner

        recorder = core.call(begin).result()
        try:
            yield recorder
        finally:
            core.call(end).result()

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            CacheCorrupted: The books do not balance.
        """
        self._core.call(lambda: check_integrity(self._core.tree)).result()

    def __str__(self) -> str:
        return draw(self.segments())

    def _manager(self) -> Manager:
        manager = self._core.manager
        if manager is None:
            msg = (
                "nothing is managed: the model was made without a policy; give "
                "cache=CacheConfig(policy='staged', budget_tokens=...)"
            )
            raise ConfigError(msg)
        return manager

    def _note(self, receipt: ReleaseReceipt) -> None:
        self._receipts.append(receipt)
        for observer in tuple(self._observers):
            try:
                observer(receipt)
            except BaseException:
                # It is told of what has happened; it has no say in it, and cannot end this thread.
                logger.exception("an observer of releases failed")
