"""Events: each once, in order, for observers and on LangChain's bus."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.func import entrypoint, task

from sidequest_langchain.graph import KVEvent, attach, branch, prune
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import AsyncOnBus, Log, OnBus, chain, check_events, fan_out, on


def tree(model: FakeModel) -> Any:
    """Four branches, of which two are pruned."""

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state['i']}"):
            return {"said": [str(model.invoke("hi").content)]}

    def select(state: dict[str, Any]) -> dict[str, Any]:
        prune("b1", "b2", reason="low score")
        return {}

    return fan_out(4, expand, ("select", select), ("last", lambda state: {}))


def atree(model: FakeModel) -> Any:
    """The same, of asynchronous nodes."""

    async def expand(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state['i']}"):
            return {"said": [str((await model.ainvoke("hi")).content)]}

    async def select(state: dict[str, Any]) -> dict[str, Any]:
        prune("b1", "b2", reason="low score")
        return {}

    async def last(state: dict[str, Any]) -> dict[str, Any]:
        return {}

    return fan_out(4, expand, ("select", select), ("last", last))


def shape(events: list[KVEvent]) -> list[tuple[str, Any]]:
    """What happened, without ids; the order of parallel siblings does not count."""
    told = [(e.name, e.data.get("node"), e.data.get("path")) for e in events]
    return sorted(told, key=str)


NODES = ["__start__", *["expand"] * 4, "select", "last"]
EXPECTED = sorted(
    [
        *[(f"sidequest.step_{edge}", node, None) for node in NODES for edge in ("start", "end")],
        ("sidequest.prune", "select", None),
        *[("sidequest.release", "select", path) for path in ("b1", "b2")],
    ],
    key=str,
)
"""What each run of `tree` and `atree` is told as."""


def drive(app: Any, how: str, config: dict[str, Any]) -> None:
    """Run a graph in one of the ways that LangGraph offers."""

    async def arun() -> None:
        if how == "ainvoke":
            await app.ainvoke({"said": []}, config)
        elif how == "astream":
            async for _ in app.astream({"said": []}, config, stream_mode="messages"):
                pass
        else:
            async for _ in app.astream_events({"said": []}, config, version="v2"):
                pass

    if how == "invoke":
        app.invoke({"said": []}, config)
    elif how in ("updates", "messages", "values"):
        for _ in app.stream({"said": []}, config, stream_mode=how):
            pass
    else:
        asyncio.run(arun())


WAYS = ["invoke", "updates", "messages", "ainvoke", "astream", "astream_events"]


@pytest.mark.parametrize(
    ("build", "how"), [*[(tree, how) for how in WAYS], *[(atree, how) for how in WAYS[3:]]]
)
def test_every_way_to_run_tells_observers_the_same(build: Any, how: str) -> None:
    model, log = fake_model(), Log()
    drive(attach(build(model), model, on_event=log, strict=True), how, on("t"))
    check_events(log.events)
    assert shape(log.events) == EXPECTED
    assert model.kv.branches("t") == ["b0", "b3"]


@pytest.mark.parametrize("how", WAYS)
def test_the_bus_carries_the_same_events_in_the_same_order(how: str) -> None:
    model, log, bus, abus = fake_model(), Log(), OnBus(), AsyncOnBus()
    app = attach(tree(model), model, on_event=log, strict=True)
    drive(app, how, on("t", callbacks=[bus, abus]))
    numbers = [event.data["n_event"] for event in bus.events]
    assert numbers == list(range(len(log.events)))
    assert shape(bus.events) == shape(log.events)
    assert [e.data["n_event"] for e in abus.events] == numbers


async def test_astream_events_shows_them_before_the_graph_ends() -> None:
    model, log = fake_model(), Log()
    app = attach(atree(model), model, on_event=log, strict=True)
    seen = [event async for event in app.astream_events({"said": []}, on("t"), version="v2")]
    custom = [e for e in seen if e["event"] == "on_custom_event"]
    assert [e["data"]["n_event"] for e in custom] == list(range(len(log.events)))
    assert seen[-1]["event"] == "on_chain_end"
    assert seen[-1]["name"] == "LangGraph"
    ends = [e for e in custom if e["name"] == "sidequest.step_end"]
    assert {e["metadata"]["langgraph_node"] for e in ends} == set(NODES)
    run_ids = {e["run_id"] for e in seen if e["event"] == "on_chain_start" and e["name"] == "last"}
    assert {e["run_id"] for e in ends if e["data"]["node"] == "last"} == run_ids


def test_a_run_in_which_nothing_runs_inside_a_node_is_told_to_observers_only() -> None:
    model, log, bus = fake_model(), Log(), OnBus()
    app = attach(chain(("a", lambda s: {}), ("b", lambda s: {})), model, on_event=log)
    app.invoke({}, {"callbacks": [bus]})
    assert [d["node"] for d in log.named("step_end")] == ["a", "b"]
    assert bus.events == []


def test_events_from_before_the_first_model_call_reach_the_bus_late_but_in_order() -> None:
    model, bus = fake_model(), OnBus()
    app = chain(("a", lambda s: {}), ("b", lambda s: {"said": [str(model.invoke("hi").content)]}))
    attach(app, model).invoke({}, {"callbacks": [bus]})
    shown = [(e.name.split(".")[1], e.data.get("node")) for e in bus.events[:4]]
    assert shown == [("step_start", "a"), ("step_end", "a"), ("step_start", "b"), ("step_end", "b")]


def test_what_a_step_cost_and_opened_stands_in_its_end() -> None:
    model, log = fake_model(), Log()

    def node(state: dict[str, Any]) -> dict[str, Any]:
        with branch("x"):
            model.invoke("one")
        with branch("y"):
            list(model.stream("two"))
        return {}

    attach(chain(("node", node)), model, on_event=log).invoke({}, on("t"))
    (end,) = log.named("step_end")
    assert end["n_calls"] == 2
    assert (end["n_reused_tokens"], end["n_prefilled_tokens"]) == (6, 4)
    assert end["n_generated_tokens"] == 2
    assert end["segments"] == [0, 1]
    assert end["branches"] == ["x", "y"]
    assert (end["outcome"], end["thread_id"], end["step"], end["attempt"]) == ("ok", "t", 1, 1)


def test_an_observer_can_leave() -> None:
    model = fake_model()
    app = attach(tree(model), model)
    first, second = Log(), Log()
    handler = app.config["callbacks"][0]
    undo = handler.observe(first)
    handler.observe(second)
    undo()
    undo()
    app.invoke({})
    assert first.events == []
    check_events(second.events)


def test_a_failing_observer_stops_nobody_and_is_counted() -> None:
    model, log = fake_model(), Log()

    def fails(event: KVEvent) -> None:
        msg = "boom"
        raise ValueError(msg)

    app = attach(tree(model), model, on_event=fails)
    handler = app.config["callbacks"][0]
    handler.observe(log)
    app.invoke({}, on("t"))
    assert shape(log.events) == EXPECTED
    assert handler.n_errors == len(log.events)
    assert all(e.__traceback__ is None for e in handler.errors)
    assert model.kv.branches("t") == ["b0", "b3"]


def test_strict_lets_a_failure_reach_the_graph() -> None:
    model = fake_model()

    def fails(event: KVEvent) -> None:
        msg = "boom"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="boom"):
        attach(tree(model), model, on_event=fails, strict=True).invoke({})


def test_a_failing_handler_on_the_bus_does_not_reach_the_node() -> None:
    model, log = fake_model(), Log()

    class Fails(BaseCallbackHandler):
        raise_error = True

        def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
            msg = "boom"
            raise ValueError(msg)

    app = attach(tree(model), model, on_event=log)
    app.invoke({}, {"callbacks": [Fails()]})
    check_events(log.events)
    # The run had no thread: its end released what was left, when the bus was closed already.
    assert log.reasons()[-1] == "run ended"
    assert app.config["callbacks"][0].n_errors == len(log.events) - 1


def test_a_busy_engine_delays_the_release_event_and_nothing_else() -> None:
    model, log, bus = fake_model(), Log(), OnBus()
    model.kv.is_held = True
    attach(tree(model), model, on_event=log, strict=True).invoke({}, on("t", callbacks=[bus]))
    assert log.named("release") == []
    assert model.kv.branches("t") == ["b0", "b1", "b2", "b3"]
    model.kv.let_go()
    assert [d["path"] for d in log.named("release")] == ["b1", "b2"]
    check_events(log.events)
    # The run is over, and its bus with it: releases that come later are for observers only.
    assert "sidequest.release" not in {event.name for event in bus.events}


def test_tasks_of_the_functional_interface_are_steps() -> None:
    model, log = fake_model(), Log()

    @task
    def think(text: str) -> str:
        return str(model.invoke(text).content)

    @entrypoint()
    def flow(text: str) -> str:
        return think(text).result()

    attach(flow, model, on_event=log, strict=True).invoke("hi")
    assert log.outcomes() == [("think", "ok"), ("flow", "ok")]
    inner, outer = log.named("step_end")
    assert inner["checkpoint_ns"].startswith(outer["checkpoint_ns"] + "|think:")
    assert (inner["n_calls"], outer["n_calls"]) == (1, 0)
    check_events(log.events)
