"""A checkpoint saver that hands everything on to another one, and can do exactly what that can.

LangGraph asks a saver's class which methods it overrides, so a wrapper has to be honest about
what it wraps. It must not know a cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)

from sidequest_langchain.errors import ConfigError

S = TypeVar("S", bound="ForwardingSaver")

_classes: dict[tuple[type, frozenset[str]], type] = {}

METHODS = (
    "get_tuple",
    "list",
    "put",
    "put_writes",
    "delete_thread",
    "delete_for_runs",
    "copy_thread",
    "prune",
)
"""What a saver may or may not do; each has a twin that begins with `a`."""


class ForwardingSaver(BaseCheckpointSaver[Any]):
    """Does what `inner` does. Attributes that it has none of are those of `inner`."""

    inner: BaseCheckpointSaver[Any]
    """The saver that keeps the checkpoints."""

    def __new__(cls: type[S], inner: BaseCheckpointSaver[Any], *args: Any, **kwargs: Any) -> S:
        """An object of a class that overrides what the class of `inner` overrides."""
        given: object = inner
        if not isinstance(given, BaseCheckpointSaver):
            found = (
                f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            )
            msg = f"a checkpoint saver was expected, found {found}; give one, as InMemorySaver()"
            raise ConfigError(msg)
        names = (name for stem in METHODS for name in (stem, f"a{stem}"))
        absent = frozenset(name for name in names if not _overrides(type(inner), name))
        made: S = super().__new__(_honest(cls, absent))
        return made

    def __init__(self, inner: BaseCheckpointSaver[Any]) -> None:
        # Not the base's own: it would set a serializer of its own on this one.
        self.inner = inner

    def around(self: S, inner: BaseCheckpointSaver[Any]) -> S:
        """The same around another saver; all that this one has is shared."""
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone.inner = inner
        return clone

    def __copy__(self: S) -> S:
        return self.around(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: looking for it would come here again
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    # -- settings ------------------------------------------------------------------------

    @property
    def serde(self) -> Any:
        """The serializer of the inner saver."""
        return self.inner.serde

    @serde.setter
    def serde(self, serde: Any) -> None:
        self.inner.serde = serde

    @property
    def config_specs(self) -> Any:
        """The inner saver's options."""
        return self.inner.config_specs

    def get_next_version(self, current: Any, channel: None) -> Any:
        """The version that the inner saver counts on to."""
        return self.inner.get_next_version(current, channel)

    def with_allowlist(self: S, extra_allowlist: Collection[tuple[str, ...]]) -> S:
        """The same around an inner saver that may read more types."""
        inner = self.inner.with_allowlist(extra_allowlist)
        return self if inner is self.inner else self.around(inner)

    # -- synchronous ---------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that `config` names."""
        return self.inner.get_tuple(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """The checkpoints that match, newest first."""
        return self.inner.list(config, filter=filter, before=before, limit=limit)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint."""
        return self.inner.put(config, checkpoint, metadata, new_versions)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task wrote."""
        more = (task_path,) if _takes_task_path(self.inner.put_writes) else ()
        self.inner.put_writes(config, writes, task_id, *more)

    def delete_thread(self, thread_id: str) -> None:
        """Delete all of a thread."""
        self.inner.delete_thread(thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete what some runs stored."""
        self.inner.delete_for_runs(run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread to another one."""
        self.inner.copy_thread(source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints of some threads."""
        self.inner.prune(thread_ids, strategy=strategy)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What was written to some channels on the way to a checkpoint."""
        return self.inner.get_delta_channel_history(config=config, channels=channels)

    # -- asynchronous --------------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that `config` names."""
        return await self.inner.aget_tuple(config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """The checkpoints that match, newest first."""
        found = self.inner.alist(config, filter=filter, before=before, limit=limit)
        async for checkpoint in found:
            yield checkpoint

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint."""
        return await self.inner.aput(config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task wrote."""
        more = (task_path,) if _takes_task_path(self.inner.aput_writes) else ()
        await self.inner.aput_writes(config, writes, task_id, *more)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete all of a thread."""
        await self.inner.adelete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete what some runs stored."""
        await self.inner.adelete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread to another one."""
        await self.inner.acopy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints of some threads."""
        await self.inner.aprune(thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What was written to some channels on the way to a checkpoint."""
        return await self.inner.aget_delta_channel_history(config=config, channels=channels)


def _overrides(cls: type, name: str) -> bool:
    return getattr(cls, name, None) is not getattr(BaseCheckpointSaver, name)


def _honest(cls: type, absent: frozenset[str]) -> Any:
    """A subclass of `cls`, one for all alike, that overrides nothing of what is `absent`."""
    if (cls, absent) not in _classes:
        kept = ("__module__", "__qualname__", "__doc__")
        body = {name: getattr(cls, name) for name in kept}
        body |= {name: getattr(BaseCheckpointSaver, name) for name in absent}
        _classes[cls, absent] = type(cls.__name__, (cls,), body)
    return _classes[cls, absent]


def _takes_task_path(put_writes: Any) -> bool:
    """Savers written before there were task paths take none."""
    return "task_path" in signature(put_writes).parameters
