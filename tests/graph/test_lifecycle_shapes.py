"""Shapes of graphs on a real engine: subgraphs, commands to a parent, Sends, tasks, cached nodes.

Each answer is the oracle's, and what is left is what the calls' tokens say must be left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, interrupt

from sidequest_langchain.graph import attach, branch, current_step, prune
from tests.graph.conftest import Tiny
from tests.graph.graphs import Log, State, chain, check_events, on
from tests.graph.witness import Witness

MakeChat = Callable[..., Tiny]
TRUNK = SystemMessage("Plan the trip from Paris to Rome")
FAST = RetryPolicy(max_attempts=4, initial_interval=0.0, jitter=False, retry_on=ConnectionError)


def thought(text: str) -> list[AnyMessage]:
    return [TRUNK, HumanMessage(text)]


def says(witness: Witness, text: str) -> Any:
    """A node that makes one call."""
    return lambda state: {"said": [witness.ask(thought(text)).text]}


def asays(witness: Witness, text: str) -> Any:
    """The same, asynchronously."""

    async def node(state: dict[str, Any]) -> dict[str, Any]:
        return {"said": [(await witness.aask(thought(text))).text]}

    return node


# -- subgraphs ---------------------------------------------------------------------------


@pytest.mark.parametrize("inner_saver", [None, True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_three_floors_of_graphs_leave_one_path_a_call(
    inner_saver: Any, is_async: bool, tiny_chat: MakeChat
) -> None:
    """Names that begin alike on every floor: `a`, `ab` and, below, `a` again."""
    witness, log = Witness(tiny_chat()), Log()
    node = asays if is_async else says

    def floor(inner: Any, **compiled: Any) -> Any:
        nodes = (("a", inner or node(witness, "a")), ("ab", node(witness, "ab")))
        return chain(*nodes, **compiled)

    lower = floor(floor(None, checkpointer=inner_saver), checkpointer=inner_saver)
    app = attach(
        floor(lower, checkpointer=InMemorySaver()), witness.model, on_event=log, strict=True
    )
    for _ in range(2):  # the second run finds all it asks for
        if is_async:
            asyncio.run(app.ainvoke({"said": []}, on("t")))
        else:
            app.invoke({"said": []}, on("t"))
    nodes = [("a", "a", "a"), ("a", "a", "ab"), ("a", "ab"), ("ab",)]
    assert [call.nodes for call in witness.calls] == nodes * 2
    assert len({call.checkpoint_ns for call in witness.calls}) == 8
    assert all(call.n_reused == call.n_prompt for call in witness.calls[4:])
    witness.check(witness.calls)
    check_events(log.events)
    assert {outcome for _, outcome in log.outcomes()} == {"ok"}
    assert len(log.outcomes()) == 2 * 6

    # A namespace names what is below it, and nothing that only begins alike.
    top = witness.calls[0].checkpoint_ns.split("|")[0]
    receipt = witness.model.kv.release(top, thread_id="t")
    below = [call for call in witness.calls if call.checkpoint_ns.split("|")[0] == top]
    if inner_saver:  # LangGraph leaves the task out of such a namespace: both runs are below
        assert receipt.n_paths == len(below) == 6
    else:
        assert receipt.n_paths == len(below) == 3
    left = [call for call in witness.calls if call not in below]
    witness.check(left)
    receipt = witness.model.kv.release(left[-1].checkpoint_ns)
    assert receipt.n_paths == 1
    witness.check(left[:-1])


@pytest.mark.parametrize("how", ["nodes", "calls"])
@pytest.mark.parametrize("inner_saver", [None, True, False])
def test_one_subgraph_used_twice_is_two_visits(
    how: str, inner_saver: Any, tiny_chat: MakeChat
) -> None:
    witness, log, n_calls = Witness(tiny_chat()), Log(), 2
    if how == "calls" and inner_saver:
        n_calls = 1  # LangGraph allows a subgraph with a memory of its own one call in a node

    def think(state: dict[str, Any]) -> dict[str, Any]:
        return {"said": [witness.ask(thought(f"of {len(state['said'])}")).text]}

    inner = chain(("think", think), checkpointer=inner_saver)

    def calls(state: dict[str, Any]) -> dict[str, Any]:
        said: list[str] = []
        for _ in range(n_calls):
            said = inner.invoke({"said": said})["said"]
        return {"said": said}

    nodes = [("left", inner), ("right", inner)] if how == "nodes" else [("calls", calls)]
    graph = chain(*nodes, checkpointer=InMemorySaver())
    app = attach(graph, witness.model, on_event=log, strict=True)
    app.invoke({"said": []}, on("t"))
    assert len(witness.calls) == (2 if how == "nodes" else n_calls)
    assert len({call.checkpoint_ns for call in witness.calls}) == len(witness.calls)
    witness.check(witness.calls)
    check_events(log.events)
    first, *rest = witness.calls
    assert witness.model.kv.release(first.checkpoint_ns.rsplit(":", 1)[-1]).n_paths == 1
    witness.check(rest)
    witness.model.kv.clear("t")
    witness.check([])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("retain", ["run", "thread"])
def test_a_command_to_the_parent_leaves_from_two_floors_down(
    is_async: bool, retain: Any, tiny_chat: MakeChat
) -> None:
    witness, log = Witness(tiny_chat(retain=retain)), Log()

    def leave(state: dict[str, Any]) -> Command[Any]:
        for name in ("kept", "lost"):
            with branch(name):
                witness.ask(thought(name))
        prune("lost")
        return Command(graph=Command.PARENT, goto="up", update={"said": ["left"]})

    async def aleave(state: dict[str, Any]) -> Command[Any]:
        return await asyncio.to_thread(leave, state)

    def graph_of(*nodes: tuple[str, Any], to: str | None = None, **compiled: Any) -> Any:
        builder = StateGraph(State)
        for name, node in nodes:
            builder.add_node(name, node)
        builder.add_edge(START, nodes[0][0])
        return builder.compile(**compiled)

    lower = graph_of(("leave", aleave if is_async else leave))
    middle = graph_of(("lower", lower), ("up", says(witness, "up")))
    outer = chain(("middle", middle), ("last", says(witness, "last")), checkpointer=InMemorySaver())
    app = attach(outer, witness.model, on_event=log, strict=True)
    if is_async:
        result = asyncio.run(app.ainvoke({"said": []}, on("t")))
    else:
        result = app.invoke({"said": []}, on("t"))
    assert result["said"][0] == "left"
    assert [call.nodes for call in witness.calls] == [
        ("middle", "lower", "leave"),
        ("middle", "lower", "leave"),
        ("middle", "up"),
        ("last",),
    ]
    kept, _, up, last = witness.calls
    witness.check([] if retain == "run" else [kept, up, last])
    assert log.outcomes() == [
        ("leave", "parent_command"),
        ("lower", "parent_command"),
        ("up", "ok"),
        ("middle", "ok"),
        ("last", "ok"),
    ]
    assert log.named("release")[0]["path"] == "lost"
    assert len(log.named("prune")) == 1
    check_events(log.events)


# -- Sends -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_identical_sends_are_told_apart_and_stored_once(
    is_async: bool, tiny_chat: MakeChat
) -> None:
    witness, log = Witness(tiny_chat()), Log()
    seen: list[str] = []

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(current_step().task_id)  # type: ignore[union-attr]
        return {"said": [witness.ask(thought("same")).text]}

    async def aexpand(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(current_step().task_id)  # type: ignore[union-attr]
        return {"said": [(await witness.aask(thought("same"))).text]}

    builder = StateGraph(State)
    builder.add_node("expand", aexpand if is_async else expand)
    builder.add_conditional_edges(START, lambda _: [Send("expand", {"i": 0})] * 5, ["expand"])
    app = attach(builder.compile(), witness.model, on_event=log, strict=True)
    if is_async:
        asyncio.run(app.ainvoke({"said": []}, on("t")))
    else:
        app.invoke({"said": []}, on("t"))
    assert len(set(seen)) == len(witness.calls) == 5
    witness.check(witness.calls)
    assert witness.model.kv.usage().n_tokens == len(witness.calls[0].row)
    check_events(log.events)
    # Releasing four of them frees nothing; the fifth frees the rows.
    calls = list(witness.calls)
    while calls:
        call = calls.pop()
        receipt = witness.model.kv.release(call.checkpoint_ns)
        assert receipt.n_paths == 1
        assert receipt.freed_tokens == (0 if calls else len(call.row))
        witness.check(calls)


# -- the functional interface ------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_tasks_that_are_done_are_not_run_again(is_async: bool, tiny_chat: MakeChat) -> None:
    """Two tasks at once, a task inside of a task, an interrupt, a resume, and another run."""
    witness, log = Witness(tiny_chat()), Log()

    @task
    def deep(text: str) -> str:
        return str(witness.ask(thought(f"deep {text}")).text)

    @task
    def think(text: str) -> str:
        return str(witness.ask(thought(text)).text) + deep(text).result()

    @task
    async def adeep(text: str) -> str:
        return str((await witness.aask(thought(f"deep {text}"))).text)

    @task
    async def athink(text: str) -> str:
        return str((await witness.aask(thought(text))).text) + await adeep(text)

    @entrypoint(checkpointer=InMemorySaver())
    def flow(text: str, *, previous: str | None = None) -> str:
        both = [think(f"{text} {i}") for i in range(2)]
        said = "".join(one.result() for one in both)
        answer = interrupt("go on?")
        return said + witness.ask(thought(f"{answer} {previous is not None}")).text

    @entrypoint(checkpointer=InMemorySaver())
    async def aflow(text: str, *, previous: str | None = None) -> str:
        said = "".join(await asyncio.gather(*[athink(f"{text} {i}") for i in range(2)]))
        answer = interrupt("go on?")
        return said + (await witness.aask(thought(f"{answer} {previous is not None}"))).text

    app = attach(aflow if is_async else flow, witness.model, on_event=log, strict=True)

    def run(given: Any) -> Any:
        return asyncio.run(app.ainvoke(given, on("t"))) if is_async else app.invoke(given, on("t"))

    for n in range(2):
        run(f"day {n}")
        assert len(witness.calls) == 5 * n + 4
        witness.check(witness.calls)
        run(Command(resume="yes"))
        assert len(witness.calls) == 5 * n + 5
        witness.check(witness.calls)
    names = [call.nodes[-1].removeprefix("a") for call in witness.calls[:5]]
    assert sorted(names) == ["deep", "deep", "flow", "think", "think"]
    outcomes = [outcome for _, outcome in log.outcomes()]
    assert outcomes.count("interrupted") == 2
    assert outcomes.count("ok") == 10
    check_events(log.events)
    witness.model.kv.clear("t")
    witness.check([])


@pytest.mark.parametrize("saver", [None, InMemorySaver])
def test_a_retried_flow_leaves_what_one_attempt_leaves(saver: Any, tiny_chat: MakeChat) -> None:
    """LangGraph runs the tasks of a failed attempt again, each as a new visit."""
    witness, log, tries = Witness(tiny_chat()), Log(), []

    @task
    def think(text: str) -> str:
        return str(witness.ask(thought(text)).text)

    @entrypoint(checkpointer=saver() if saver else None, retry_policy=FAST)
    def flow(text: str) -> str:
        tries.append(1)
        both = [think(f"{text} {i} {len(tries)}") for i in range(2)]
        said = "".join(one.result() for one in both)
        witness.ask(thought(f"flow {len(tries)}"))
        if len(tries) < 3:
            raise ConnectionError
        return said

    attach(flow, witness.model, on_event=log, strict=True).invoke("day", on("t"))
    assert len(witness.calls) == 9
    witness.check(witness.calls[6:])
    assert log.reasons() == ["attempt abandoned"] * 2  # the flow's own calls, and its tasks'
    check_events(log.events)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_flow_that_failed_goes_on_with_the_tasks_that_were_done(
    is_async: bool, tiny_chat: MakeChat
) -> None:
    witness, log, tries = Witness(tiny_chat()), Log(), []

    @task(retry_policy=FAST)
    def think(text: str) -> str:
        tries.append(1)
        said = str(witness.ask(thought(f"{text} {len(tries)}")).text)
        if len(tries) < 3:
            raise ConnectionError
        return said

    def then(said: str) -> str:
        reply = witness.ask(thought(f"flow {len(witness.calls)}"))
        if len(witness.calls) < 5:
            raise ConnectionError
        return said + reply.text

    @entrypoint(checkpointer=InMemorySaver())
    def flow(text: str) -> str:
        return then(think(text).result())

    @entrypoint(checkpointer=InMemorySaver())
    async def aflow(text: str) -> str:
        return await asyncio.to_thread(then, await think(text))

    app = attach(aflow if is_async else flow, witness.model, on_event=log, strict=True)

    def run(given: Any) -> Any:
        return asyncio.run(app.ainvoke(given, on("t"))) if is_async else app.invoke(given, on("t"))

    with pytest.raises(ConnectionError):
        run("day")
    done = witness.calls[2]
    assert [len(call.nodes) for call in witness.calls] == [2, 2, 2, 1]
    witness.check([done])
    run(None)
    assert len(witness.calls) == 5  # the task's result was at hand
    witness.check([done, witness.calls[4]])
    check_events(log.events)


# -- cached nodes ------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_cached_node_calls_nothing_and_loses_nothing(is_async: bool, tiny_chat: MakeChat) -> None:
    witness, log = Witness(tiny_chat()), Log()
    node = asays if is_async else says
    builder = StateGraph(State)
    builder.add_node("cached", node(witness, "cached"), cache_policy=CachePolicy())
    builder.add_node("after", node(witness, "after"))
    builder.add_edge(START, "cached")
    builder.add_edge("cached", "after")
    app = attach(
        builder.compile(cache=InMemoryCache(), checkpointer=InMemorySaver()),
        witness.model,
        on_event=log,
        strict=True,
    )

    def run(thread_id: str) -> Any:
        given, config = {"i": 1}, on(thread_id)
        return asyncio.run(app.ainvoke(given, config)) if is_async else app.invoke(given, config)

    first = run("t")
    again = run("u")
    assert [call.node for call in witness.calls] == ["cached", "after", "after"]
    assert [(call.thread_id) for call in witness.calls] == ["t", "t", "u"]
    assert first == again
    witness.check(witness.calls)
    assert log.outcomes() == [("cached", "ok"), ("after", "ok"), ("after", "ok")]
    check_events(log.events)
    witness.model.kv.clear("t")
    witness.check(witness.calls[2:])
