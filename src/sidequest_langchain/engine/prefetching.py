"""Rows are read from slower tiers before they are needed; it must not know who needs them.

Copies on disk are read by a thread of its own, so that nobody's step waits for the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.errors import ArchiveError, EngineClosedError
from sidequest_langchain.kv.archive_file import Contents
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.labels import PathSelector
from sidequest_langchain.policy.foreseeing import Foreseen
from sidequest_langchain.policy.receipts import ActReceipt

Receipts = tuple[ActReceipt, ...]


class Prefetcher:
    """Brings back what idles in slower tiers of one engine. Thread-safe; does not wait."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._reader: ThreadPoolExecutor | None = None

    def paths(self, selector: PathSelector) -> Future[Receipts]:
        """Paths are about to go on.

        Raises:
            EngineClosedError: The engine was closed.
        """
        tree = self._core.tree

        def segments() -> list[Segment]:
            return [s for path in tree.select(selector) for s in path.tip.path()]

        return self._post(segments)

    def prompt(self, scope: str, ids: Sequence[int]) -> None:
        """A path with this prompt waits to begin; asked in the engine's thread."""

        def segments() -> list[Segment]:
            found, n = self._core.tree.match(scope, ids)
            return found.path() if found is not None and n else []

        self._post(segments)

    def _post(self, segments: Callable[[], list[Segment]]) -> Future[Receipts]:
        outcome: Future[Receipts] = Future()
        manager, archive = self._core.manager, self._core.tree.archive
        if manager is None or archive is None or not archive.n_entries:
            outcome.set_result(())
            return outcome

        def begin() -> None:
            try:
                foreseen = manager.foresight.plan(segments())
                if foreseen is None:
                    outcome.set_result(())
                elif archive.n_disk_bytes:
                    self._read_later(foreseen, outcome)
                else:
                    outcome.set_result(manager.foresight.finish(foreseen))
            except BaseException as error:
                outcome.set_exception(error)

        self._core.call(begin)
        return outcome

    def _read_later(self, foreseen: Foreseen, outcome: Future[Receipts]) -> None:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="sidequest-prefetch")
        self._reader.submit(self._read, foreseen, outcome)

    def _read(self, foreseen: Foreseen, outcome: Future[Receipts]) -> None:
        manager, archive = self._core.manager, self._core.tree.archive
        assert manager is not None
        found: dict[str, Contents] = {}
        try:
            for ticket in foreseen.tickets:
                with contextlib.suppress(ArchiveError, MemoryError):
                    if archive is not None:
                        found[ticket.key] = archive.get(ticket)
        finally:

            def finish() -> None:
                try:
                    outcome.set_result(manager.foresight.finish(foreseen, found))
                except BaseException as error:
                    outcome.set_exception(error)

            try:
                self._core.call(finish)
            except EngineClosedError as error:
                outcome.set_exception(error)
