"""A checkpoint saver whose checkpoints know their KV: `SideQuestSaver`.

It must not know how lineage is read, nor how a cache is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.attached import lifecycle_of, served_by
from sidequest_langchain.graph.lineage import Key, Lineage
from sidequest_langchain.graph.saver_files import ThreadFiles
from sidequest_langchain.graph.saver_forwarding import ForwardingSaver
from sidequest_langchain.graph.saver_kv import CheckpointKV, ThreadKV
from sidequest_langchain.kv.receipts import LoadReceipt, SaveReceipt

DELETED, PRUNED = "thread deleted", "checkpoint deleted"


class SideQuestSaver(ForwardingSaver):
    """Any checkpoint saver, and the KV of its threads with it.

    Checkpoints are stored by `inner`, unchanged. What this adds:

    * deleting a thread, or checkpoints of it, frees the KV that only they needed;
    * `kv_of(config)` says what is held of a checkpoint's KV;
    * with `folder`, the KV of a thread is saved when a run on it ends (of a graph that is
      attached: see `attach`), and loaded when another process first uses the thread.

    Exact: whether KV is there decides how long an answer takes, never what it is. Nothing here
    lets a graph fail: what cannot be saved or loaded is logged, and computed again.

    The asynchronous methods wait for the engine, and for files, in other threads.
    """

    def __init__(
        self,
        inner: BaseCheckpointSaver[Any],
        model: object,
        *,
        folder: str | Path | None = None,
    ) -> None:
        """Wrap a saver.

        Args:
            inner: Where checkpoints are stored. It must not be used beside this one to delete.
            model: The `SideQuestChatModel` that the graphs call, bound or not. It is not loaded.
            folder: Where the KV of threads is saved, a file for each; one folder for one model.

        Raises:
            ConfigError: `inner` is no checkpoint saver, or `model` no model of this package; or
                there is a folder, but the model releases a run's KV when the run ends.
        """
        super().__init__(inner)
        lifecycle = lifecycle_of(model)
        self._kv = ThreadKV(lifecycle)
        self._files: ThreadFiles | None = None
        if folder is not None:
            served = served_by(model)
            if served.cache_config.retain == "run":
                msg = (
                    f"folder={str(folder)!r} saves the KV of a thread when a run on it has ended, "
                    "but retain='run' has released it by then; use CacheConfig(retain='thread')"
                )
                raise ConfigError(msg)
            self._files = ThreadFiles(served, lifecycle, Path(folder))

    # -- what is held ------------------------------------------------------------------------

    def kv_of(self, config: RunnableConfig) -> CheckpointKV:
        """What is held of the KV of a checkpoint. Reads the checkpoints of its thread.

        Args:
            config: Of the checkpoint, as from `graph.get_state_history(...)`; without a
                `checkpoint_id`, of the thread's latest.

        Raises:
            ConfigError: It names no thread.
        """
        config = _named(config)
        found = self.inner.get_tuple(config)
        return self._held(config, found, Lineage(self.inner.list(_on(_thread_of(config)))))

    async def akv_of(self, config: RunnableConfig) -> CheckpointKV:
        """As `kv_of`."""
        config = _named(config)
        found = await self.inner.aget_tuple(config)
        lineage = await self._alineage(_thread_of(config))
        return await asyncio.to_thread(self._held, config, found, lineage)

    # -- files -------------------------------------------------------------------------------

    def save_thread(self, thread_id: str) -> SaveReceipt:
        """Save the KV of a thread now; it replaces the thread's file.

        Raises:
            ConfigError: This saver has no folder.
            OSError: It cannot be written; an older file stays.
            CacheError: The model was changed since it was loaded.
        """
        return self._saving.save(str(thread_id)).result()

    async def asave_thread(self, thread_id: str) -> SaveReceipt:
        """As `save_thread`."""
        return await asyncio.wrap_future(self._saving.save(str(thread_id)))

    def load_thread(self, thread_id: str) -> LoadReceipt:
        """Load what was saved of a thread; what is resident already is shared.

        Raises:
            ConfigError: This saver has no folder.
            SavedThreadError: There is no file, or it is damaged or another model's.
            BudgetExceeded: There is room for nothing of it.
        """
        return self._saving.load(str(thread_id)).result()

    async def aload_thread(self, thread_id: str) -> LoadReceipt:
        """As `load_thread`."""
        return await asyncio.wrap_future(self._saving.load(str(thread_id)))

    def flush(self) -> None:
        """Wait for what is being saved."""
        if self._files is not None:
            self._files.flush().result()

    # -- synchronous ---------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that `config` names; loads the thread's KV at its first use."""
        loading = self._first_use(config)
        if loading is not None:
            loading.result()
        return self.inner.get_tuple(config)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint."""
        stored = self.inner.put(config, checkpoint, metadata, new_versions)
        self._note(config)
        return stored

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread's checkpoints, its KV and its file."""
        self.inner.delete_thread(thread_id)
        self._end(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of some runs, and the KV that only they needed."""
        threads = {
            found.config["configurable"]["thread_id"]
            for run_id in run_ids
            for found in self.inner.list(None, filter={"run_id": run_id})
        }
        before = self._lineages(threads)
        self.inner.delete_for_runs(run_ids)
        self._settle(before, self._lineages(threads))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints of some threads, and the KV that only they needed."""
        before = self._lineages(thread_ids)
        self.inner.prune(thread_ids, strategy=strategy)
        self._settle(before, self._lineages(thread_ids))

    # -- asynchronous --------------------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that `config` names; loads the thread's KV at its first use."""
        loading = self._first_use(config)
        if loading is not None:
            # Shielded: who is cancelled while waiting does not cancel it for the others.
            await asyncio.shield(asyncio.wrap_future(loading))
        return await self.inner.aget_tuple(config)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint."""
        stored = await self.inner.aput(config, checkpoint, metadata, new_versions)
        self._note(config)
        return stored

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete a thread's checkpoints, its KV and its file."""
        await self.inner.adelete_thread(thread_id)
        await asyncio.to_thread(self._end, str(thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of some runs, and the KV that only they needed."""
        threads: set[Any] = set()
        for run_id in run_ids:
            async for found in self.inner.alist(None, filter={"run_id": run_id}):
                threads.add(found.config["configurable"]["thread_id"])
        before = await self._alineages(threads)
        await self.inner.adelete_for_runs(run_ids)
        await asyncio.to_thread(self._settle, before, await self._alineages(threads))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints of some threads, and the KV that only they needed."""
        before = await self._alineages(thread_ids)
        await self.inner.aprune(thread_ids, strategy=strategy)
        await asyncio.to_thread(self._settle, before, await self._alineages(thread_ids))

    # -- inside --------------------------------------------------------------------------------

    @property
    def _saving(self) -> ThreadFiles:
        if self._files is None:
            msg = (
                "this saver has no folder to save KV in; make it with "
                "SideQuestSaver(inner, model, folder=...)"
            )
            raise ConfigError(msg)
        return self._files

    def _first_use(self, config: RunnableConfig) -> Future[Any] | None:
        return None if self._files is None else self._files.first_use(_thread_of(config))

    def _note(self, config: RunnableConfig) -> None:
        if self._files is not None:
            self._files.note(_thread_of(config))

    def _end(self, thread_id: str) -> None:
        if self._files is not None:  # first: what is just being loaded is there then, and goes
            self._files.remove(thread_id).result()
        self._kv.end(thread_id, DELETED)

    def _settle(self, before: dict[Any, Lineage], after: dict[Any, Lineage]) -> None:
        for thread_id, lineage in before.items():
            living = after[thread_id].keys
            if living:
                self._kv.settle(str(thread_id), lineage, living, PRUNED)
            elif lineage.keys:
                self._end(str(thread_id))

    def _held(
        self, config: RunnableConfig, found: CheckpointTuple | None, lineage: Lineage
    ) -> CheckpointKV:
        thread_id = _thread_of(config)
        key = _key_of(config if found is None else found.config)
        is_saved = self._files is not None and self._files.has(thread_id)
        return self._kv.held(thread_id, lineage, key, is_saved=is_saved)

    def _lineages(self, thread_ids: Iterable[Any]) -> dict[Any, Lineage]:
        return {t: Lineage(self.inner.list(_on(t))) for t in thread_ids}

    async def _alineages(self, thread_ids: Iterable[Any]) -> dict[Any, Lineage]:
        return {t: await self._alineage(t) for t in thread_ids}

    async def _alineage(self, thread_id: Any) -> Lineage:
        return Lineage([found async for found in self.inner.alist(_on(thread_id))])


def _on(thread_id: Any) -> RunnableConfig:
    """All checkpoints of a thread, in whichever namespace."""
    return {"configurable": {"thread_id": thread_id}}


def _named(config: Any) -> RunnableConfig:
    """A checkpoint's config with the thread's id as text, as LangGraph gives it to savers."""
    place = config.get("configurable") if isinstance(config, dict) else None
    if not isinstance(place, dict) or place.get("thread_id") is None:
        msg = (
            f"a checkpoint is named by a config with a thread_id, found {config!r}; give "
            "{'configurable': {'thread_id': ...}}"
        )
        raise ConfigError(msg)
    return {"configurable": {**place, "thread_id": str(place["thread_id"])}}


def _thread_of(config: RunnableConfig) -> str:
    return str(config["configurable"]["thread_id"])


def _key_of(config: RunnableConfig) -> Key:
    place = config["configurable"]
    return place.get("checkpoint_ns", ""), place.get("checkpoint_id") or ""
