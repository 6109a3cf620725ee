"""Small graphs that several tests run, and what their events are checked with."""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from sidequest_langchain.graph import KVEvent


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]
    i: int
    n: int


def chain(*nodes: tuple[str, Callable[..., Any]], **compiled: Any) -> Any:
    """START -> the nodes, one after the other."""
    builder = StateGraph(State)
    before = START
    for name, node in nodes:
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    return builder.compile(**compiled)


def fan_out(n: int, expand: Callable[..., Any], *after: tuple[str, Any], **compiled: Any) -> Any:
    """`n` Sends to `expand`, each with its `i`, then the nodes `after`."""
    builder = StateGraph(State)
    builder.add_node("expand", expand)
    sends = [Send("expand", {"i": i}) for i in range(n)]
    builder.add_conditional_edges(START, lambda _: sends, ["expand"])
    before = "expand"
    for name, node in after:
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    return builder.compile(**compiled)


def on(thread_id: str, **more: Any) -> dict[str, Any]:
    """The config of a thread."""
    return {"configurable": {"thread_id": thread_id}, **more}


class Log:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def __call__(self, event: KVEvent) -> None:
        self.events.append(event)

    def named(self, short: str) -> list[dict[str, Any]]:
        return [e.data for e in self.events if e.name == f"sidequest.{short}"]

    def outcomes(self) -> list[tuple[str, str]]:
        return [(d["node"], d["outcome"]) for d in self.named("step_end")]

    def reasons(self) -> list[str]:
        return [d["reason"] for d in self.named("release")]


class OnBus(BaseCallbackHandler):
    """A synchronous handler that keeps what comes by on the bus."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.events.append(KVEvent(name=name, data=data))


class AsyncOnBus(AsyncCallbackHandler):
    """The same for asynchronous handlers."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    async def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.events.append(KVEvent(name=name, data=data))


def check_events(events: Iterable[KVEvent]) -> None:
    """Each event once, JSON-ready; each step begins first, ends once, releases last."""
    by_run: dict[str, list[KVEvent]] = defaultdict(list)
    for event in events:
        assert json.loads(json.dumps(event.data)) == event.data
        by_run[event.data["run_id"]].append(event)
    for of_run in by_run.values():
        numbers = [event.data["n_event"] for event in of_run]
        assert sorted(numbers) == list(range(len(numbers)))
        by_step: dict[Any, list[str]] = defaultdict(list)
        for event in of_run:
            if "checkpoint_ns" in event.data:
                attempt = (event.data["checkpoint_ns"], event.data["attempt"])
                by_step[attempt].append(event.name.removeprefix("sidequest."))
        for names in by_step.values():
            assert names[0] == "step_start"
            assert names.count("step_start") == names.count("step_end") == 1
            end = names.index("step_end")
            assert set(names[1:end]) <= {"prune", "release"}
            assert set(names[end + 1 :]) <= {"release"}
