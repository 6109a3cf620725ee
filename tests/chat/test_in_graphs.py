"""In LangGraph's ways to run and to stream: one message per call, the right label, right text."""

from __future__ import annotations

import asyncio
import functools
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages

from sidequest_langchain import CacheConfig
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    seen: Annotated[list[Any], operator.add]


def graph_of(*nodes, checkpointer=None, **named):
    graph = StateGraph(State)
    for name, node in {**{f"n{i}": n for i, n in enumerate(nodes)}, **named}.items():
        graph.add_node(name, node)
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    return graph.compile(checkpointer=checkpointer)


def plain_text(model, chat, messages, n=8):
    ids = greedy(model, chat.prompt_ids(messages), n)
    return byte_tokenizer().decode(ids, skip_special_tokens=True)


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def chat(make_chat, model):
    return make_chat(model=model)


ASK = {"messages": [HumanMessage("Plan", id="h1")]}


def say(chat, text="Plan"):
    return lambda state: {"messages": [chat.invoke(text)]}


def asay(chat, text="Plan"):
    async def node(state):
        return {"messages": [await chat.ainvoke(text)]}

    return node


def labels(chat):
    return {label.call_id: label for s in chat.kv.segments() for label in s.labels}


@pytest.mark.parametrize("make_node", [say, asay])
def test_the_messages_mode_streams_what_invoke_says(chat, model, make_node):
    app = graph_of(plan=make_node(chat))
    expected = plain_text(model, chat, "Plan")

    async def run():
        return [event async for event in app.astream(ASK, stream_mode=["messages", "values"])]

    if make_node is say:
        events = list(app.stream(ASK, stream_mode=["messages", "values"]))
    else:
        events = asyncio.run(run())
    chunks = [data[0] for mode, data in events if mode == "messages"]
    final = [data for mode, data in events if mode == "values"][-1]["messages"][-1]
    assert len(chunks) > 3
    assert "".join(c.content for c in chunks) == final.content == expected
    assert {c.id for c in chunks} == {final.id}
    assert [bool(c.usage_metadata) for c in chunks].count(True) == 1
    joined = functools.reduce(operator.add, chunks)
    assert joined.usage_metadata == final.usage_metadata
    assert joined.response_metadata == final.response_metadata
    assert labels(chat)[final.id].node == "plan"


@pytest.mark.parametrize("mode", ["messages", "updates", "values", "custom"])
def test_every_mode_of_streaming_gives_one_message_with_usage_and_label(chat, model, mode):
    app = graph_of(plan=say(chat), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": f"t-{mode}"}}
    for _ in app.stream(ASK, config, stream_mode=mode):
        pass
    _, reply = app.get_state(config).values["messages"]
    assert reply.content == plain_text(model, chat, "Plan")
    assert reply.usage_metadata["output_tokens"] == 8
    label = labels(chat)[reply.id]
    assert (label.node, label.step, label.thread_id) == ("plan", 1, f"t-{mode}")


async def test_events_of_version_2_hold_every_chunk_once(chat, model):
    app = graph_of(plan=asay(chat))
    events = [e async for e in app.astream_events(ASK, version="v2")]
    chunks = [e["data"]["chunk"] for e in events if e["event"] == "on_chat_model_stream"]
    (end,) = [e["data"]["output"] for e in events if e["event"] == "on_chat_model_end"]
    assert "".join(c.content for c in chunks) == end.content == plain_text(model, chat, "Plan")
    assert {c.id for c in chunks} == {end.id}


def test_parallel_nodes_are_told_apart(chat, model):
    app = graph_of(one=say(chat, "Plan one"), two=say(chat, "Plan two"))
    texts: dict[str, str] = {}
    for chunk, metadata in app.stream(ASK, stream_mode="messages"):
        node = metadata["langgraph_node"]
        texts[node] = texts.get(node, "") + chunk.content
    assert texts == {name: plain_text(model, chat, f"Plan {name}") for name in ("one", "two")}
    assert {label.node for label in labels(chat).values()} == {"one", "two"}


def test_samples_in_a_streamed_graph_are_all_there(chat):
    def node(state):
        (generations,) = chat.generate([state["messages"]], n=3).generations
        return {"seen": [len(generations), len({g.message.id for g in generations})]}

    app = graph_of(node)
    for _ in app.stream(ASK, stream_mode="messages"):
        pass
    assert app.invoke(ASK)["seen"] == [3, 3]


def test_a_call_is_right_and_labelled_wherever_in_a_node_it_is_made(chat, model):
    expected = plain_text(model, chat, "Plan")

    def in_a_thread(config, pass_config, call):
        with ThreadPoolExecutor(1) as pool:
            given = (config,) if pass_config else ()
            return pool.submit(call, "Plan", *given).result()

    def streamed(text, config=None):
        return functools.reduce(operator.add, chat.stream(text, config))

    def node(state, config):
        replies = {
            "bare": chat.invoke("Plan"),
            "config": chat.invoke("Plan", config),
            "lambda": RunnableLambda(lambda t: chat.invoke(t)).invoke("Plan"),
            "batch": chat.batch(["Plan"])[0],
            "stream": streamed("Plan"),
            "thread, config": in_a_thread(config, True, chat.invoke),
            "thread, stream, config": in_a_thread(config, True, streamed),
            "lost": in_a_thread(config, False, chat.invoke),
            "lost, stream": in_a_thread(config, False, streamed),
        }
        return {"seen": [replies]}

    app = graph_of(plan=node, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "T"}}
    for mode in ("values", "messages"):
        *_, _last = app.stream(ASK, config, stream_mode=mode)
    for replies in app.get_state(config).values["seen"]:
        for how, reply in replies.items():
            assert reply.content == expected, how
            label = labels(chat)[reply.id]
            if how.startswith("lost"):
                assert (label.node, label.thread_id, label.path_id) == (None, None, reply.id)
                assert chat.kv.release(reply.id).n_paths == 1
            else:
                assert (label.node, label.thread_id) == ("plan", "T"), how


