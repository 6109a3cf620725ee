"""Checkpoint savers to wrap, a conversation to wrap them for, and what it leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.graph import attach
from sidequest_langchain.kv.receipts import SegmentInfo
from tests.graph.fakes import BYTES, FakeCell, FakeKV, FakeModel


class ListedKV(FakeKV):
    """A cache without tensors that can be looked at: a segment for each path."""

    def segments(self, thread_id: str | None = None) -> list[SegmentInfo]:
        return [
            SegmentInfo(
                segment_id=serial,
                parent_id=None,
                scope=f'["thread", null, "{label.thread_id}"]',
                start=0,
                n_tokens=1,
                n_bytes=BYTES,
                n_readers=0,
                labels=(label,),
            )
            for serial, label in self.paths.items()
            if thread_id in (None, label.thread_id)
        ]


def listed_model(**settings: Any) -> FakeModel:
    """A fake model whose cache can be looked at, with these settings of it."""
    return FakeModel(cache_config=CacheConfig(**settings), engines=FakeCell(ListedKV()))


class FullSaver(InMemorySaver):
    """An in-memory saver with the methods that a saver may leave out."""

    def _drop(self, thread_id: str, checkpoint_ns: str, checkpoint_id: str) -> None:
        self.storage[thread_id][checkpoint_ns].pop(checkpoint_id, None)
        self.writes.pop((thread_id, checkpoint_ns, checkpoint_id), None)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        for found in list(self.list(None)):
            if found.metadata.get("run_id") in run_ids:
                place = found.config["configurable"]
                self._drop(place["thread_id"], place["checkpoint_ns"], found.checkpoint["id"])

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        for namespace, stored in self.storage[source_thread_id].items():
            self.storage[target_thread_id][namespace].update(stored)
        for thread_id, *rest in list(self.writes):
            if thread_id == source_thread_id:
                copied = dict(self.writes[(thread_id, *rest)])
                self.writes[(target_thread_id, *rest)] = copied
        for thread_id, *rest in list(self.blobs):
            if thread_id == source_thread_id:
                self.blobs[(target_thread_id, *rest)] = self.blobs[(thread_id, *rest)]

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        for thread_id in thread_ids:
            if strategy == "delete":
                self.delete_thread(thread_id)
                continue
            for namespace, stored in list(self.storage[thread_id].items()):
                for checkpoint_id in sorted(stored)[:-1]:
                    self._drop(thread_id, namespace, checkpoint_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self.prune(thread_ids, strategy=strategy)


class Asynced(BaseCheckpointSaver[Any]):
    """Asynchronous calls of a saver, made synchronously: for suites that are asynchronous only."""

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        super().__init__()
        self.saver = saver

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self.saver.get_next_version(current, channel)

    async def aget_tuple(self, config: Any) -> Any:
        return self.saver.get_tuple(config)

    async def alist(self, config: Any, **chosen: Any) -> AsyncIterator[Any]:
        for found in list(self.saver.list(config, **chosen)):
            yield found

    async def aput(self, *given: Any) -> Any:
        return self.saver.put(*given)

    async def aput_writes(self, *given: Any, **chosen: Any) -> None:
        self.saver.put_writes(*given, **chosen)

    async def adelete_thread(self, thread_id: str) -> None:
        self.saver.delete_thread(thread_id)


class FullAsynced(Asynced):
    """The same, with the methods that a saver may leave out."""

    async def adelete_for_runs(self, run_ids: Any) -> None:
        self.saver.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.saver.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        self.saver.prune(thread_ids, strategy=strategy)


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def talk(model: Any, saver: Any, **compiled: Any) -> Any:
    """One node that answers what was said so far; its graph is attached."""
    builder = StateGraph(Talk)

    def answer(state: Talk) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def aanswer(state: Talk) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder.add_node("say", RunnableLambda(answer, aanswer))
    builder.add_edge(START, "say")
    return attach(builder.compile(checkpointer=saver, **compiled), model, strict=True)


def say(app: Any, text: str, config: Any, **how: Any) -> list[AnyMessage]:
    messages: list[AnyMessage] = app.invoke({"messages": [HumanMessage(text)]}, config, **how)[
        "messages"
    ]
    return messages


async def asay(app: Any, text: str, config: Any, **how: Any) -> list[AnyMessage]:
    out = await app.ainvoke({"messages": [HumanMessage(text)]}, config, **how)
    messages: list[AnyMessage] = out["messages"]
    return messages


def check_reply(model: Any, messages: list[AnyMessage]) -> None:
    """The last message is what plain transformers answers to the ones before."""
    assert model.answered(messages[-1]) == model.expected(messages[:-1])


def fed(model: Any, messages: list[AnyMessage]) -> tuple[int, ...]:
    """The tokens of which the call that answered with the last message leaves rows."""
    answer = model.answered(messages[-1])
    # The last token of an answer that was cut off is never fed.
    return (*model.prompt_ids(messages[:-1]), *answer[: model.max_tokens - 1])


def n_rows(*paths: tuple[int, ...]) -> int:
    """Rows of a tree that holds these paths: one for each distinct head of them."""
    return len({path[:n] for path in paths for n in range(1, len(path) + 1)})


def read(message: Any) -> int:
    """Tokens that a reply's call found in the cache."""
    found: int = message.usage_metadata["input_token_details"]["cache_read"]
    return found
