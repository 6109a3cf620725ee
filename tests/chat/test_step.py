"""Which step a call belongs to, and with whom it may share: in graphs, beside them, without any."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from sidequest_langchain.chat.step import BRANCH, called_with, current_label, scope_of

FACTS = {"langgraph_checkpoint_ns": "plan:t1", "langgraph_node": "plan", "langgraph_step": 3}


class State(TypedDict, total=False):
    said: str
    labels: list[Any]


def manager(**metadata: Any) -> SimpleNamespace:
    return SimpleNamespace(metadata=metadata)


def in_context(config: Any, function: Any) -> Any:
    def run() -> Any:
        var_child_runnable_config.set(config)
        return function()

    return copy_context().run(run)


def test_outside_of_a_graph_a_call_is_unattributed():
    label = current_label("sq-1")
    assert (label.call_id, label.path_id) == ("sq-1", "sq-1")
    assert {label.thread_id, label.checkpoint_ns, label.node, label.step, label.branch} == {None}


def test_the_running_config_comes_first_the_run_manager_second_the_calls_config_last():
    running = {"metadata": FACTS, "configurable": {"thread_id": "T"}}
    other = {"langgraph_checkpoint_ns": "b:t2", "langgraph_node": "b", "thread_id": "U"}
    label = in_context(running, lambda: current_label("c", manager(**other)))
    assert (label.node, label.step, label.thread_id) == ("plan", 3, "T")
    label = current_label("c", manager(**other))
    assert (label.node, label.step, label.thread_id, label.task_id) == ("b", None, "U", "t2")
    with called_with({"metadata": other}):
        assert current_label("c").node == "b"
        assert current_label("c", manager(**FACTS)).node == "plan"
    assert current_label("c").node is None


def test_facts_of_two_steps_are_not_mixed():
    running = {"metadata": {"langgraph_checkpoint_ns": "plan:t1"}}
    label = in_context(running, lambda: current_label("c", manager(**FACTS | {"thread_id": "U"})))
    assert (label.checkpoint_ns, label.node, label.step, label.thread_id) == (
        "plan:t1", None, None, "U",
    )  # fmt: skip


def test_the_branch_is_that_of_the_context():
    token = BRANCH.set(("b1", "b0"))
    try:
        label = current_label("c")
    finally:
        BRANCH.reset(token)
    assert (label.branch, label.parent_branch, label.path_id) == ("b1", "b0", "b1")


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"metadata": None, "configurable": None},
        {"metadata": "x", "configurable": 3},
        {"metadata": {"langgraph_checkpoint_ns": 7, "langgraph_step": "x"}},
        {"configurable": {"thread_id": Unspeakable(), "sidequest_tenant": Unspeakable()}},
        "no config",
    ],
)
def test_an_odd_config_costs_the_label_never_the_call(config):
    label = in_context(config, lambda: current_label("c", SimpleNamespace(metadata=None)))
    assert label.thread_id is None
    for isolation in ("thread", "tenant", "shared"):
        assert in_context(config, lambda i=isolation: scope_of(i))
    with called_with(config):
        assert current_label("c").call_id == "c"


def test_a_thread_id_of_another_type_is_told_by_its_text():
    assert (
        in_context({"configurable": {"thread_id": 7}}, lambda: current_label("c")).thread_id == "7"
    )


def scope(isolation: str, **configurable: Any) -> str:
    return in_context({"configurable": configurable}, lambda: scope_of(isolation))


def test_threads_are_isolated_unless_said_otherwise():
    a, b = {"thread_id": "a"}, {"thread_id": "b"}
    assert scope("thread", **a) == scope("thread", **a) != scope("thread", **b)
    assert scope("thread") == scope("thread") != scope("thread", **a)
    assert scope("shared", **a) == scope("shared", **b) == scope("shared")


def test_a_tenant_shares_over_threads_and_with_nobody_else():
    a = {"thread_id": "a", "sidequest_tenant": "x"}
    b = {"thread_id": "b", "sidequest_tenant": "x"}
    other = {"thread_id": "a", "sidequest_tenant": "y"}
    assert scope("tenant", **a) == scope("tenant", **b) != scope("tenant", **other)
    # the same thread id of two tenants is two threads
    assert scope("thread", **a) != scope("thread", **other)


def test_without_a_tenant_tenant_isolation_is_that_of_threads():
    assert scope("tenant", thread_id="a") != scope("tenant", thread_id="b")


def test_no_two_scopes_are_spelled_alike():
    ids = ["a", "b", "a/b", '"', "null", None]
    pairs = list(itertools.product(ids, ids))
    scopes = {
        scope(isolation, thread_id=thread, sidequest_tenant=tenant)
        for isolation in ("thread", "shared")
        for thread, tenant in pairs
    }
    assert len(scopes) == len(pairs) + 1


def graph_of(node: Any):
    graph = StateGraph(State)
    graph.add_node("plan", node)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", END)
    return graph.compile(checkpointer=InMemorySaver())


THREAD = {"configurable": {"thread_id": "T"}}


def check(labels: list[Any]) -> None:
    for label in labels:
        assert (label.node, label.step, label.thread_id) == ("plan", 1, "T")
        assert label.checkpoint_ns == f"plan:{label.task_id}"


def test_a_call_in_a_node_knows_the_node_whatever_is_in_between():
    @tool
    def ask() -> Any:
        """Ask."""
        return current_label("c")

    def node(state, config):
        chain = RunnableLambda(lambda _: current_label("c"))
        with ThreadPoolExecutor(1) as pool, called_with(config):
            lost = pool.submit(current_label, "c").result()
            assert lost.node is None  # a plain thread has no context at all
            kept = pool.submit(copy_context().run, current_label, "c").result()
        return {"labels": [current_label("c"), chain.invoke(0), ask.invoke({}), kept]}

    check(graph_of(node).invoke({"said": ""}, THREAD)["labels"])


async def test_an_async_node_knows_itself_too():
    async def one():
        await asyncio.sleep(0)
        return current_label("c")

    async def node(state):
        gathered = await asyncio.gather(one(), one())
        threaded = await asyncio.to_thread(current_label, "c")
        return {"labels": [*gathered, threaded, await asyncio.create_task(one())]}

    check((await graph_of(node).ainvoke({"said": ""}, THREAD))["labels"])


def test_a_subgraph_is_told_by_the_whole_namespace():
    inner = StateGraph(State)
    inner.add_node("think", lambda _: {"labels": [current_label("c")]})
    inner.add_edge(START, "think")
    inner.add_edge("think", END)
    (label,) = graph_of(inner.compile()).invoke({"said": ""}, THREAD)["labels"]
    outer, own = label.checkpoint_ns.split("|")
    assert (outer.split(":")[0], own.split(":")[0], label.node) == ("plan", "think", "think")
