"""A forward pass that fails, seen from every way to stream and from a graph that retries."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypedDict

import pytest
import torch
from langchain_core.messages import AnyMessage
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import RetryPolicy

from sidequest_langchain import attach

MakeChat = Callable[..., Any]
LIMIT_S = 2.0


class Broken(Exception):
    """What the tests raise; nothing else does."""


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@contextmanager
def failing(
    one: Any, n_pass: int, error: Callable[[], BaseException], n_times: int = 2
) -> Iterator[None]:
    """Raise in the second layer of pass `n_pass` (from 1), `n_times` in a row."""
    layer = one.weights.model.layers[1]
    original, begun = layer.forward, []

    def forward(*args: Any, **given: Any) -> Any:
        if threading.current_thread().name == "sidequest-engine":
            begun.append(1)
            if n_pass <= len(begun) < n_pass + n_times:
                raise error()
        return original(*args, **given)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def graph(one: Any, **node: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("say", lambda s: {"messages": [one.chat.invoke(s["messages"])]}, **node)
    builder.add_edge(START, "say")
    return attach(builder.compile(), one.chat)


async def _collect(stream: Any, seen: list[Any]) -> None:
    async for event in stream:
        seen.append(event)


ASK = {"messages": [("user", "Plan")]}
WAYS: dict[str, Callable[[Any, list[Any]], None]] = {
    "invoke": lambda one, seen: one.chat.invoke("Plan"),
    "stream": lambda one, seen: [seen.append(c) for c in one.chat.stream("Plan")] and None,
    "astream": lambda one, seen: asyncio.run(_collect(one.chat.astream("Plan"), seen)),
    "events": lambda one, seen: asyncio.run(
        _collect(one.chat.astream_events("Plan", version="v2"), seen)
    ),
    "graph": lambda one, seen: (
        [seen.append(c) for c in graph(one).stream(ASK, stream_mode="messages")] and None
    ),
    "async graph": lambda one, seen: asyncio.run(
        _collect(graph(one).astream(ASK, stream_mode="messages"), seen)
    ),
}


@pytest.mark.parametrize("n_pass", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_pass_ends_every_kind_of_stream(make_chat: MakeChat, way: str, n_pass: int):
    one, seen = make_chat(), []
    before = {thread.name for thread in threading.enumerate()}
    begun = time.perf_counter()
    with failing(one, n_pass, Broken), pytest.raises(Broken):
        WAYS[way](one, seen)
    assert time.perf_counter() - begun < LIMIT_S
    if n_pass == 3 and way in ("stream", "astream"):
        assert seen, "what was generated before the failure was streamed"
    assert one.n_bytes == 0
    reply = one.chat.invoke("Plan")
    assert one.answered(reply) == one.expected("Plan")
    assert {t.name for t in threading.enumerate() if "sidequest" in t.name} <= before


def test_out_of_memory_is_retried_by_the_graph_while_the_error_is_held(make_chat: MakeChat):
    one, held = make_chat(), []

    def say(state: State) -> dict[str, Any]:
        try:
            return {"messages": [one.chat.invoke(state["messages"])]}
        except torch.OutOfMemoryError as error:
            held.append(error)
            assert one.n_bytes == 0
            raise

    policy = RetryPolicy(
        max_attempts=3, initial_interval=0.0, jitter=False, retry_on=torch.OutOfMemoryError
    )
    builder = StateGraph(State)
    builder.add_node("say", say, retry_policy=policy)
    builder.add_edge(START, "say")
    app = attach(builder.compile(), one.chat)
    with failing(one, 5, lambda: torch.OutOfMemoryError("out of memory"), n_times=1):
        reply = app.invoke(ASK, {"configurable": {"thread_id": "t"}})["messages"][-1]
    assert len(held) == 1
    assert one.answered(reply) == one.expected("Plan")
    fed = [*one.chat.prompt_ids("Plan"), *one.answered(reply)]
    assert one.n_bytes <= 512 * len(fed)
