"""Threads are written to files, to be loaded in another process; it must not know messages.

The engine's thread is asked only what there is, between two steps: the rows are written by
whoever calls, from borrowed storages, whose rows stay as they are until then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.lasting import LastingFingerprint
from sidequest_langchain.engine.restoring import ACTS, EXACT_ROWS, MANAGED_ROWS, ThreadLoader
from sidequest_langchain.engine.tokenizer import ChatTokenizer, Template
from sidequest_langchain.errors import CacheError, ConfigError, EngineClosedError
from sidequest_langchain.kv.receipts import LoadReceipt, SaveReceipt
from sidequest_langchain.kv.saved_thread import Snapshot, items_of, small, take
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.thread_file import Item, file_of, remove_unfinished, write_thread
from sidequest_langchain.labels import PathSelector

_LOOK_S = 0.05
"""Seconds between two looks at what is held only to be written."""


class ThreadFiles:
    """Saves, loads and removes threads of one engine. All methods are thread-safe."""

    def __init__(self, core: EngineCore, tokenizer: ChatTokenizer, config: CacheConfig) -> None:
        self._core = core
        self._made_of = LastingFingerprint(core.adapter, tokenizer)
        self._loader = ThreadLoader(core, config, self._made_of)

    def save(
        self, thread_id: str, folder: str | Path, *, template: Template | None = None
    ) -> SaveReceipt:
        """Write all paths of a thread that do not run to one file of a folder.

        Exact: rows are written as they are, packed ones packed, with copies of those in slower
        tiers. What paths share is written once. An older file of the thread is replaced once the
        new one is whole.

        Args:
            thread_id: Whose paths; the file is named by a hash of it.
            folder: Made (`0700`) if it is not there.
            template: The chat template in use, if it is not the tokenizer's own.

        Raises:
            OSError: The file could not be written; an older one stays.
            CacheError: The model was changed since the engine began, or its weights are offloaded.
        """
        begun = time.perf_counter()
        path = saved_file(folder, thread_id)
        about = self._about(thread_id, template)
        core, archive = self._core, self._core.tree.archive
        snapshot, acts = core.call(lambda: self._take(thread_id)).result()
        held = _Held(snapshot)
        n_tokens, n_segments = snapshot.n_tokens, len(snapshot.segments)
        replies = core.replies.of(thread_id, snapshot.call_ids)
        n_bytes = 0
        try:
            if n_segments:
                items, facts = items_of(snapshot, archive)
                ids = [small(f"reply.{n}", r.token_ids) for n, r in enumerate(replies.values())]
                facts["thread"] = thread_id
                facts["replies"] = [[key, r.text, r.thread_id] for key, r in replies.items()]
                about[ACTS] = acts
                n_bytes = write_thread(path, held.watch([*items, *ids]), facts, about)
        finally:
            with contextlib.suppress(EngineClosedError):
                core.call(lambda: self._let_go(snapshot, held.n_most)).result()
        return SaveReceipt(
            thread_id=thread_id,
            file=path if n_segments else None,
            n_segments=n_segments,
            n_paths=len(snapshot.paths),
            n_tokens=n_tokens,
            n_replies=len(replies) if n_segments else 0,
            n_bytes=n_bytes,
            n_held_bytes=held.n_most,
            seconds=time.perf_counter() - begun,
        )

    def load(
        self, source: str | Path, thread_id: str | None, *, template: Template | None = None
    ) -> LoadReceipt:
        """Take in what `save` wrote, as far as the budget has room; see `ThreadLoader.load`."""
        path = Path(source)
        if path.is_dir() or (thread_id is not None and not path.suffix):
            if thread_id is None:
                msg = f"{path} is a folder of saved threads: say which one, with thread_id=..."
                raise ConfigError(msg)
            path = saved_file(path, thread_id)
        return self._loader.load(path, thread_id, template)

    def _about(self, thread_id: str, template: Template | None) -> dict[str, str]:
        if self._made_of.has_changed:
            msg = (
                f"thread {thread_id!r} was not saved: the model's weights, configuration or "
                "adapter were changed since this engine began, so that its rows may be of either "
                "model; make a new chat model"
            )
            raise CacheError(msg)
        return self._made_of.fields(template)

    # -- in the engine's thread ------------------------------------------------------------

    def _take(self, thread_id: str) -> tuple[Snapshot, str]:
        tree, manager = self._core.tree, self._core.manager
        paths = tree.select(PathSelector(thread_id=thread_id))
        fine = [p for p in paths if not (p.is_running or p.is_released) and p.tip.token_ids]
        acts = EXACT_ROWS
        is_idle: Callable[[Segment], bool] = lambda segment: False  # noqa: E731
        if manager is not None:
            monitor = manager.monitor
            is_idle = lambda segment: monitor.notes_of(segment).is_archived_idle  # noqa: E731
            if self._loader.has_loaded_managed or manager.log.summary().n_acts:
                acts = MANAGED_ROWS
        return take(fine, tree.archive, is_idle), acts

    def _let_go(self, snapshot: Snapshot, n_held: int) -> None:
        tree = self._core.tree
        snapshot.let_go(tree.archive)
        tree.peak_bytes = max(tree.peak_bytes, tree.n_bytes + n_held)


class _Held:
    """How much a snapshot keeps that the tree has let go of, looked at as it is written."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._looked = 0.0
        self.n_most = 0

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items."""
        for item in items:
            yield replace(item, load=self._looking(item.load))

    def _looking(self, load: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def looking() -> Tensor:
            now = time.monotonic()
            if now - self._looked > _LOOK_S:
                self._looked = now
                self.n_most = max(self.n_most, self._snapshot.n_orphaned_bytes())
            return load()

        return looking


def saved_file(folder: str | Path, thread_id: object) -> Path:
    """Where a thread is, or would be, saved.

    Raises:
        ConfigError: The thread's id is no string.
    """
    if not isinstance(thread_id, str):
        msg = f"a thread is named by a string, found {type(thread_id).__name__}"
        raise ConfigError(msg)
    return file_of(Path(folder), thread_id)


def delete_saved(folder: str | Path, thread_id: str) -> bool:
    """Remove a thread's file, and what is left of unfinished ones.

    Returns:
        Whether there was one.

    Raises:
        OSError: It is there and cannot be removed.
    """
    path = saved_file(folder, thread_id)
    remove_unfinished(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
