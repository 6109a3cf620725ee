"""Which paths stay and which go: attempts, interrupts, ends of runs, and what comes after."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, TimeoutPolicy, interrupt

from sidequest_langchain.graph import attach, branch
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import Log, State, chain, check_events, fan_out, on

FAST = RetryPolicy(max_attempts=3, initial_interval=0.0, jitter=False, retry_on=ConnectionError)


def says(model: FakeModel) -> Any:
    """A node that makes one call."""
    return lambda state: {"said": [str(model.invoke("hi").content)]}


# -- the end of a run --------------------------------------------------------------------


def test_without_a_thread_a_run_leaves_nothing() -> None:
    model, log = fake_model(), Log()
    app = attach(chain(("a", says(model)), ("b", says(model))), model, on_event=log, strict=True)
    app.invoke({})
    assert model.kv.labels() == []
    (release,) = log.named("release")
    assert (release["reason"], release["n_paths"], release["bytes"]) == ("run ended", 2, 200)
    assert "node" not in release
    check_events(log.events)


def test_with_a_thread_a_run_leaves_everything() -> None:
    model, log = fake_model(), Log()
    attach(chain(("a", says(model)), ("b", says(model))), model, on_event=log).invoke({}, on("t"))
    assert model.kv.nodes() == ["a", "b"]
    assert log.named("release") == []


@pytest.mark.parametrize(("retain", "thread_id", "n_left"), [("run", "t", 0), ("thread", None, 2)])
def test_retain_decides_whatever_the_thread(retain: Any, thread_id: str, n_left: int) -> None:
    model = fake_model(retain=retain)
    config = on(thread_id) if thread_id else {}
    attach(chain(("a", says(model)), ("b", says(model))), model).invoke({}, config)
    assert len(model.kv.labels()) == n_left


def test_a_run_releases_its_own_paths_only() -> None:
    model, gate, inside = fake_model(retain="run"), threading.Event(), threading.Event()

    def waits(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        inside.set()
        assert gate.wait(10)
        return {}

    slow, quick = attach(chain(("slow", waits)), model), attach(chain(("q", says(model))), model)
    thread = threading.Thread(target=slow.invoke, args=({}, on("t")))
    thread.start()
    assert inside.wait(10)
    quick.invoke({}, on("t"))
    quick.invoke({}, on("other"))
    quick.invoke({})
    assert model.kv.nodes() == ["slow"]
    gate.set()
    thread.join()
    assert model.kv.labels() == []


def test_a_failed_run_leaves_nothing_either() -> None:
    model = fake_model(retain="run")

    def fails(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        msg = "no"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="no"):
        attach(chain(("a", says(model)), ("b", fails)), model).invoke({}, on("t"))
    assert model.kv.labels() == []


def test_on_a_thread_a_failed_step_leaves_nothing_but_finished_ones_do() -> None:
    model, log = fake_model(), Log()

    def fails(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        msg = "no"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="no"):
        attach(chain(("a", says(model)), ("b", fails)), model, on_event=log).invoke({}, on("t"))
    assert model.kv.nodes() == ["a"]
    assert log.reasons() == ["step did not finish"]


@pytest.mark.parametrize(("retain", "n_left"), [("run", 0), ("thread", 6)])
def test_a_recursion_limit_passes_through_and_ends_the_run(retain: Any, n_left: int) -> None:
    model, log = fake_model(retain=retain), Log()
    builder = StateGraph(State)
    builder.add_node("again", says(model))
    builder.add_edge(START, "again")
    builder.add_edge("again", "again")
    app = attach(builder.compile(checkpointer=InMemorySaver()), model, on_event=log, strict=True)
    with pytest.raises(GraphRecursionError):
        app.invoke({}, on("t", recursion_limit=6))
    assert len(model.kv.labels()) == n_left
    with pytest.raises(GraphRecursionError):
        app.invoke({}, on("t", recursion_limit=3))
    check_events(log.events)


def test_five_hundred_runs_leave_nothing() -> None:
    model = fake_model(retain="run")
    app = attach(chain(("a", says(model))), model, strict=True)
    handler = app.config["callbacks"][0]
    for n in range(500):
        app.invoke({}, on(f"thread-{n}"))
    book = handler.lifecycle._book
    assert model.kv.labels() == []
    assert (len(book.runs), len(book._calls), len(book._branches)) == (0, 0, 0)
    assert (len(book._late_steps), len(book._late_calls)) == (0, 0)
    assert handler.n_errors == 0


def test_what_threads_are_remembered_by_is_bounded() -> None:
    model = fake_model()

    def node(state: dict[str, Any]) -> dict[str, Any]:
        with branch("b"):
            model.invoke("hi")
        return {}

    app = attach(chain(("a", node)), model, strict=True)
    for n in range(1100):
        app.invoke({}, on(f"thread-{n}"))
    assert len(app.config["callbacks"][0].lifecycle._book._branches) == 1024


# -- attempts ----------------------------------------------------------------------------


def test_an_abandoned_attempt_is_replaced_by_the_next() -> None:
    model, log, tries = fake_model(), Log(), []

    def flaky(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        tries.append(model.kv.nodes())
        if len(tries) < 3:
            raise ConnectionError
        return {}

    builder = StateGraph(State)
    builder.add_node("flaky", flaky, retry_policy=FAST)
    builder.add_edge(START, "flaky")
    attach(builder.compile(), model, on_event=log, strict=True).invoke({}, on("t"))
    # Until one ends well the earlier ones stay: the next hits what they share.
    assert tries == [["flaky"], ["flaky"] * 2, ["flaky"] * 3]
    assert list(model.kv.paths) == [2]
    assert log.reasons() == ["attempt abandoned"]
    assert [d["outcome"] for d in log.named("step_end")] == ["error", "error", "ok"]
    check_events(log.events)


def test_a_resumed_step_replaces_what_it_made_before_the_interrupt() -> None:
    model, log = fake_model(), Log()

    def asks(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        interrupt("ok?")
        return {}

    graph = chain(
        ("a", says(model)), ("asks", asks), ("b", says(model)), checkpointer=InMemorySaver()
    )
    app = attach(graph, model, on_event=log, strict=True)
    app.invoke({}, on("t"))
    assert list(model.kv.paths) == [0, 1]
    assert log.named("release") == []
    app.invoke(Command(resume="yes"), on("t"))
    assert sorted(model.kv.paths) == [0, 2, 3]
    assert log.reasons() == ["attempt abandoned"]
    check_events(log.events)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_keeps_the_segments_of_a_run_and_its_resume_releases_both(
    is_async: bool,
) -> None:
    model, log = fake_model(retain="run"), Log()

    def asks(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        interrupt("ok?")
        return {}

    graph = chain(("a", says(model)), ("asks", asks), checkpointer=InMemorySaver())
    app = attach(graph, model, on_event=log, strict=True)

    def run(given: Any) -> None:
        if is_async:
            asyncio.run(app.ainvoke(given, on("t")))
        else:
            app.invoke(given, on("t"))

    run({})
    assert model.kv.nodes() == ["a", "asks"]
    run(Command(resume="yes"))
    assert model.kv.labels() == []
    assert log.reasons() == ["attempt abandoned", "run ended"]


@pytest.mark.parametrize("when", ["interrupt_before", "interrupt_after"])
def test_a_breakpoint_keeps_the_segments_too(when: str) -> None:
    model = fake_model(retain="run")
    nodes = (("a", says(model)), ("b", says(model)))
    where = {when: ["b" if when == "interrupt_before" else "a"]}
    app = attach(chain(*nodes, checkpointer=InMemorySaver(), **where), model, strict=True)
    app.invoke({}, on("t"))
    assert model.kv.nodes() == ["a"]
    app.invoke(None, on("t"))
    assert model.kv.labels() == []


def test_steps_of_a_subgraph_that_finished_before_an_interrupt_stay() -> None:
    model, log = fake_model(), Log()

    def asks(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        interrupt("ok?")
        return {}

    inner = chain(("one", says(model)), ("asks", asks))
    app = attach(chain(("sub", inner), checkpointer=InMemorySaver()), model, on_event=log)
    app.invoke({}, on("t"))
    app.invoke(Command(resume="yes"), on("t"))
    # `one` was not run again: its path is still the thread's history.
    assert sorted((s, label.node) for s, label in model.kv.paths.items()) == [
        (0, "one"),
        (2, "asks"),
    ]
    assert log.outcomes() == [
        ("one", "ok"),
        ("asks", "interrupted"),
        ("sub", "interrupted"),
        ("asks", "ok"),
        ("sub", "ok"),
    ]


# -- cancelled and late ------------------------------------------------------------------


async def test_a_cancelled_run_leaves_nothing() -> None:
    model, log, inside = fake_model(retain="run"), Log(), asyncio.Event()

    async def hangs(state: dict[str, Any]) -> dict[str, Any]:
        await model.ainvoke("hi")
        inside.set()
        await asyncio.sleep(60)
        return {}

    app = attach(chain(("a", says(model)), ("hangs", hangs)), model, on_event=log, strict=True)
    running = asyncio.create_task(app.ainvoke({}, on("t")))
    await inside.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert model.kv.labels() == []
    assert log.outcomes() == [("a", "ok"), ("hangs", "cancelled")]
    check_events(log.events)


def test_a_stream_that_is_left_early_ends_the_run() -> None:
    model, log = fake_model(), Log()
    app = attach(chain(("a", says(model)), ("b", says(model))), model, on_event=log, strict=True)
    stream = app.stream({}, stream_mode="updates")
    next(stream)
    stream.close()
    assert model.kv.labels() == []
    check_events(log.events)


@pytest.mark.parametrize("retain", ["run", "thread"])
async def test_a_call_that_ends_after_its_run_leaves_nothing(retain: Any) -> None:
    model, log = fake_model(retain=retain), Log()
    inside, gate, done = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def zombie(state: dict[str, Any]) -> dict[str, Any]:
        loop.call_soon_threadsafe(inside.set)
        assert gate.wait(10)
        model.invoke("hi")  # nobody waits for this one
        done.set()
        return {}

    app = attach(chain(("a", says(model)), ("zombie", zombie)), model, on_event=log, strict=True)
    running = asyncio.create_task(app.ainvoke({}, on("t")))
    await inside.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gate.set()
    assert await asyncio.to_thread(done.wait, 10)
    assert model.kv.nodes() == ([] if retain == "run" else ["a"])
    assert log.reasons()[-1] == "run ended before"
    check_events(log.events)


async def test_a_call_that_was_running_when_its_run_ended_leaves_nothing() -> None:
    model = fake_model(
        retain="run",
    )
    model.delay_s = 0.3
    app = attach(chain(("a", says(model))), model, strict=True)
    running = asyncio.create_task(app.ainvoke({}, on("t")))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.5)
    assert model.kv.serial == 1
    assert model.kv.labels() == []


async def test_a_node_that_runs_out_of_time_ends_once() -> None:
    model, log = fake_model(), Log()

    async def slow(state: dict[str, Any]) -> dict[str, Any]:
        await model.ainvoke("hi")
        await asyncio.sleep(60)
        return {}

    builder = StateGraph(State)
    builder.add_node("slow", slow, timeout=TimeoutPolicy(run_timeout=0.2))
    builder.add_edge(START, "slow")
    with pytest.raises(Exception, match=r"(?i)time"):
        await attach(builder.compile(), model, on_event=log, strict=True).ainvoke({}, on("t"))
    await asyncio.sleep(0.1)
    assert len(log.named("step_end")) == 1
    assert model.kv.labels() == []
    check_events(log.events)


async def test_siblings_of_a_failed_step_are_cancelled_and_leave_nothing() -> None:
    model, log = fake_model(), Log()

    async def expand(state: dict[str, Any]) -> dict[str, Any]:
        await model.ainvoke("hi")
        if state["i"] == 0:
            await asyncio.sleep(0.05)
            msg = "no"
            raise ValueError(msg)
        await asyncio.sleep(60)
        return {}

    with pytest.raises(ValueError, match="no"):
        await attach(fan_out(3, expand), model, on_event=log, strict=True).ainvoke({}, on("t"))
    await asyncio.sleep(0.05)
    assert sorted(log.outcomes())[1:] == [
        ("expand", "cancelled"),
        ("expand", "cancelled"),
        ("expand", "error"),
    ]
    assert model.kv.labels() == []
    check_events(log.events)


# -- graphs inside of graphs -------------------------------------------------------------


def test_a_graph_run_on_a_thread_of_its_own_pauses_by_itself() -> None:
    model, log = fake_model(retain="run"), Log()

    def asks(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        interrupt("ok?")
        return {}

    inner = chain(("asks", asks), checkpointer=InMemorySaver())

    def calls(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        return {"said": [str(inner.invoke({}, on("inner")))]}

    app = attach(chain(("calls", calls)), model, on_event=log, strict=True)
    assert "__interrupt__" in app.invoke({"said": []}, on("outer"))["said"][0]
    assert log.outcomes() == [("asks", "interrupted"), ("calls", "ok")]
    assert [(lb.thread_id, lb.node) for lb in model.kv.labels()] == [("inner", "asks")]
    attach(inner, model, strict=True).invoke(Command(resume=1), on("inner"))
    assert model.kv.labels() == []


def test_a_long_run_does_not_grow_by_its_steps() -> None:
    model, sizes = fake_model(), []
    inner = attach(chain(("in", says(model))), model)

    def again(state: dict[str, Any]) -> Command[Any]:
        n = state["n"]
        inner.invoke({})
        (root,) = {run.root for run in handler.lifecycle._book.runs.values()}
        places = [place for known in root.namespaces.values() for place in known]
        books = (root.n_starts, places, root.first_supersteps, root.run_ids)
        sizes.append([len(book) for book in (*books, root.bus._managers, root.unfinished)])
        return Command(goto="again" if n < 60 else "__end__", update={"n": n + 1})

    builder = StateGraph(State)
    builder.add_node("again", again, destinations=("again", "__end__"))
    builder.add_edge(START, "again")
    app = attach(builder.compile(), model, strict=True)
    handler = app.config["callbacks"][0]
    app.invoke({"n": 0}, on("t", recursion_limit=100))
    assert len(sizes) == 61
    assert sizes[-1] == sizes[2]
