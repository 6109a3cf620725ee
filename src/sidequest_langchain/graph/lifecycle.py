"""Connects the runs of attached graphs with one model's cache: events out, releases in.

It must not know LangChain's handler protocol. Nothing here waits for the engine.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from langchain_core.callbacks import BaseCallbackManager

from sidequest_langchain.config import Retain
from sidequest_langchain.errors import EngineClosedError
from sidequest_langchain.graph.book import RunBook
from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.effects import Effect, Emit, Post, emit
from sidequest_langchain.graph.retention import Retention
from sidequest_langchain.graph.runs import CallTotals, Listener, PrunePlan, Run, Serials, Started
from sidequest_langchain.kv.receipts import ReleaseReceipt, SegmentInfo
from sidequest_langchain.labels import PathSelector

logger = logging.getLogger(__name__)

Releases = list[Future[ReleaseReceipt]]


class Cache(Protocol):
    """The part of `KVSegments` that a graph needs. Only `segments` waits for the engine."""

    @property
    def serial(self) -> int:
        """How many paths were begun so far."""

    def post_release(
        self, selector: PathSelector, *, reason: str, name: str = ""
    ) -> Future[ReleaseReceipt]:
        """Ask for a release."""

    def post_prefetch(self, selector: PathSelector) -> Future[Any]:
        """Say that paths are about to go on."""

    def segments(self, thread_id: str | None = None) -> list[SegmentInfo]:
        """What is resident."""


class Watcher(Protocol):
    """Wants to know when runs are over. It is not kept alive."""

    def run_ended(self) -> None:
        """An outermost run ended; must neither wait nor raise."""


class Lifecycle:
    """What all handlers of one model share, so that what two of them see is counted once.

    Thread-safe. A lock is held around the books only, never around a listener, a callback or
    the cache.
    """

    def __init__(self, caches: Callable[[], tuple[Cache, ...]], retain: Retain | None) -> None:
        self._caches = caches
        """Finds the caches; none while the model is not loaded: there is nothing to release."""
        self._book = RunBook(Retention(retain))
        self._lock = threading.Lock()
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()

    # -- from the handlers ---------------------------------------------------------------

    def start_run(self, listener: Listener, started: Started) -> None:
        """A chain, graph, node or tool begins."""
        serials = self._serials()
        with self._lock:
            effects = self._book.start_run(listener, started, serials)
        self._carry_out(effects)

    def end_run(self, run_id: UUID, error: BaseException | None = None) -> None:
        """A chain, graph, node or tool ended, with `error` if it raised."""
        run, serials = self._book.runs.get(run_id), self._serials()
        with self._lock:
            effects = self._book.end_run(run_id, error, serials)
        posts = [effect for effect in effects if isinstance(effect, Post)]
        self._carry_out([effect for effect in effects if isinstance(effect, Emit)])
        if run is not None and run.root.is_ended:
            # Before the releases: whether one came in time for the bus would be chance.
            run.root.bus.close()
        self._carry_out(posts)
        if run is not None and run.root.is_ended:
            with self._lock:
                watchers = tuple(self._watchers)
            for watcher in watchers:
                watcher.run_ended()

    def start_call(
        self, run_id: UUID, parent_run_id: UUID | None, metadata: Mapping[str, Any]
    ) -> None:
        """A model call begins."""
        with self._lock:
            self._book.start_call(run_id, parent_run_id, metadata)

    def end_call(self, run_id: UUID, totals: CallTotals | None) -> None:
        """A model call ended; `totals` is `None` if it failed."""
        with self._lock:
            effects = self._book.end_call(run_id, totals)
        self._carry_out(effects)

    def pause(self, run_id: UUID | None) -> None:
        """A graph run waits for a resume."""
        with self._lock:
            self._book.pause(run_id)

    def resume(self, run_id: UUID | None) -> None:
        """A graph run goes on from a checkpoint."""
        with self._lock:
            self._book.resume(run_id)

    def learn(self, manager: BaseCallbackManager, thread_id: str | None) -> None:
        """Learn what only the config of something that runs inside of a node knows.

        Args:
            manager: Its callbacks: the handlers of the graph.
            thread_id: Its thread.
        """
        run = self.run(manager.parent_run_id)
        if run is None or run.step is None:
            return
        if run.step.ref.thread_id != thread_id:
            with self._lock:
                self._book.correct_thread(run.step, thread_id)
        if not run.root.bus.knows(run.step.graph_run_id):
            run.root.bus.capture(run.step.graph_run_id, manager)
        run.root.bus.flush()

    # -- from the helpers ----------------------------------------------------------------

    def run(self, run_id: UUID | None) -> Run | None:
        """The live run of that id."""
        return None if run_id is None else self._book.runs.get(run_id)

    def open_branch(
        self, run_id: UUID, thread_id: str | None, branch: str, parent: str | None
    ) -> None:
        """A branch was opened in a run, on a thread."""
        with self._lock:
            self._book.open_branch(run_id, thread_id, branch, parent)

    def foresee(self, thread_id: str | None, branches: Sequence[str]) -> None:
        """Branches are about to go on: what idles of them in slower tiers may come back."""
        for cache in self._caches():
            for branch in branches:
                with suppress(EngineClosedError):
                    cache.post_prefetch(PathSelector(path_id=branch, thread_id=thread_id))

    def read_branches(
        self,
        run_id: UUID,
        thread_id: str | None,
        read: Callable[[BranchLedger], tuple[str, ...]],
    ) -> tuple[str, ...]:
        """What `read` finds in the branches of a thread (of a run, if it has no thread)."""
        with self._lock:
            return read(self._book.ledger(run_id, thread_id) or BranchLedger())

    def stage(self, run_id: UUID, plan: PrunePlan) -> bool:
        """Keep a prune until its step ends well; `False` if `run_id` is in no step."""
        with self._lock:
            return self._book.stage(run_id, plan)

    def prune_now(self, run_id: UUID, plan: PrunePlan) -> Releases:
        """A prune that does not wait for its step to end."""
        with self._lock:
            effects = self._book.prune_now(run_id, plan)
        return self._carry_out(effects)

    # -- from the savers -----------------------------------------------------------------

    def caches(self) -> tuple[Cache, ...]:
        """The caches that are there; none while the model is not loaded."""
        return self._caches()

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every run that ends, as long as somebody holds it."""
        with self._lock:
            self._watchers.add(watcher)

    def is_busy(self, thread_id: str) -> bool:
        """Whether an attached graph runs on a thread."""
        with self._lock:
            return any(run.thread_id == thread_id for run in self._book.runs.values())

    def forget_thread(self, thread_id: str) -> None:
        """A thread was deleted: one that is begun under its id has branches of its own."""
        if not self.is_busy(thread_id):
            with self._lock:
                self._book.forget_branches(thread_id)

    # -- inside --------------------------------------------------------------------------

    def _serials(self) -> Serials:
        return {id(cache): cache.serial for cache in self._caches()}

    def _carry_out(self, effects: Sequence[Effect]) -> Releases:
        """Do what is to be done, in order; outside of the lock."""
        releases: Releases = []
        for effect in effects:
            if isinstance(effect, Emit):
                for listener in effect.audience:
                    listener.deliver(effect.event)
            else:
                releases += self._post(effect)
        for root in {effect.root.run_id: effect.root for effect in effects}.values():
            root.bus.flush()
        return releases

    def _post(self, post: Post) -> Releases:
        releases: Releases = []
        for cache in self._caches():
            selector = post.selector
            if post.since is not None:
                selector = replace(selector, n_serial_from=post.since.get(id(cache), 0))
            if post.before is not None:
                selector = replace(selector, n_serial_below=post.before.get(id(cache), 0))
            with suppress(EngineClosedError):
                releases.append(cache.post_release(selector, reason=post.reason, name=post.name))
        for release in releases:
            release.add_done_callback(partial(self._report, post))
        return releases

    def _report(self, post: Post, done: Future[ReleaseReceipt]) -> None:
        """Tell what a release freed; in the engine's thread, so it must not raise or wait."""
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            for listener in post.audience:
                listener.fail(error)
            return
        receipt = done.result()
        if not (receipt.n_paths or post.is_asked_for):
            return
        logger.info(
            "release %s (%s): %d tokens, %d bytes in %d segments",
            receipt.path,
            receipt.reason,
            receipt.freed_tokens,
            receipt.freed_bytes,
            len(receipt.segments),
        )
        with self._lock:
            effect = emit(
                post.root, post.step, "sidequest.release", _released(receipt), post.audience
            )
        for listener in effect.audience:
            with suppress(Exception):  # counted already; a strict one raises, but not in here
                listener.deliver(effect.event)
        post.root.bus.flush_soon()


def _released(receipt: ReleaseReceipt) -> dict[str, Any]:
    return {
        "path": receipt.path,
        "reason": receipt.reason,
        "segments": list(receipt.segments),
        "tokens": receipt.freed_tokens,
        "bytes": receipt.freed_bytes,
        "n_paths": receipt.n_paths,
        "n_deferred": receipt.n_deferred,
        "exact": receipt.exact,
    }
