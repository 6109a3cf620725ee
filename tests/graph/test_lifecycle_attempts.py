"""Attempts on a real engine: retries, error handlers, time-outs, interrupts and their resumes.

Each answer is the oracle's; what stays is what a run without mishaps leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeError
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, TimeoutPolicy, interrupt

from sidequest_langchain.graph import attach
from tests.graph.conftest import Tiny
from tests.graph.graphs import Log, OnBus, State, chain, check_events, on
from tests.graph.witness import Witness

MakeChat = Callable[..., Tiny]
TRUNK = SystemMessage("Plan the trip from Paris to Rome")
FAST = RetryPolicy(max_attempts=4, initial_interval=0.0, jitter=False, retry_on=ConnectionError)


def thought(text: str) -> list[AnyMessage]:
    return [TRUNK, HumanMessage(text)]


def says(witness: Witness, text: str) -> Any:
    """A node that makes one call."""
    return lambda state: {"said": [witness.ask(thought(text)).text]}


def run(app: Any, how: str, given: Any, config: Any) -> Any:
    """Run a graph in one of the ways there are."""

    async def arun() -> Any:
        if how == "ainvoke":
            return await app.ainvoke(given, config)
        return [x async for x in app.astream(given, config, stream_mode="messages")]

    if how == "invoke":
        return app.invoke(given, config)
    if how == "stream":
        return list(app.stream(given, config, stream_mode="messages"))
    return asyncio.run(arun())


HOW = pytest.mark.parametrize("how", ["invoke", "stream", "ainvoke", "astream"])


# -- retries -----------------------------------------------------------------------------


@HOW
def test_attempts_that_asked_something_else_leave_nothing(how: str, tiny_chat: MakeChat) -> None:
    witness, log, bus, tries = Witness(tiny_chat()), Log(), OnBus(), []

    def flaky(state: dict[str, Any]) -> dict[str, Any]:
        tries.append(1)
        said = [witness.ask(thought(f"try {len(tries)} {i}")).text for i in range(2)]
        if len(tries) < 4:
            raise ConnectionError
        return {"said": said}

    builder = StateGraph(State)
    builder.add_node("first", says(witness, "first"))
    builder.add_node("flaky", flaky, retry_policy=FAST)
    builder.add_node("last", says(witness, "last"))
    builder.add_edge(START, "first")
    builder.add_edge("first", "flaky")
    builder.add_edge("flaky", "last")
    app = attach(builder.compile(), witness.model, on_event=log, strict=True)
    run(app, how, {}, on("t", callbacks=[bus]))
    first, *attempts, last = witness.calls
    assert len(attempts) == 8
    witness.check([first, *attempts[-2:], last])
    assert log.outcomes() == [
        ("first", "ok"), *[("flaky", "error")] * 3, ("flaky", "ok"), ("last", "ok")
    ]  # fmt: skip
    assert log.reasons() == ["attempt abandoned"]
    check_events(log.events)
    steps = [(e.name, e.data["n_event"]) for e in log.events if "release" not in e.name]
    told = [(e.name, e.data["n_event"]) for e in bus.events if "release" not in e.name]
    assert told == steps
    witness.model.kv.clear("t")
    witness.check([])


def test_an_attempt_that_fails_for_good_leaves_what_came_before_it(tiny_chat: MakeChat) -> None:
    witness, log = Witness(tiny_chat()), Log()

    def fails(state: dict[str, Any]) -> dict[str, Any]:
        witness.ask(thought("fails"))
        raise ConnectionError

    builder = StateGraph(State)
    builder.add_node("first", says(witness, "first"))
    builder.add_node("fails", fails, retry_policy=FAST)
    builder.add_edge(START, "first")
    builder.add_edge("first", "fails")
    app = attach(builder.compile(), witness.model, on_event=log, strict=True)
    with pytest.raises(ConnectionError):
        app.invoke({}, on("t"))
    assert len(witness.calls) == 5
    witness.check(witness.at("first"))
    assert log.outcomes() == [("first", "ok"), *[("fails", "error")] * 4]
    check_events(log.events)


def flaky_subgraph(witness: Witness, *failing: int, **compiled: Any) -> Any:
    """A step that ends well, then one that fails when it runs for those times, from 1."""
    tries: list[int] = []

    def early(state: dict[str, Any]) -> dict[str, Any]:
        witness.ask(thought(f"early {len(tries)}"))
        return {}

    def flaky(state: dict[str, Any]) -> dict[str, Any]:
        tries.append(1)
        witness.ask(thought(f"flaky {len(tries)}"))
        if len(tries) in failing:
            raise ConnectionError
        return {}

    return chain(("early", early), ("flaky", flaky), **compiled)


NESTED = pytest.mark.parametrize(
    ("saver", "inner_saver"),
    [(None, None), (None, False), *((InMemorySaver, inner) for inner in (None, False, True))],
)


@NESTED
def test_a_retried_subgraph_leaves_what_one_attempt_leaves(
    saver: Any, inner_saver: Any, tiny_chat: MakeChat
) -> None:
    """Its first step ended well, but that of a failed attempt is nobody's history."""
    witness, log = Witness(tiny_chat()), Log()
    builder = StateGraph(State)
    inner = flaky_subgraph(witness, 2, 3, checkpointer=inner_saver)
    builder.add_node("outer", inner, retry_policy=FAST)
    builder.add_edge(START, "outer")
    compiled = builder.compile(checkpointer=saver() if saver else None)
    app = attach(compiled, witness.model, on_event=log, strict=True)
    app.invoke({"i": 1}, on("t"))
    first = list(witness.calls)
    witness.check(first)
    app.invoke({"i": 2}, on("t"))
    # LangGraph begins the retried subgraph anew, whatever its saver holds.
    assert [call.nodes[-1] for call in witness.calls] == ["early", "flaky"] * 4
    # What the run before left is that one's history, even where both share a namespace.
    witness.check([*first, *witness.calls[-2:]])
    app.invoke({"i": 3}, on("t"))
    witness.check([*first, *witness.calls[-4:]])
    check_events(log.events)


