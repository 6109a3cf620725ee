"""Binding graphs to models: same type, counted once, in the books of the right model."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField, RunnableConfig
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph import (
    SideQuestCallbackHandler,
    attach,
    branch,
    current_step,
    handler_of,
    prune,
    session,
)
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import Log, OnBus, State, chain, check_events, fan_out, on


def calls(model: FakeModel) -> Any:
    def node(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state.get('i', 0)}"):
            return {"said": [str(model.invoke("hi").content)]}

    return node


def prunes(*names: str) -> Any:
    return lambda state: prune(*names) and {}


def test_it_returns_a_graph_of_the_same_type_and_changes_nothing() -> None:
    model, graph = fake_model(), chain(("a", calls(fake_model())))
    attached = attach(graph, model)
    assert isinstance(attached, CompiledStateGraph)
    assert graph.config is None or "callbacks" not in graph.config
    handler = attached.config["callbacks"][0]
    assert isinstance(handler, SideQuestCallbackHandler)
    assert handler_of(attached, model) is handler
    assert handler_of(graph, model) is None
    assert handler_of(attached, fake_model()) is None


def test_attaching_twice_adds_the_observer_and_nothing_else() -> None:
    model, first, second = fake_model(), Log(), Log()
    once = attach(chain(("a", calls(model))), model, on_event=first)
    twice = attach(once, model, on_event=second)
    assert twice is once
    twice.invoke({}, on("t"))
    assert [e.name for e in first.events] == [e.name for e in second.events]
    check_events(first.events)


def test_a_subgraph_that_is_attached_too_is_counted_once() -> None:
    model, above, below, bus = fake_model(), Log(), Log(), OnBus()
    nodes = (("open", calls(model)), ("select", prunes("b0")))
    inner = attach(chain(*nodes), model, on_event=below)
    outer = attach(chain(("sub", inner), ("after", calls(model))), model, on_event=above)
    outer.invoke({}, on("t", callbacks=[bus]))
    check_events(above.events)
    check_events(bus.events)
    assert len(bus.events) == len(above.events)
    assert [d["node"] for d in above.named("step_end")] == ["open", "select", "sub", "after"]
    assert [d["node"] for d in below.named("step_end")] == ["open", "select"]
    assert len(above.named("prune")) == len(below.named("prune")) == 1
    assert [d["bytes"] for d in above.named("release")] == [100]
    assert [reason for _, reason in model.kv.posted] == ["pruned"]


def test_handlers_of_one_model_given_in_other_ways_are_counted_once_too() -> None:
    model, log, extra = fake_model(), Log(), Log()
    app = attach(chain(("open", calls(model)), ("select", prunes("b0"))), model, on_event=log)
    given = SideQuestCallbackHandler(model, on_event=extra)
    with session(model):
        app.invoke({}, on("t", callbacks=[given]))
    check_events(log.events)
    check_events(extra.events)
    assert len(log.events) == len(extra.events)
    assert [reason for _, reason in model.kv.posted] == ["pruned"]


def test_two_models_of_one_graph_each_give_up_their_own() -> None:
    one, two, log_one, log_two = fake_model(), fake_model(), Log(), Log()
    graph = chain(("a", calls(one)), ("b", calls(two)), ("select", prunes("b0")))
    app = attach(attach(graph, one, on_event=log_one), two, on_event=log_two)
    app.invoke({}, on("t"))
    assert one.kv.labels() == two.kv.labels() == []
    check_events(log_one.events)
    check_events(log_two.events)
    assert [d["n_calls"] for d in log_one.named("step_end")] == [1, 1, 0]


def test_a_bound_model_is_the_model() -> None:
    model = fake_model()
    app = attach(chain(("a", calls(model))), model.bind(stop=["x"]).with_retry())
    app.invoke({})
    assert model.kv.serial == 1
    assert model.kv.labels() == []


@pytest.mark.parametrize("what", [object(), "model", None])
def test_what_is_no_model_of_ours_is_refused(what: Any) -> None:
    with pytest.raises(ConfigError, match="a SideQuestChatModel"):
        attach(chain(("a", lambda s: {})), what)


def test_a_graph_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile it first: builder\.compile\(\)"):
        attach(StateGraph(State), fake_model())  # type: ignore[type-var]


def run_and_let_go(ends: str) -> tuple[weakref.ref[Any], weakref.ref[Any]]:
    """Run a graph, and keep nothing of it but where its cache and its handler were."""
    model, bus = fake_model(), OnBus()

    async def node(state: dict[str, Any]) -> dict[str, Any]:
        with branch("b", parent="a"):
            await model.ainvoke("hi")
        prune("b")
        if ends == "cancelled":
            raise asyncio.CancelledError
        if ends == "by an error":
            raise ValueError(ends)
        return {}

    app = attach(chain(("a", node)), model, on_event=lambda event: model.kv)
    with suppress(Exception):
        asyncio.run(app.ainvoke({}, on("t", callbacks=[bus])))
    return weakref.ref(model.kv), weakref.ref(bus)


@pytest.mark.parametrize("ends", ["well", "by an error", "cancelled"])
def test_a_model_is_not_kept_alive(ends: str) -> None:
    kv, bus = run_and_let_go(ends)
    gc.collect()
    assert kv() is None
    assert bus() is None


def test_a_model_that_is_not_loaded_is_not_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        msg = "loaded"
        raise AssertionError(msg)

    monkeypatch.setattr("sidequest_langchain.chat.serving.engine_for", load)
    model, log = SideQuestChatModel(model="smollm2-135m"), Log()
    app = attach(chain(("a", prunes("x"))), model, on_event=log, strict=True)
    app.invoke({})
    assert log.outcomes() == [("a", "ok")]
    assert log.named("prune")[0]["paths"] == ["x"]


def test_copies_of_a_model_are_that_model() -> None:
    model = SideQuestChatModel(model="smollm2-135m")
    copies = [
        copy.deepcopy(model),
        model.bind(temperature=1.0),
        model.with_fallbacks([model]),
        model.configurable_fields(temperature=ConfigurableField("t")),
        model.configurable_fields(temperature=ConfigurableField("t")).with_retry(),
    ]
    app = attach(chain(("a", lambda s: {})), model)
    assert all(handler_of(app, other) is app.config["callbacks"][0] for other in copies)
    assert handler_of(app, SideQuestChatModel(model="smollm2-135m")) is None


# -- session -----------------------------------------------------------------------------


def test_a_session_attaches_whatever_runs_inside() -> None:
    model, log = fake_model(), Log()
    graph = chain(("open", calls(model)), ("select", prunes("b0")))
    with session(model, on_event=log, strict=True) as handler:
        graph.invoke({}, on("t"))
        asyncio.run(graph.ainvoke({}, on("t")))
    n_seen = len(log.events)
    assert model.kv.branches() == []
    graph.invoke({}, on("t"))
    assert isinstance(handler, SideQuestCallbackHandler)
    check_events(log.events)
    assert (len(log.named("prune")), len(log.events)) == (2, n_seen)
    assert model.kv.branches() == ["b0"]  # nobody watched, and the registry knows no such model


# -- where nothing is attached -----------------------------------------------------------


class Engines:
    """Stands in for the registry of live engines."""

    def __init__(self, *models: FakeModel) -> None:
        self.models = models

    def __call__(self) -> list[Any]:
        return list(self.models)


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """A model that the registry knows."""
    model = fake_model()
    monkeypatch.setattr("sidequest_langchain.graph.pruning.live_engines", Engines(model))
    return model


def test_in_a_graph_that_is_not_attached_it_applies_at_once_to_the_thread(lone: FakeModel) -> None:
    seen = []

    def select(state: dict[str, Any]) -> dict[str, Any]:
        seen.append((prune("b0"), lone.kv.branches("t")))
        return {}

    graph = chain(("open", calls(lone)), ("select", select))
    chain(("open", calls(lone))).invoke({}, on("other"))
    graph.invoke({}, on("t"))
    ((receipt, left),) = seen
    assert (receipt.status, receipt.freed_bytes, left) == ("applied", 100, [])
    assert lone.kv.branches("other") == ["b0"]


def test_outside_of_a_graph_it_applies_at_once(lone: FakeModel) -> None:
    with branch("x"):
        lone.invoke("hi")
    message = lone.invoke("hi")
    lone.invoke("hi")
    assert prune("x").freed_bytes == 100
    assert prune(message).freed_bytes == 100
    nobody = prune("nobody")
    assert (nobody.status, nobody.freed_bytes, nobody.releases[0].n_paths) == ("applied", 0, 0)
    assert len(lone.kv.labels()) == 1


def test_a_thread_without_the_context_needs_the_config(lone: FakeModel) -> None:
    log, seen = Log(), []

    def select(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(current_step).result())
            seen.append(pool.submit(current_step, config).result())
            seen.append(pool.submit(prune, "b0", config=config).result().status)
        assert lone.kv.branches() == ["b0"]
        return {}

    app = attach(chain(("open", calls(lone)), ("select", select)), lone, on_event=log, strict=True)
    app.invoke({}, on("t"))
    assert seen[0] is None
    assert (seen[1].node, seen[1].thread_id) == ("select", "t")
    assert seen[2] == "staged"
    assert lone.kv.branches() == []


def test_a_call_without_the_context_is_unattributed_and_can_be_released(lone: FakeModel) -> None:
    seen = []

    def node(state: dict[str, Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            seen.extend(pool.map(lone.invoke, ["one", "two"]))
        return {}

    attach(chain(("node", node)), lone, strict=True).invoke({})
    assert [(lb.thread_id, lb.checkpoint_ns) for lb in lone.kv.labels()] == [(None, None)] * 2
    prune(seen[0])
    assert [label.call_id for label in lone.kv.labels()] == [seen[1].id]


# -- current_step ------------------------------------------------------------------------


def test_current_step_is_the_innermost() -> None:
    seen = []

    def look(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(current_step())
        return {}

    chain(("sub", chain(("inner", look))), ("outer", look)).invoke({}, on("t"))
    inner, outer = seen
    assert current_step() is None
    assert (inner.node, inner.step, outer.node, outer.step) == ("inner", 1, "outer", 2)
    assert inner.checkpoint_ns.split("|")[0].startswith("sub:")
    assert inner.checkpoint_ns.endswith(f"|inner:{inner.task_id}")
    assert (inner.thread_id, inner.attempt) == ("t", 1)
    assert inner.checkpoint_id


# -- many at once ------------------------------------------------------------------------


def test_many_threads_and_tasks_share_a_handler() -> None:
    model, log = fake_model(), Log()

    def select(state: dict[str, Any]) -> dict[str, Any]:
        prune(*[f"b{i}" for i in range(1, 6)])
        return {}

    app = attach(fan_out(6, calls(model), ("select", select)), model, on_event=log, strict=True)
    bare = attach(fan_out(3, calls(model)), model, on_event=log, strict=True)

    async def tasks() -> None:
        one = [app.ainvoke({}, on(f"task-{n}")) for n in range(10)]
        two = [bare.ainvoke({}) for _ in range(10)]
        await asyncio.gather(*one, *two)

    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(app.invoke, {}, on(f"thread-{n}")) for n in range(20)]
        runs += [pool.submit(bare.invoke, {}) for _ in range(20)]
        asyncio.run(tasks())
        for run in runs:
            run.result(60)
    check_events(log.events)
    assert model.kv.serial == 6 * 30 + 3 * 30
    assert model.kv.branches() == ["b0"] * 30
    book = app.config["callbacks"][0].lifecycle._book
    assert (len(book.runs), len(book._calls)) == (0, 0)
