"""What users see of the cache: `model.kv`. Every act is a message to the engine's thread."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType

from sidequest_langchain.config import Protection
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.drawing import draw
from sidequest_langchain.errors import ConfigError, EngineClosedError
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.receipts import KVUsage, ReleaseReceipt, SegmentInfo
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.labels import PathSelector
from sidequest_langchain.policy.manager import Manager
from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog, RunReceipt
from sidequest_langchain.policy.recording import Recorder

logger = logging.getLogger(__name__)

N_RECEIPTS = 1000
"""Receipts kept; older ones are forgotten."""

Observer = Callable[[ReleaseReceipt], None]


class Pin:
    """Keeps paths resident until `unpin`, or the end of a `with` block."""

    def __init__(self, core: EngineCore, segments: list[Segment]) -> None:
        self._core = core
        self._segments = segments

    def unpin(self) -> None:
        """Let go; paths that were released meanwhile are freed now. Idempotent."""
        segments, self._segments = self._segments, []

        def unpin() -> None:
            for segment in segments:
                self._core.tree.unpin(segment)

        with contextlib.suppress(EngineClosedError):  # then there is nothing left to free
            self._core.call(unpin).result()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unpin()


class KVSegments:
    """The segments of one engine's tree: look, release, pin. All methods are thread-safe.

    Each waits for the step that runs now, but for `post_release`, `receipts` and `serial`.
    """

    def __init__(self, core: EngineCore, log: ReceiptLog) -> None:
        self._core = core
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
            return [_info(segment) for segment in tree.segments() if segment in chosen]

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
        return self.post_release(_named(path, thread_id), reason=reason, name=path).result()

    def predict_release(self, path: str, *, thread_id: str | None = None) -> ReleaseReceipt:
        """The receipt that `release(path)` would give now; changes nothing."""
        selector = _named(path, thread_id)
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
        selector = _named(path, thread_id)
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
        selector = _named(path, thread_id)

        def recall() -> list[ActReceipt]:
            return manager.recall([p.tip for p in tree.select(selector)], reason)

        return tuple(self._core.call(recall).result())

    def manage(self) -> tuple[ActReceipt, ...]:
        """Run a management cycle now, and return what it did.

        Raises:
            ConfigError: The settings name no policy.
            BudgetExceeded: The budget cannot be kept.
        """
        return tuple(self._core.call(self._manager().manage).result())

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


def _named(path: object, thread_id: str | None) -> PathSelector:
    if not isinstance(path, str):
        msg = (
            f"a path is named by a string (a branch, a task, a namespace or a message's id), found "
            f"{type(path).__name__}; for a message, give message.id"
        )
        raise ConfigError(msg)
    return PathSelector(path_id=path, thread_id=thread_id)


def _info(segment: Segment) -> SegmentInfo:
    parent = segment.parent
    stack, n_readers = [segment], 0
    while stack:
        at = stack.pop()
        n_readers += at.n_pins + sum(1 for p in at.paths if p.is_running)
        stack.extend(at.children)
    return SegmentInfo(
        segment_id=segment.segment_id,
        parent_id=parent.segment_id if parent is not None and parent.parent is not None else None,
        scope=segment.scope,
        start=segment.start,
        n_tokens=segment.n_tokens,
        n_bytes=segment.n_bytes,
        n_readers=n_readers,
        labels=tuple(p.label for p in sorted(segment.paths, key=lambda p: p.serial)),
    )