@NESTED
@pytest.mark.parametrize("is_handled", [True, False])
def test_what_finished_in_a_failed_subgraph_stays_only_if_the_run_may_be_resumed(
    saver: Any, inner_saver: Any, is_handled: bool, tiny_chat: MakeChat
) -> None:
    witness, log = Witness(tiny_chat()), Log()

    def mend(state: State, error: NodeError) -> dict[str, Any]:
        witness.ask(thought("mend"))
        return {}

    builder = StateGraph(State)
    builder.add_node("first", says(witness, "first"))
    builder.add_node(
        "outer",
        flaky_subgraph(witness, 1, checkpointer=inner_saver),
        error_handler=mend if is_handled else None,
    )
    builder.add_edge(START, "first")
    builder.add_edge("first", "outer")
    compiled = builder.compile(checkpointer=saver() if saver else None)
    app = attach(compiled, witness.model, on_event=log, strict=True)
    if is_handled:
        app.invoke({"said": []}, on("t"))
        first, _, _, mended = witness.calls
        witness.check([first, mended])
    else:
        with pytest.raises(ConnectionError):
            app.invoke({"said": []}, on("t"))
        first, early, _ = witness.calls
        witness.check([first, early])
        if saver:
            app.invoke(None, on("t"))
            again = witness.calls[3:]
            assert [call.nodes[-1] for call in again] in (["flaky"], ["early", "flaky"])
            if len(again) == 1:  # it went on where it had failed
                witness.check([first, early, *again])
    check_events(log.events)


# -- error handlers ----------------------------------------------------------------------


@HOW
def test_an_error_handler_takes_over_from_the_failed_node(how: str, tiny_chat: MakeChat) -> None:
    witness, log, errors = Witness(tiny_chat()), Log(), []

    def boom(state: dict[str, Any]) -> dict[str, Any]:
        witness.ask(thought("boom"))
        raise ConnectionError

    def mend(state: State, error: NodeError) -> Command[Any]:
        errors.append(error)
        return Command(update={"said": [witness.ask(thought("mend")).text]}, goto="last")

    builder = StateGraph(State)
    builder.add_node("first", says(witness, "first"))
    builder.add_node("boom", boom, error_handler=mend, retry_policy=FAST)
    builder.add_node("last", says(witness, "last"))
    builder.add_edge(START, "first")
    builder.add_edge("first", "boom")
    app = attach(builder.compile(), witness.model, on_event=log, strict=True)
    run(app, how, {"said": []}, on("t"))
    assert len(errors) == 1
    assert [call.node for call in witness.calls] == [
        "first", *["boom"] * 4, "__error_handler__boom", "last"
    ]  # fmt: skip
    witness.check([call for call in witness.calls if call.node != "boom"])
    assert log.outcomes() == [
        ("first", "ok"),
        *[("boom", "error")] * 4,
        ("__error_handler__boom", "ok"),
        ("last", "ok"),
    ]
    check_events(log.events)


# -- time-outs ---------------------------------------------------------------------------


async def test_a_node_that_runs_out_of_time_is_tried_again(tiny_chat: MakeChat) -> None:
    model = tiny_chat(max_tokens=200)
    witness, log, tries = Witness(model), Log(), []

    async def slow(state: dict[str, Any]) -> dict[str, Any]:
        tries.append(1)
        if len(tries) == 1:
            await model.ainvoke(thought("slow"))  # longer than there is time
            await asyncio.sleep(60)
        model.max_tokens = 6
        return {"said": [(await witness.aask(thought("quick"))).text]}

    builder = StateGraph(State)
    builder.add_node("slow", slow, timeout=TimeoutPolicy(run_timeout=0.5), retry_policy=ANY)
    builder.add_edge(START, "slow")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    await app.ainvoke({"said": []}, on("t"))
    assert len(tries) == 2
    await settle(witness, witness.calls)
    assert len(log.named("step_end")) == 2
    check_events(log.events)


ANY = RetryPolicy(max_attempts=3, initial_interval=0.0, jitter=False, retry_on=lambda _: True)