async def test_an_async_call_is_right_and_labelled_wherever_it_is_made(chat, model):
    expected = plain_text(model, chat, "Plan")

    async def joined(*given):
        chunks = [chunk async for chunk in chat.astream("Plan", *given)]
        return functools.reduce(operator.add, chunks)

    async def node(state, config):
        loop = asyncio.get_running_loop()
        replies = {
            "bare": await chat.ainvoke("Plan"),
            "config": await chat.ainvoke("Plan", config),
            "stream": await joined(),
            "task": await asyncio.create_task(chat.ainvoke("Plan")),
            "executor, config": await loop.run_in_executor(None, chat.invoke, "Plan", config),
        }
        gathered = await asyncio.gather(chat.ainvoke("Plan"), joined())
        lost = await loop.run_in_executor(None, chat.invoke, "Plan")
        return {"seen": [replies | {"g1": gathered[0], "g2": gathered[1], "lost": lost}]}

    app = graph_of(plan=node, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "T"}}
    state = await app.ainvoke(ASK, config)
    for how, reply in state["seen"][0].items():
        assert reply.content == expected, how
        expected_node = None if how == "lost" else "plan"
        assert labels(chat)[reply.id].node == expected_node, how


def test_an_explicit_thread_is_known_outside_of_graphs_in_every_way_to_call(chat):
    config = {"configurable": {"thread_id": "T"}}
    replies = [
        chat.invoke("Plan", config),
        functools.reduce(operator.add, chat.stream("Plan", config)),
        asyncio.run(chat.ainvoke("Plan", config)),
        chat.batch(["Plan"], config)[0],
        chat.invoke("Plan", config, stream=True),
    ]
    assert {labels(chat)[reply.id].thread_id for reply in replies} == {"T"}
    outside = chat.invoke("Plan")
    assert labels(chat)[outside.id].thread_id is None


def reused(message) -> int:
    return message.usage_metadata["input_token_details"]["cache_read"]


def test_a_prefix_is_shared_inside_of_a_scope_only(make_chat):
    def on(chat, thread=None, tenant=None):
        given = {"thread_id": thread, "sidequest_tenant": tenant}
        configurable = {k: v for k, v in given.items() if v is not None}
        return reused(chat.invoke("The plan of the day", {"configurable": configurable}))

    for isolation, over_threads, over_tenants in (
        ("thread", False, False),
        ("tenant", True, False),
        ("shared", True, True),
    ):
        chat = make_chat(cache=CacheConfig(isolation=isolation))
        assert on(chat, "a", "x") == 0
        assert on(chat, "a", "x") > 0
        assert (on(chat, "b", "x") > 0) == over_threads
        assert (on(chat, "a", "y") > 0) == over_tenants
        assert (on(chat, "c") > 0) == (isolation == "shared")


def test_a_conversation_in_a_graph_reuses_all_of_itself(chat, model):
    app = graph_of(
        plan=lambda state: {"messages": [chat.invoke(state["messages"])]},
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "T"}}
    seen = 0
    for text in ("Plan", "And then?", "And after that?"):
        reply = app.invoke({"messages": [("user", text)]}, config)["messages"][-1]
        assert reused(reply) >= max(seen - 1, 0)
        seen = reply.usage_metadata["total_tokens"] - (
            reply.response_metadata["finish_reason"] == "stop"
        )
    history = app.get_state(config).values["messages"][:-1]
    assert reply.content == plain_text(model, chat, history)
    chat.kv.check_integrity()
