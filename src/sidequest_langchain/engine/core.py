"""The engine's thread: it alone runs the model and changes the tree.

Requests, releases and pins reach it as messages and take effect at a step boundary. It must
not know LangChain, nor the `Engine` that users hold: it goes when that one is gone.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.counters import Counters
from sidequest_langchain.engine.replies import Reply, ReplyLog
from sidequest_langchain.engine.request import Failed, Finished, FinishReason
from sidequest_langchain.engine.scheduler import Scheduler, Share
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.errors import EngineClosedError, RequestCancelledError
from sidequest_langchain.kv.step_plan import Row
from sidequest_langchain.kv.tree import SegmentTree

logger = logging.getLogger(__name__)
T = TypeVar("T")

PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}
"""Prompt tokens fed in one step, by device."""


class EngineCore:
    """Model, tree and scheduler, with the loop that one thread runs."""

    def __init__(self, adapter: ModelAdapter, config: CacheConfig) -> None:
        self.adapter = adapter
        self.tree = SegmentTree(adapter.layout)
        self.replies = ReplyLog()
        self.counters = Counters()
        self._config = config
        chunk = config.prefill_chunk or PREFILL_CHUNK.get(adapter.device.type, 512)
        self._scheduler = Scheduler(self.tree, config, prefill_chunk=chunk)
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
        """
        self._post(lambda: self._scheduler.waiting.append(sequence))

    def wake(self) -> None:
        """Make the loop look at cancellations soon, even if it is idle."""
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
        scheduler = self._scheduler
        while not self._is_closed.is_set():
            self._read_inbox(is_idle=not (scheduler.running or scheduler.waiting))
            try:
                self._step()
            except BaseException as error:
                logger.exception("the engine's step failed; its requests fail with it")
                self._fail(list(scheduler.running), error)

    def _end(self) -> None:
        scheduler = self._scheduler
        self._read_inbox(is_idle=False)
        closed = EngineClosedError("the engine was closed while the request ran")
        self._fail([*scheduler.running, *scheduler.waiting], closed)
        # The engine object may outlive its end: its memory must not.
        for segment in list(self.tree.segments()):
            segment.free()
        self.adapter.close()

    def _read_inbox(self, *, is_idle: bool) -> None:
        if is_idle:
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
        shares = scheduler.plan()
        if shares:
            self._run(shares)

    def _run(self, shares: list[Share]) -> None:
        """Run one forward pass for `shares`; a failing one takes down nobody but itself."""
        found = self._attempt(shares)
        if isinstance(found, torch.OutOfMemoryError) and self.tree.sweep(lambda: True):
            logger.warning("out of memory: every idle segment was released, and the step re-run")
            found = self._attempt(shares)
        if not isinstance(found, BaseException):
            self._take(shares, found)
        elif len(shares) == 1:
            self._fail([shares[0].sequence], found)
        else:
            # Whose fault it is shows when each runs alone; nothing was counted yet.
            logger.debug("a step of %d requests failed; each runs alone", len(shares))
            for share in shares:
                self._run([share])

    def _attempt(self, shares: list[Share]) -> Tensor | BaseException:
        """The logits of a pass, or what it failed with.

        The error is returned, not handled where it is caught: as long as it is being handled
        it keeps the activations of the failed pass, which a second try may need the room of.
        """
        try:
            return self._forward(shares)
        except BaseException as error:
            _let_go(error)
            return error

    def _forward(self, shares: list[Share]) -> Tensor:
        self._make_room(shares)
        rows, ids = [], []
        for share in shares:
            sequence = share.sequence
            assert sequence.path is not None
            if share.is_stored:
                self.tree.reserve(sequence.path, len(share.tokens))
            position = sequence.n_resident if share.is_stored else sequence.n_resident - 1
            rows.append(
                Row(
                    tip=sequence.path.tip,
                    n_new=len(share.tokens),
                    position=position,
                    is_stored=share.is_stored,
                )
            )
            ids.extend(share.tokens)
        wanted = [i for i, share in enumerate(shares) if share.is_last]
        return self.adapter.forward(rows, ids, wanted)

    def _make_room(self, shares: list[Share]) -> None:
        """Release what is idle until the rows to come fit into the budget."""
        tree = self.tree
        n_rows = n_tokens = 0
        for share in (s for s in shares if s.is_stored):
            assert share.sequence.path is not None
            tip = share.sequence.path.tip
            n_rows += tip.capacity_for(len(share.tokens)) - tip.capacity
            n_tokens += len(share.tokens)
        self._keep_budget(n_bytes=n_rows * tree.bytes_per_token, n_tokens=n_tokens)

    def _keep_budget(self, *, n_bytes: int = 0, n_tokens: int = 0) -> None:
        """Release what is idle until so much more fits into the budget."""
        config, tree = self._config, self.tree
        if config.budget_bytes is None and config.budget_tokens is None:
            return
        most_bytes = config.budget_bytes or float("inf")
        most_tokens = config.budget_tokens or float("inf")
        tree.sweep(
            lambda: tree.n_bytes + n_bytes > most_bytes or tree.n_tokens + n_tokens > most_tokens
        )

    def _take(self, shares: list[Share], logits: Tensor) -> None:
        """Count what the pass wrote, sample, and finish what is over."""
        self.counters.n_steps += 1
        sampled = [share for share in shares if share.is_last]
        best = logits.argmax(-1).tolist() if sampled else []
        for share in shares:
            sequence = share.sequence
            if share.is_stored:
                assert sequence.path is not None
                self.tree.extend(sequence.path, share.tokens)
                sequence.n_resident += len(share.tokens)
        for i, share in enumerate(sampled):
            try:
                self._sample(share.sequence, logits[i], best[i])
            except BaseException as error:
                self._fail([share.sequence], error)

    def _sample(self, sequence: Sequence, logits: Tensor, best: int) -> None:
        token_id = best if sequence.is_greedy else sequence.choose(logits)
        reason = sequence.take(token_id, logits if sequence.wants_logits else None)
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        path = sequence.path
        assert path is not None
        n_kept = sequence.n_prompt + len(sequence.kept_ids())
        if n_kept < sequence.n_resident:
            # A token that reaches past a stop string is not part of the reply.
            self.tree.crop(path, max(0, n_kept - path.tip.start))
        self._scheduler.running.remove(sequence)
        self.tree.commit(path)
        self._keep_budget()  # a request may exceed it while it runs, and no longer
        result = sequence.result(reason, path.tip.segment_id or None)
        self.counters.count(result)
        self.replies.add(
            sequence.request.label.call_id, Reply(text=result.text, token_ids=result.kept_ids)
        )
        sequence.tell(Finished(result=result))

    def _fail(self, sequences: list[Sequence], error: BaseException) -> None:
        """Roll sequences back and hand the error to their callers."""
        _let_go(error)
        for sequence in sequences:
            if sequence in self._scheduler.running:
                self._scheduler.running.remove(sequence)
            if sequence in self._scheduler.waiting:
                self._scheduler.waiting.remove(sequence)
            try:
                if sequence.path is not None:
                    self.tree.discard(sequence.path)
            finally:
                sequence.tell(Failed(error=error))


def _let_go(error: BaseException) -> None:
    """Empty the frames that an error remembers: they hold activations.

    Those of the errors it was raised from too; whoever keeps the error must not keep tensors.
    """
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        at = pending.pop()
        if at is not None and at not in chain:
            chain.append(at)
            traceback.clear_frames(at.__traceback__)
            pending += [at.__cause__, at.__context__]
