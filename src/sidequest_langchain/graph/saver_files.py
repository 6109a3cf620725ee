"""The KV of threads in a folder: saved when their runs end, loaded when they are first used.

A file only ever saves time: what cannot be read, or is another model's, is computed again. It
must not know a checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from sidequest_langchain.engine.saving import delete_saved, saved_file
from sidequest_langchain.graph.lifecycle import Lifecycle
from sidequest_langchain.kv.receipts import LoadReceipt, SaveReceipt

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_THREADS = 10_000
"""Threads of which is remembered what was done with them; the oldest are forgotten."""


class ThreadFiles:
    """One file for each thread, in one folder, for one model.

    Everything is done by one thread of its own, in the order that it was asked for: a save never
    meets a load or a removal. Thread-safe.
    """

    def __init__(self, model: Any, lifecycle: Lifecycle, folder: Path) -> None:
        """Use a folder; it is made when something is saved.

        Args:
            model: The `SideQuestChatModel` whose cache it is.
            lifecycle: Of the same model.
            folder: Where the files lie.
        """
        self.folder = folder
        self._model = model
        self._lifecycle = lifecycle
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sidequest-save")
        self._lock = threading.Lock()
        self._unsaved: dict[str, None] = {}
        """Threads with checkpoints that are newer than their file."""
        self._met: dict[str, Future[Any] | None] = {}
        """Threads that were used in this process, with their loading if there was a file."""
        lifecycle.watch(self)

    # -- neither waits nor raises ----------------------------------------------------------

    def note(self, thread_id: str) -> None:
        """A thread has a new checkpoint."""
        with self._lock:
            _remember(self._unsaved, thread_id, None)

    def run_ended(self) -> None:
        """Save the threads that no run is on any more."""
        with self._lock:
            unsaved = tuple(self._unsaved)
        for thread_id in unsaved:
            if self._lifecycle.is_busy(thread_id):
                continue
            with self._lock:
                if thread_id not in self._unsaved:  # another run's end was quicker
                    continue
                del self._unsaved[thread_id]
            with suppress(RuntimeError):  # the interpreter is ending: nothing can be begun
                self._worker.submit(self._save_quietly, thread_id)

    def first_use(self, thread_id: str) -> Future[Any] | None:
        """Load a thread that this process has not used before; `None` if there is no file."""
        with self._lock:
            if thread_id in self._met:
                return self._met[thread_id]
            loading = None
            if self.has(thread_id):
                loading = self._worker.submit(self._quietly, self._load, thread_id, "loaded")
            _remember(self._met, thread_id, loading)
            return loading

    # -- to be waited for ------------------------------------------------------------------

    def save(self, thread_id: str) -> Future[SaveReceipt]:
        """Save a thread now. The future raises what goes wrong."""
        with self._lock:
            self._unsaved.pop(thread_id, None)
        return self._worker.submit(self._save, thread_id)

    def load(self, thread_id: str) -> Future[LoadReceipt]:
        """Load a thread now. The future raises what goes wrong."""
        return self._worker.submit(self._load, thread_id)

    def remove(self, thread_id: str) -> Future[None]:
        """Remove the file of a thread, if there is one."""
        with self._lock:
            self._unsaved.pop(thread_id, None)
            self._met.pop(thread_id, None)
        return self._worker.submit(self._remove, thread_id)

    def flush(self) -> Future[None]:
        """Done when all that was asked for until now is done."""
        return self._worker.submit(lambda: None)

    def has(self, thread_id: str) -> bool:
        """Whether a thread has a file."""
        return saved_file(self.folder, thread_id).exists()

    # -- in the worker's thread --------------------------------------------------------------

    def _save(self, thread_id: str) -> SaveReceipt:
        receipt: SaveReceipt = self._model.kv.save(thread_id, self.folder)
        return receipt

    def _load(self, thread_id: str) -> LoadReceipt:
        receipt: LoadReceipt = self._model.kv.load(self.folder, thread_id)
        return receipt

    def _remove(self, thread_id: str) -> None:
        delete_saved(self.folder, thread_id)

    def _save_quietly(self, thread_id: str) -> None:
        if self._lifecycle.caches():  # else no model was called, and none is loaded for this
            self._quietly(self._save, thread_id, "saved")

    def _quietly(
        self, act: Callable[[str], SaveReceipt | LoadReceipt], thread_id: str, done: str
    ) -> None:
        """Do something that nobody waits for: a graph must not fail by it."""
        try:
            receipt = act(thread_id)
        except Exception as error:
            logger.warning(
                "the KV of thread %r was not %s, and will be computed again: %s: %s",
                thread_id,
                done,
                type(error).__name__,
                error,
            )
        else:
            logger.info(
                "%s the KV of thread %r: %d tokens, %d bytes",
                done,
                thread_id,
                receipt.n_tokens,
                receipt.n_bytes,
            )


def _remember(known: dict[str, T], thread_id: str, value: T) -> None:
    known.pop(thread_id, None)
    known[thread_id] = value
    if len(known) > MAX_THREADS:
        del known[next(iter(known))]
