"""A prune takes effect when its node ends well, once, and not at all otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from sidequest_langchain.graph import aprune, attach, branch, prune
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import Log, State, chain, check_events, on

FAST = RetryPolicy(max_attempts=3, initial_interval=0.0, jitter=False, retry_on=ConnectionError)


def opened(model: FakeModel, *names: str) -> Any:
    """A node that makes one call in each branch."""

    def node(state: dict[str, Any]) -> dict[str, Any]:
        for name in names:
            with branch(name):
                model.invoke("hi")
        return {}

    return node


def test_it_waits_for_the_end_of_the_node() -> None:
    model, log, inside = fake_model(), Log(), []

    def select(state: dict[str, Any]) -> dict[str, Any]:
        receipt = prune("a")
        inside.append((receipt.status, receipt.paths, model.kv.branches()))
        return {}

    app = attach(chain(("open", opened(model, "a", "b")), ("select", select)), model, on_event=log)
    app.invoke({}, on("t"))
    assert inside == [("staged", ("a",), ["a", "b"])]
    assert model.kv.branches() == ["b"]
    assert [d["bytes"] for d in log.named("release")] == [100]


def test_immediate_does_not_wait() -> None:
    model, log, inside = fake_model(), Log(), []

    def select(state: dict[str, Any]) -> dict[str, Any]:
        receipt = prune("a", immediate=True)
        inside.append((receipt.status, receipt.freed_bytes, model.kv.branches()))
        msg = "too late"
        raise ValueError(msg)

    app = attach(chain(("open", opened(model, "a", "b")), ("select", select)), model, on_event=log)
    with pytest.raises(ValueError, match="too late"):
        app.invoke({}, on("t"))
    assert inside == [("applied", 100, ["b"])]
    assert len(log.named("prune")) == len(log.named("release")) == 1
    check_events(log.events)


async def test_the_asynchronous_twin_does_the_same() -> None:
    model, log, inside = fake_model(), Log(), []

    async def select(state: dict[str, Any]) -> dict[str, Any]:
        inside.append((await aprune("a")).status)
        receipt = await aprune("b", immediate=True)
        inside.append(receipt.status)
        inside.append(receipt.freed_bytes)
        return {}

    graph = chain(("open", opened(model, "a", "b", "c")), ("select", select))
    await attach(graph, model, on_event=log).ainvoke({}, on("t"))
    assert inside == ["staged", "applied", 100]
    assert model.kv.branches() == ["c"]
    check_events(log.events)


async def test_the_asynchronous_twin_lets_the_loop_go_on_while_the_engine_is_busy() -> None:
    model = fake_model()
    model.kv.is_held = True
    ticks = []

    async def select(state: dict[str, Any]) -> dict[str, Any]:
        await aprune("a", immediate=True)
        return {}

    async def tick() -> None:
        for _ in range(5):
            await asyncio.sleep(0.01)
            ticks.append(1)
        await asyncio.to_thread(model.kv.let_go)

    graph = attach(chain(("open", opened(model, "a")), ("select", select)), model)
    await asyncio.gather(graph.ainvoke({}, on("t")), tick())
    assert len(ticks) == 5
    assert model.kv.branches() == []


def test_a_failed_node_prunes_nothing() -> None:
    model, log = fake_model(), Log()

    def select(state: dict[str, Any]) -> dict[str, Any]:
        prune("a")
        msg = "no"
        raise ValueError(msg)

    app = attach(chain(("open", opened(model, "a")), ("select", select)), model, on_event=log)
    with pytest.raises(ValueError, match="no"):
        app.invoke({}, on("t"))
    assert model.kv.branches() == ["a"]
    assert log.named("prune") == log.named("release") == []
    assert log.named("step_end")[-1]["n_prunes_dropped"] == 1
    assert log.outcomes() == [("open", "ok"), ("select", "error")]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_retried_node_prunes_once(is_async: bool) -> None:
    model, log, tries = fake_model(), Log(), []

    def select(state: dict[str, Any]) -> dict[str, Any]:
        prune("a")
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return {}

    builder = StateGraph(State)
    builder.add_node("open", opened(model, "a", "b"))
    builder.add_node("select", select, retry_policy=FAST)
    builder.add_edge(START, "open")
    builder.add_edge("open", "select")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    if is_async:
        asyncio.run(app.ainvoke({}, on("t")))
    else:
        app.invoke({}, on("t"))
    assert len(tries) == 3
    assert len(log.named("prune")) == 1
    assert log.reasons() == ["pruned"]
    assert [d["attempt"] for d in log.named("step_start") if d["node"] == "select"] == [1, 2, 3]
    assert model.kv.branches() == ["b"]
    check_events(log.events)


def test_an_interrupted_node_prunes_when_it_is_resumed() -> None:
    model, log = fake_model(), Log()

    def select(state: dict[str, Any]) -> dict[str, Any]:
        prune("a")
        interrupt("sure?")
        return {}

    graph = chain(
        ("open", opened(model, "a", "b")), ("select", select), checkpointer=InMemorySaver()
    )
    app = attach(graph, model, on_event=log, strict=True)
    app.invoke({}, on("t"))
    assert model.kv.branches() == ["a", "b"]
    assert log.named("prune") == []
    assert log.outcomes()[-1] == ("select", "interrupted")
    app.invoke(Command(resume="yes"), on("t"))
    assert model.kv.branches() == ["b"]
    assert len(log.named("prune")) == 1
    check_events(log.events)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_subgraph_left_by_a_command_to_its_parent_prunes(is_async: bool) -> None:
    model, log = fake_model(), Log()

    def select(state: dict[str, Any]) -> Command[Any]:
        prune("a")
        return Command(graph=Command.PARENT, goto="after", update={"said": ["up"]})

    inner = chain(("open", opened(model, "a", "b")), ("select", select))
    builder = StateGraph(State)
    builder.add_node("sub", inner, destinations=("after",))
    builder.add_node("after", lambda state: {"said": ["after"]})
    builder.add_edge(START, "sub")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    result = asyncio.run(app.ainvoke({}, on("t"))) if is_async else app.invoke({}, on("t"))
    assert result["said"] == ["up", "after"]
    assert model.kv.branches() == ["b"]
    assert log.outcomes() == [
        ("open", "ok"),
        ("select", "parent_command"),
        ("sub", "parent_command"),
        ("after", "ok"),
    ]
    check_events(log.events)


def test_a_tool_and_an_edge_prune_for_the_node_around_them() -> None:
    model, log = fake_model(), Log()

    @tool
    def forget(name: str) -> str:
        """Forget a branch."""
        prune(name)
        return "forgotten"

    def use(state: dict[str, Any]) -> dict[str, Any]:
        forget.invoke({"name": "a"})
        assert model.kv.branches() == ["a", "b", "c"]
        return {}

    def route(state: dict[str, Any]) -> str:
        prune("b")
        return "__end__"

    builder = StateGraph(State)
    builder.add_node("open", opened(model, "a", "b", "c"))
    builder.add_node("use", use)
    builder.add_edge(START, "open")
    builder.add_edge("open", "use")
    builder.add_conditional_edges("use", route)
    attach(builder.compile(), model, on_event=log, strict=True).invoke({}, on("t"))
    assert model.kv.branches() == ["c"]
    assert [(d["node"], d["paths"]) for d in log.named("prune")] == [("use", ["a"]), ("use", ["b"])]


def test_a_prune_takes_effect_before_the_next_node_begins() -> None:
    model, log, seen = fake_model(), Log(), []

    def after(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(model.kv.branches())
        return {}

    nodes = (("open", opened(model, "a", "b")), ("select", lambda s: prune("a") and {}))
    attach(chain(*nodes, ("after", after)), model, on_event=log).invoke({}, on("t"))
    assert seen == [["b"]]


def test_nothing_waits_for_a_busy_engine() -> None:
    model = fake_model()
    model.kv.is_held = True
    nodes = (("open", opened(model, "a", "b")), ("select", lambda s: prune("a") and {}))
    attach(chain(*nodes), model).invoke({}, on("t"))
    assert [selector.path_id for selector, _ in model.kv.posted] == ["a"]
    model.kv.let_go()
    assert model.kv.branches() == ["b"]


def test_a_name_that_is_not_known_is_a_reported_no_op() -> None:
    model, log = fake_model(), Log()
    graph = chain(("select", lambda s: prune("nobody") and {}))
    attach(graph, model, on_event=log, strict=True).invoke({}, on("t"))
    (release,) = log.named("release")
    assert (release["path"], release["n_paths"], release["bytes"]) == ("nobody", 0, 0)
