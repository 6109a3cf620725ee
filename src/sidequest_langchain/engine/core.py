"""The engine's thread: it alone runs the model and changes the tree.

Requests, releases and pins reach it as messages and take effect at a step boundary. It must
not know LangChain, nor the `Engine` that users hold: it goes when that one is gone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.counters import Counters
from sidequest_langchain.engine.managing import manager_for
from sidequest_langchain.engine.pacing import scheduler_for
from sidequest_langchain.engine.passes import Passes, let_go
from sidequest_langchain.engine.replies import Reply, ReplyLog
from sidequest_langchain.engine.request import Failed, Finished, FinishReason
from sidequest_langchain.engine.scheduler import Share
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.engine.workers import give_workers_back
from sidequest_langchain.errors import (
    BudgetExceeded,
    EngineClosedError,
    RequestCancelledError,
    RequestError,
)
from sidequest_langchain.kv.receipts import ReleaseReceipt
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.labels import PathSelector

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineCore:
    """Model, tree and scheduler, with the loop that one thread runs."""

    def __init__(
        self,
        adapter: ModelAdapter,
        config: CacheConfig,
        tokenizer: ChatTokenizer | None = None,
        name: str = "",
    ) -> None:
        self.adapter = adapter
        self.tree = SegmentTree(adapter.layout)
        self.replies = ReplyLog()
        self.counters = Counters()
        self.manager = manager_for(adapter, self.tree, config, tokenizer, name=name)
        self._passes = Passes(adapter, self.tree, config, self.manager)
        prepare = None if self.manager is None else self.manager.prepare
        self._scheduler = scheduler_for(adapter, self.tree, config, prepare)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._gate = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- called from any thread ----------------------------------------------------------

    def start(self) -> None:
        """Start the thread; it ends with `stop`."""
        self._thread = threading.Thread(target=self.run, name="sidequest-engine", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            EngineClosedError: The engine was closed.
            RequestError: Asked from the engine's own thread, which cannot wait for itself.
        """
        if threading.current_thread() is self._thread:
            msg = (
                "a model call from an observer or a sink would wait for its own thread for ever; "
                "hand the work to another thread"
            )
            raise RequestError(msg)
        self._post(lambda: self._scheduler.add(sequence))

    def release(
        self, selector: PathSelector, *, reason: str, name: str | None = None
    ) -> Future[ReleaseReceipt]:
        """Ask for a release: of what is resident now, of what runs and of what waits to run.

        Raises:
            EngineClosedError: The engine was closed.
        """

        def release() -> ReleaseReceipt:
            waiting = self._scheduler.waiting_for(selector)
            for sequence in waiting:
                sequence.is_released = True
            return self.tree.release(selector, reason=reason, name=name, n_waiting=len(waiting))

        return self.call(release)

    def wake(self) -> None:
        """Make the loop look at cancellations soon."""
        self._inbox.put(lambda: None)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread at the next step boundary.

        Raises:
            EngineClosedError: The engine was closed.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if threading.current_thread() is self._thread:
            run()
        else:
            self._post(run)
        return future

    def stop(self) -> None:
        """End the loop; requests still running fail with `EngineClosedError`. Idempotent."""
        with self._gate:
            self._is_closed.set()
        self.wake()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    def _post(self, message: Callable[[], None]) -> None:
        with self._gate:  # so that the last reading of the inbox misses nothing
            if self._is_closed.is_set():
                msg = "the engine is closed; make a new chat model"
                raise EngineClosedError(msg)
            if self._thread is not None and not self._thread.is_alive():
                msg = (
                    "the engine's thread does not run in this process, which was forked from the "
                    "one that loaded the model; load the model in the child, or use spawn"
                )
                raise EngineClosedError(msg)
            self._inbox.put(message)

    # -- the loop ------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until closed; whatever ends the loop, nobody is left waiting."""
        try:
            self._serve()
        finally:
            with self._gate:
                self._is_closed.set()
            self._end()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            self._read_inbox(is_idle=self._scheduler.is_idle)
            try:
                self._step()
            except BaseException as error:
                logger.exception("the engine's step failed; its requests fail with it")
                self._fail(list(self._scheduler.running), error)

    def _end(self) -> None:
        self._read_inbox(is_idle=False)
        closed = EngineClosedError("the engine was closed while the request ran")
        self._fail([*self._scheduler.running, *self._scheduler.waiting], closed)
        # The engine object may outlive its end: its memory must not.
        for segment in list(self.tree.segments()):
            segment.free()
        if self.manager is not None:
            self.manager.close()
        self.adapter.close()

    def _read_inbox(self, *, is_idle: bool) -> None:
        if is_idle:
            if self._inbox.empty():
                give_workers_back()  # the cores are another engine's, or the caller's, now
            self._inbox.get()()
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            message()

    def _step(self) -> None:
        scheduler = self._scheduler
        for sequence in [s for s in (*scheduler.running, *scheduler.waiting) if s.is_cancelled]:
            self._fail([sequence], RequestCancelledError("the request was cancelled"))
        for sequence, error in scheduler.admit():
            self._fail([sequence], error)
        if shares := scheduler.plan():
            self._run(shares)

    def _run(self, shares: list[Share]) -> None:
        """Run one forward pass for `shares`; a failing one takes down nobody but itself."""
        found = self._passes.attempt(shares)
        if isinstance(found, torch.OutOfMemoryError) and self.tree.sweep(lambda: True):
            logger.warning("out of memory: every idle segment was released, and the step re-run")
            found = self._passes.attempt(shares)
        if isinstance(found, BudgetExceeded) and self._scheduler.hold_back():
            return  # the last to come waits again: the budget does not hold all who run
        if not isinstance(found, BaseException):
            self._take(shares, found)
        elif len(shares) == 1:
            self._fail([shares[0].sequence], found)
        else:
            logger.debug("a step of %d requests failed; each runs alone", len(shares))
            for share in shares:
                if share.sequence.path is not None:  # else it waits again by now
                    self._run([share])

    def _take(self, shares: list[Share], logits: Tensor) -> None:
        """Count what the pass wrote, sample, and finish what is over."""
        self.counters.n_steps += 1
        best = logits.argmax(-1).tolist() if len(logits) else []
        sampled = [(share, share.n_wanted) for share in shares if share.is_last]
        for share in shares:
            if share.is_stored:
                self._extend(share.sequence, share.tokens[: len(share.tokens) - share.n_guesses])
        # Nothing ends before all rows are counted: it may cut a running sibling's storage to those.
        outcomes: list[FinishReason | BaseException | None] = []
        at = 0
        for share, n_wanted in sampled:
            part = slice(at, at := at + n_wanted)
            try:
                outcomes.append(self._sample(share, logits[part], best[part]))
            except BaseException as error:
                outcomes.append(error)
        for (share, _), outcome in zip(sampled, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._fail([share.sequence], outcome)
            elif outcome is not None:
                try:
                    self._finish(share.sequence, outcome)
                except BaseException as error:
                    self._fail([share.sequence], error)
        self._passes.ended(shares)

    def _extend(self, sequence: Sequence, tokens: list[int]) -> None:
        """Count rows that the pass has written."""
        assert sequence.path is not None
        n = sequence.n_resident
        kinds = None if self.manager is None else sequence.kinds_of(n, n + len(tokens))
        self.tree.extend(sequence.path, tokens, kinds)
        sequence.n_resident += len(tokens)

    def _sample(self, share: Share, logits: Tensor, best: list[int]) -> FinishReason | None:
        """Choose the next token, and the ones after it while the guesses say the same."""
        sequence, guesses = share.sequence, share.guesses
        reason: FinishReason | None = None
        n_right = 0
        for place, of_best in enumerate(best):
            token_id = of_best if sequence.is_greedy else sequence.choose(logits[place], of_best)
            reason = sequence.take(token_id, logits[place] if sequence.wants_logits else None)
            if reason is not None or place == len(guesses) or guesses[place] != token_id:
                break
            self._extend(sequence, [token_id])
            n_right += 1
        self._passes.heard(share, logits[: n_right + 1])
        self.counters.count_guesses(len(guesses), n_right)
        sequence.learn(len(guesses), n_right)
        return reason

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        path = sequence.path
        assert path is not None
        n_kept = sequence.n_prompt + len(sequence.kept_ids())
        if n_kept < sequence.n_resident:
            # A token that reaches past a stop string is not part of the reply.
            self.tree.crop(path, max(0, n_kept - path.tip.start))
        self.tree.commit(path)
        self._scheduler.drop(sequence)
        self._passes.keep_budget()  # a request may exceed it while it runs, and no longer
        result = sequence.result(reason, path.tip.segment_id or None)
        self.counters.count(result)
        label = sequence.request.label
        reply = Reply(text=result.text, token_ids=result.kept_ids, thread_id=label.thread_id)
        self.replies.add(label.call_id, reply)
        sequence.tell(Finished(result=result))

    def _fail(self, sequences: list[Sequence], error: BaseException) -> None:
        """Roll sequences back and hand the error to their callers."""
        let_go(error)
        for sequence in sequences:
            try:
                self._scheduler.drop(sequence)
            finally:
                sequence.tell(Failed(error=error))