async def settle(witness: Witness, kept: list[Any], seconds: float = 5.0) -> None:
    """Wait until what was cut short has gone; then the map must be that of `kept`."""
    n_paths = len(kept)
    async with asyncio.timeout(seconds):
        while (await asyncio.to_thread(witness.model.kv.usage)).n_paths != n_paths:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(witness.check, kept)


# -- interrupts --------------------------------------------------------------------------


@HOW
@pytest.mark.parametrize("retain", ["run", "thread"])
def test_an_interrupted_fan_out_goes_on_where_it_was(
    how: str, retain: Any, tiny_chat: MakeChat
) -> None:
    """Three Sends, one of which asks back twice: the others are not run again."""
    witness, log, bus = Witness(tiny_chat(retain=retain)), Log(), OnBus()

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        witness.ask(thought(f"before {state['i']}"))
        if state["i"] == 1:
            answers = [interrupt("one"), interrupt("two")]
            witness.ask(thought(f"after {answers}"))
        return {"said": [str(state["i"])]}

    builder = StateGraph(State)
    builder.add_node("expand", expand)
    builder.add_node("join", says(witness, "join"))
    sends = [Send("expand", {"i": i}) for i in range(3)]
    builder.add_conditional_edges(START, lambda _: sends, ["expand"])
    builder.add_edge("expand", "join")
    compiled = builder.compile(checkpointer=InMemorySaver())
    app = attach(compiled, witness.model, on_event=log, strict=True)

    config = on("t", callbacks=[bus])
    run(app, how, {"said": []}, config)
    first = list(witness.calls)
    assert len(first) == 3
    witness.check(first)
    run(app, how, Command(resume="yes"), config)
    assert len(witness.calls) == 4
    again = witness.calls[3]
    assert again.n_reused >= again.n_prompt - 1
    # The paused attempt and the first are kept: the next resume hits them.
    assert witness.model.n_bytes == n_bytes_of(witness, first)
    run(app, how, Command(resume="no"), config)
    assert len(witness.calls) == 7
    last, after, join = witness.calls[4:]
    assert last.n_reused >= last.n_prompt - 1
    assert log.outcomes()[-2:] == [("expand", "ok"), ("join", "ok")]
    outcomes = [outcome for node, outcome in log.outcomes() if node != "__start__"]
    assert outcomes.count("interrupted") == 2
    assert outcomes.count("ok") == 4
    check_events(log.events)
    done = [call for call in first if call.checkpoint_ns != last.checkpoint_ns]
    witness.check([] if retain == "run" else [*done, last, after, join])
    witness.model.kv.clear("t")
    witness.check([])


def n_bytes_of(witness: Witness, calls: list[Any]) -> int:
    heads = {call.row[: n + 1] for call in calls for n in range(len(call.row))}
    return 512 * len(heads)


@HOW
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_breakpoint_stops_and_nothing_is_computed_twice(
    how: str, when: str, tiny_chat: MakeChat
) -> None:
    witness, log = Witness(tiny_chat()), Log()
    nodes = [(name, says(witness, name)) for name in "abc"]
    stops: dict[str, Any] = {f"interrupt_{when}": ["b"]}
    compiled = chain(*nodes, checkpointer=InMemorySaver(), **stops)
    app = attach(compiled, witness.model, on_event=log, strict=True)
    run(app, how, {"said": []}, on("t"))
    n_first = 1 if when == "before" else 2
    assert len(witness.calls) == n_first
    witness.check(witness.calls)
    run(app, how, None, on("t"))
    assert [call.node for call in witness.calls] == ["a", "b", "c"]
    witness.check(witness.calls)
    assert log.outcomes() == [("a", "ok"), ("b", "ok"), ("c", "ok")]
    assert log.reasons() == []
    check_events(log.events)


def test_a_pause_deep_inside_is_resumed_from_the_outermost_graph(tiny_chat: MakeChat) -> None:
    witness, log = Witness(tiny_chat()), Log()

    def asks(state: dict[str, Any]) -> dict[str, Any]:
        witness.ask(thought("asks"))
        answer = interrupt("ok?")
        return {"said": [witness.ask(thought(f"heard {answer}")).text]}

    innermost = chain(("early", says(witness, "early")), ("asks", asks))
    middle = chain(("first", says(witness, "first")), ("innermost", innermost))
    outer = chain(("middle", middle), ("last", says(witness, "last")), checkpointer=InMemorySaver())
    app = attach(outer, witness.model, on_event=log, strict=True)
    app.invoke({"said": []}, on("t"))
    paused = list(witness.calls)
    assert [call.nodes for call in paused] == [
        ("middle", "first"), ("middle", "innermost", "early"), ("middle", "innermost", "asks")
    ]  # fmt: skip
    witness.check(paused)
    app.invoke(Command(resume="yes"), on("t"))
    # What had ended is not run again; what was paused is, and the attempt before it goes.
    assert [call.nodes[-1] for call in witness.calls[3:]] == ["asks", "asks", "last"]
    assert witness.calls[3].n_reused >= witness.calls[3].n_prompt - 1
    witness.check([*paused[:2], *witness.calls[3:]])
    assert log.reasons().count("attempt abandoned") == 1
    check_events(log.events)
