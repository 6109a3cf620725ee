"""Graphs that fan out under pressure, nest, fork and repeat themselves, over one chat model."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import Send

from sidequest_langchain import attach, branch, prune
from tests.cases.conftest import BYTES_PER_TOKEN
from tests.support import templates
from tests.support.force import chain, force
from tests.support.tok import END, byte_tokenizer

MakeChat = Callable[..., Any]
CITIES = ("Rome", "Oslo", "Lisbon", "Paris", "Han", "城市", "score", "back")
TRUNK = SystemMessage("Plan the trip")


class Fan(TypedDict, total=False):
    city: str
    said: Annotated[list[tuple[str, Any]], operator.add]


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def on(thread: str, **more: Any) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}, **more}


def prompt(city: str) -> list[Any]:
    return [TRUNK, HumanMessage(f"fly to {city}")]


def fan(one: Any, *, is_async: bool) -> Any:
    def expand(state: Fan) -> Fan:
        return {"said": [(state["city"], one.chat.invoke(prompt(state["city"])))]}

    async def aexpand(state: Fan) -> Fan:
        return {"said": [(state["city"], await one.chat.ainvoke(prompt(state["city"])))]}

    builder = StateGraph(Fan)
    builder.add_node("expand", aexpand if is_async else expand)
    sends = [Send("expand", {"city": city}) for city in CITIES]
    builder.add_conditional_edges(START, lambda _: sends, ["expand"])
    return attach(builder.compile(), one.chat)


def talk(one: Any, **compiled: Any) -> Any:
    builder = StateGraph(Talk)
    builder.add_node("say", lambda s: {"messages": [one.chat.invoke(s["messages"])]})
    builder.add_edge(START, "say")
    return builder.compile(**compiled)


def say(app: Any, text: str, config: Any) -> list[AnyMessage]:
    return app.invoke({"messages": [HumanMessage(text)]}, config)["messages"]


def check(one: Any, messages: list[AnyMessage]) -> None:
    assert one.answered(messages[-1]) == one.expected(messages[:-1])


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
def test_branches_that_run_over_each_other_stay_apart(make_chat: MakeChat, way: str):
    """Many times, the threads being made to switch in every layer."""
    one = make_chat(max_tokens=2)
    right = {city: one.expected(prompt(city), 2) for city in CITIES}
    ids = {city: one.chat.prompt_ids(prompt(city)) for city in CITIES}
    rows = {tuple([*ids[c], *right[c]][: len(ids[c]) + 1]) for c in CITIES}
    for layer in one.weights.model.layers:
        layer.register_forward_hook(lambda *_: time.sleep(0))
    app = fan(one, is_async=way == "ainvoke")
    for n in range(10):
        if way == "batch":
            prompts = [prompt(city) for city in CITIES]
            replies = one.chat.batch(prompts, {**on(f"t{n}"), "max_concurrency": 8})
            said = list(zip(CITIES, replies, strict=True))
        elif way == "invoke":
            said = app.invoke({}, on(f"t{n}"))["said"]
        else:
            said = asyncio.run(app.ainvoke({}, on(f"t{n}")))["said"]
        assert sorted(city for city, _ in said) == sorted(CITIES)
        for city, reply in said:
            assert one.answered(reply) == right[city]
            assert reply.response_metadata["sidequest"]["queue_s"] >= 0
        # No path holds a token of another: each is its prompt and its own answer.
        assert one.resident() == rows
        heads = {row[:k] for row in rows for k in range(1, len(row) + 1)}
        assert one.n_bytes == BYTES_PER_TOKEN * len(heads)
        one.chat.kv.clear(f"t{n}")
        assert one.n_bytes == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_releasing_one_of_eight_visits_leaves_seven(make_chat: MakeChat, is_async: bool):
    one = make_chat()
    app = fan(one, is_async=is_async)
    run = (
        (lambda: asyncio.run(app.ainvoke({}, on("t"))))
        if is_async
        else (lambda: app.invoke({}, on("t")))
    )
    said = dict(run()["said"])
    labels = {lb.call_id: lb for info in one.chat.kv.segments("t") for lb in info.labels}
    assert len({lb.task_id for lb in labels.values()}) == len(said) == 8
    before = one.resident()
    label = labels[said["Oslo"].id]
    n_bytes = one.n_bytes
    receipt = one.chat.kv.release(label.task_id, thread_id="t")
    assert (receipt.n_paths, n_bytes - one.n_bytes) == (1, receipt.freed_bytes)
    ids = tuple(one.chat.prompt_ids(prompt("Oslo")))
    assert one.resident() == {path for path in before if path[: len(ids)] != ids}
    assert len(one.resident()) == 7
    for city in CITIES:
        reply = one.chat.invoke(prompt(city), on("t"))
        assert one.answered(reply) == one.expected(prompt(city))


def test_a_fork_through_a_subgraph_spares_the_head(make_chat: MakeChat):
    one = make_chat()
    builder = StateGraph(Talk)
    builder.add_node("inner", talk(one))
    builder.add_edge(START, "inner")
    app = attach(builder.compile(checkpointer=InMemorySaver()), one.chat)
    for text in ("Plan", "then Rome", "then Oslo"):
        head = say(app, text, on("t"))
        check(one, head)
    n_bytes, paths = one.n_bytes, one.resident()
    history = list(app.get_state_history(on("t")))
    (old,) = [s for s in history if len(s.values.get("messages", ())) == 2 and not s.next]
    forked = say(app, "then Lisbon", old.config)
    check(one, forked)
    assert forked[-1].usage_metadata["input_token_details"]["cache_read"] > 0
    assert one.chat.kv.release(forked[-1].id).n_paths == 1
    assert (one.n_bytes, one.resident()) == (n_bytes, paths)
    (tip,) = [s for s in history if len(s.values.get("messages", ())) == 6 and not s.next]
    check(one, say(app, "Now", tip.config))


def test_an_agent_that_calls_its_tool_for_ever_stops_and_the_thread_goes_on(make_chat: MakeChat):
    """The same call again and again, to the recursion limit."""
    one, tok = make_chat(template=templates.TOOLS, max_tokens=4), byte_tokenizer()
    call = {"name": "look_up", "args": {"city": "Oslo"}, "type": "tool_call"}

    def agent(state: Talk) -> dict[str, Any]:
        reply = one.chat.invoke(state["messages"])
        return {"messages": [reply.model_copy(update={"tool_calls": [{**call, "id": reply.id}]})]}

    def tool(state: Talk) -> dict[str, Any]:
        last = state["messages"][-1]
        return {"messages": [{"role": "tool", "content": "42", "tool_call_id": last.id}]}

    builder = StateGraph(Talk)
    builder.add_node("agent", agent)
    builder.add_node("tool", tool)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", "tool")
    builder.add_edge("tool", "agent")
    saver = InMemorySaver()
    app = attach(builder.compile(checkpointer=saver), one.chat)
    (word,) = tok.encode("Plan", add_special_tokens=False)[:1]
    with (
        force(one.weights, chain({word: tok.eos_token_id})),
        pytest.raises(GraphRecursionError, match="6"),
    ):
        app.invoke({"messages": [HumanMessage("Where?")]}, on("t", recursion_limit=6))
    committed = app.get_state(on("t")).values["messages"]
    assert sum(isinstance(m, AIMessage) for m in committed) == 3
    while getattr(committed[-1], "tool_calls", None):
        committed = committed[:-1]
    assert one.n_bytes <= BYTES_PER_TOKEN * (len(one.chat.prompt_ids(committed)) + 40)
    asked = [*committed, HumanMessage("And now?")]
    reply = one.chat.invoke(asked, on("t"))
    assert one.answered(reply) == one.expected(asked, 4)
    one.chat.kv.clear("t")
    assert one.n_bytes == 0
    assert END not in reply.content


def test_a_prune_takes_effect_within_one_step_of_its_nodes_end(make_chat: MakeChat):
    """Another call keeps the engine busy all the while."""
    one = make_chat()
    passes: list[int] = []
    ends: dict[str, int] = {}

    def count(*_: Any) -> None:
        passes.append(1)
        time.sleep(0.01)

    hook = one.weights.register_forward_pre_hook(count)
    tree = one.chat.engine._core.tree
    undo = one.chat.kv.observe(lambda receipt: ends.setdefault(receipt.path, len(passes)))

    def propose(state: Fan) -> Fan:
        with branch("loser"):
            return {"said": [("loser", one.chat.invoke(prompt("Rome")))]}

    def select(state: Fan) -> Fan:
        prune("loser")
        ends["node"] = len(passes)
        return {}

    builder = StateGraph(Fan)
    builder.add_node("propose", propose)
    builder.add_node("select", select)
    builder.add_edge(START, "propose")
    builder.add_edge("propose", "select")
    app = attach(builder.compile(), one.chat)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(one.chat.invoke, "Plan", max_tokens=120)
        app.invoke({}, on("t"))
        assert not busy.done()
        assert one.chat.kv.usage().n_paths <= 1
        busy.result()
    undo()
    hook.remove()
    # The pass that was under way when the node ended may have gone to its end, and no other.
    assert 0 <= ends["loser"] - ends["node"] <= 2
    assert all(path.label.branch != "loser" for path in tree.paths.values())
    assert one.answered(busy.result()) == one.expected("Plan", 120)
