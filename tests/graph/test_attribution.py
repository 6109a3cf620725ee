"""However a node calls the model, the call belongs to that node, and goes when the node's does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnableParallel
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_core.tools import tool

from sidequest_langchain.graph import attach, prune
from tests.graph.conftest import Tiny
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import Log, chain, on

Say = Callable[[FakeModel, RunnableConfig], Any]


def by_tool(model: FakeModel, config: RunnableConfig) -> Any:
    @tool
    def ask(text: str) -> str:
        """Ask the model."""
        return str(model.invoke(text).content)

    return ask.invoke({"text": "hi"})


def by_pool(model: FakeModel, config: RunnableConfig) -> Any:
    with ContextThreadPoolExecutor(2) as pool:
        return list(pool.map(model.invoke, ["one", "two"]))


def by_config(model: FakeModel, config: RunnableConfig) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(model.invoke, "hi", config).result()


SYNC: dict[str, Say] = {
    "invoke": lambda model, config: model.invoke("hi"),
    "stream": lambda model, config: list(model.stream("hi")),
    "batch": lambda model, config: model.batch(["one", "two"]),
    "bound": lambda model, config: model.bind(stop=["x"]).invoke("hi"),
    "lambda": lambda model, config: RunnableLambda(model.invoke).invoke("hi"),
    "parallel": lambda model, config: RunnableParallel(a=model, b=model).invoke("hi"),
    "tool": by_tool,
    "pool with the context": by_pool,
    "pool with the config": by_config,
    "own metadata": lambda model, config: model.invoke("hi", {"metadata": {"mine": 1}}),
    "own callbacks": lambda model, config: model.invoke("hi", {"callbacks": []}),
}
ASYNC: dict[str, Say] = {
    "ainvoke": lambda model, config: model.ainvoke("hi"),
    "abatch": lambda model, config: model.abatch(["one", "two"]),
    "gather": lambda model, config: _gather(model.ainvoke("one"), model.ainvoke("two")),
    "task": lambda model, config: asyncio.create_task(model.ainvoke("hi")),
    "to_thread": lambda model, config: asyncio.to_thread(model.invoke, "hi"),
    "executor with the config": lambda model, config: asyncio.get_running_loop().run_in_executor(
        None, model.invoke, "hi", config
    ),
}


async def _gather(*calls: Any) -> Any:
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("how", [*SYNC, *ASYNC])
def test_a_call_belongs_to_the_node_it_is_made_in(how: str) -> None:
    model, log = fake_model(), Log()

    def node(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        SYNC[how](model, config)
        return {}

    async def anode(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        await ASYNC[how](model, config)
        return {}

    node_of = node if how in SYNC else anode
    app = attach(chain(("here", node_of)), model, on_event=log, strict=True)
    asyncio.run(app.ainvoke({}, on("t")))
    labels = model.kv.labels()
    assert len(labels) in (1, 2)
    assert {(lb.node, lb.thread_id) for lb in labels} == {("here", "t")}
    (step,) = log.named("step_end")
    assert {label.task_id for label in labels} == {step["task_id"]}
    if how != "own callbacks":  # then nobody is told of the call
        assert step["n_calls"] == len(labels)
    asyncio.run(app.ainvoke({}))
    assert len(model.kv.labels()) == len(labels)


def test_parallel_instances_of_one_name_are_told_apart(tiny_chat: Callable[..., Tiny]) -> None:
    """Two calls in a node, a tool's call, and one subgraph mounted twice: all of one node name."""
    model, log = tiny_chat(), Log()

    @tool
    def ask(text: str) -> str:
        """Ask the model."""
        return str(model.invoke(text).content)

    def think(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("Plan one")
        model.invoke("score two")
        ask.invoke({"text": "fly three"})
        return {}

    inner = chain(("think", think))
    graph = chain(("think", think), ("left", inner), ("right", inner))
    attach(graph, model, on_event=log, strict=True).invoke({}, on("1"))

    def labels() -> list[Any]:
        return [label for info in model.kv.segments("1") for label in info.labels]

    found = labels()
    assert len(found) == len({label.call_id for label in found}) == 9
    assert {label.node for label in found} == {"think"}
    assert len({label.checkpoint_ns for label in found}) == 3
    # All three say the same: stored once, and gone when the last of them goes.
    n_bytes = model.n_bytes
    tasks = list({label.task_id: None for label in found})
    for n, task in enumerate(tasks):
        assert model.n_bytes == n_bytes
        receipt = model.kv.release(task)
        assert receipt.n_paths == 3
        assert len(labels()) == 9 - 3 * (n + 1)
    assert model.n_bytes == 0


def test_a_namespace_names_all_that_is_nested_below_it() -> None:
    model = fake_model()
    inner = chain(("plan", lambda state: model.invoke("hi") and {}))
    graph = chain(("plan", inner), ("planner", lambda state: model.invoke("hi") and {}))
    attach(graph, model).invoke({}, on("t"))
    outer = model.kv.labels()[0].checkpoint_ns.split("|")[0]
    attach(chain(("act", lambda state: prune(outer) and {})), model).invoke({}, on("t"))
    assert model.kv.nodes() == ["planner"]
