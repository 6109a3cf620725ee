"""Agents and tools over one chat model: loops, pauses, drafts, broken calls, counted by hand."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    AnyMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel, Field

from sidequest_langchain import attach, branch, prune
from sidequest_langchain.config import CacheConfig
from tests.cases.conftest import BYTES_PER_TOKEN
from tests.chat.speaking import THINKING
from tests.graph.agents import answers, call, look, saying
from tests.graph.graphs import Log, check_events
from tests.support import templates
from tests.support.oracle import greedy, storage_bytes
from tests.support.tiny import END_ID, tiny_model

MakeChat = Callable[..., Any]
QUESTION = {"messages": [("user", "Plan a trip.")]}


def on(thread: str, **more: Any) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}, **more}


def roomy() -> Any:
    return tiny_model("llama", max_position_embeddings=4096)


def make_one(make_chat: MakeChat, **given: Any) -> Any:
    return make_chat(model=roomy(), **({"template": templates.TOOLS, "max_tokens": 64} | given))


def reused(message: Any) -> int:
    return message.usage_metadata["input_token_details"]["cache_read"]


def n_common(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADDING = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SIX_STEPS = [call("Oslo"), ADDING, call("Rome"), call("Paris"), ADDING, call("Oslo")]


# -- one agent, every way to run it ------------------------------------------------------


def say(message: Any) -> tuple[Any, ...]:
    calls = [(c["name"], c["args"]) for c in getattr(message, "tool_calls", ())]
    return message.type.removesuffix("Chunk").replace("AIMessage", "ai"), message.text, calls


MODES = [
    "invoke",
    "ainvoke",
    "values",
    "updates",
    "messages",
    "tasks",
    "debug",
    "custom",
    ["values", "messages", "updates"],
    "async messages",
    "async values",
    "events v2",
]


async def arun(app: Any, mode: Any, config: Any) -> list[Any]:
    if mode == "ainvoke":
        return [await app.ainvoke(QUESTION, config)]
    if mode == "events v2":
        return [e async for e in app.astream_events(QUESTION, config, version="v2")]
    modes = mode.removeprefix("async ")
    return [chunk async for chunk in app.astream(QUESTION, config, stream_mode=modes)]


def run(app: Any, mode: Any, config: Any) -> list[Any]:
    if mode == "invoke":
        return [app.invoke(QUESTION, config)]
    if isinstance(mode, str) and mode.split()[0] in ("ainvoke", "async", "events"):
        return asyncio.run(arun(app, mode, config))
    return list(app.stream(QUESTION, config, stream_mode=mode))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_agent_of_six_steps_is_the_same_in_every_mode(make_chat: MakeChat, mode: Any):
    one, log = make_one(make_chat), Log()
    agent = create_agent(
        one.chat, [look, add], system_prompt="The rule", checkpointer=InMemorySaver()
    )
    app = attach(agent, one.chat, on_event=log, strict=True)
    with saying(one.chat, *SIX_STEPS) as script:
        seen = run(app, mode, on("t"))
    assert script.n_left == 0
    messages = app.get_state(on("t")).values["messages"]
    said = answers(messages)
    assert [c["args"] for m in said for c in m.tool_calls] == [
        {"place": "Oslo"},
        {"a": 2, "b": 3},
        {"place": "Rome"},
        {"place": "Paris"},
        {"a": 2, "b": 3},
        {"place": "Oslo"},
    ]
    assert [m.content for m in messages if isinstance(m, ToolMessage)].count("5") == 2
    # The last answer is the model's own: that of plain transformers to the whole conversation.
    bound = one.chat.bind_tools([look, add])
    prompts = [
        bound.bound.prompt_ids([SystemMessage("The rule"), *messages[:n]], **bound.kwargs)
        for n, m in enumerate(messages)
        if isinstance(m, AIMessage)
    ]
    assert one.answered(said[-1]) == greedy(one.weights, prompts[-1], 64)
    # Each call reads all that was said before it; the path holds each row once.
    for n, message in enumerate(said):
        usage = message.usage_metadata
        assert usage["input_tokens"] == len(prompts[n])
        assert usage["output_tokens"] == len(one.answered(message)) + (
            message.response_metadata["finish_reason"] != "length"
        )
        if n:
            before = [*prompts[n - 1], *one.answered(said[n - 1])]
            assert reused(message) >= len(before) - 1
            assert prompts[n][: len(before)] == before
    whole = [*prompts[-1], *one.answered(said[-1])]
    assert one.n_bytes in [BYTES_PER_TOKEN * m for m in (len(whole) - 1, len(whole))]
    check_events(log.events)
    assert [d["n_calls"] for d in log.named("step_end") if d["node"] == "model"] == [1] * 7
    if mode in ("messages", "async messages"):
        merged: dict[str, Any] = {}
        for chunk, _ in seen:
            known = merged.get(chunk.id)
            is_part = isinstance(chunk, AIMessageChunk) and known is not None
            merged[chunk.id] = known + chunk if is_part else chunk
        whole_ones = [m for m in messages if not isinstance(m, HumanMessage)]
        assert [say(m) for m in merged.values()] == [say(m) for m in whole_ones]
        for message in said:
            assert merged[message.id].usage_metadata == message.usage_metadata
    if mode == "events v2":
        ends = [e["data"]["output"] for e in seen if e["event"] == "on_chat_model_end"]
        assert [say(m) for m in ends] == [say(m) for m in said]
    one.chat.kv.clear("t")
    assert one.n_bytes == 0


# -- loops that do not end, pauses, drafts and broken calls ------------------------------


@pytest.mark.parametrize("retain", ["run", "thread"])
def test_an_agent_with_bound_tools_that_never_stops_is_stopped(make_chat: MakeChat, retain: Any):
    one, log = make_one(make_chat, cache=CacheConfig(retain=retain)), Log()
    agent = create_agent(one.chat, [look], checkpointer=InMemorySaver())
    app = attach(agent, one.chat, on_event=log, strict=True)
    with saying(one.chat, *[call("Oslo")] * 9), pytest.raises(GraphRecursionError, match="6"):
        app.invoke(QUESTION, on("t", recursion_limit=6))
    messages = app.get_state(on("t")).values["messages"]
    assert len(answers(messages)) == 3
    bound = one.chat.bind_tools([look])
    committed = bound.bound.prompt_ids([*messages], **bound.kwargs)
    assert one.n_bytes <= BYTES_PER_TOKEN * len(committed)
    assert (one.n_bytes == 0) == (retain == "run")
    again = app.invoke({"messages": [HumanMessage("And now?")]}, on("t"))["messages"]
    prompt = bound.bound.prompt_ids(again[:-1], **bound.kwargs)
    assert one.answered(again[-1]) == greedy(one.weights, prompt, 64)
    if retain == "thread":
        # All but the result that the limit kept from the model.
        n = messages.index(answers(messages)[-1])
        seen = [*bound.bound.prompt_ids(messages[:n], **bound.kwargs), *one.answered(messages[n])]
        assert len(seen) <= n_common([*seen, END_ID], prompt) + 1
        assert reused(again[-1]) >= len(seen)
    check_events(log.events)
    one.chat.kv.clear("t")
    assert one.n_bytes == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_asks_back_is_resumed_without_asking_the_model_again(
    make_chat: MakeChat, is_async: bool
):
    """Two calls at once; one asks its user, having asked the model first."""
    one, log, ran = make_one(make_chat, max_tokens=160), Log(), []

    @tool
    def book(place: str) -> str:
        """Book a place."""
        ran.append(place)
        advice = one.chat.invoke([HumanMessage(f"Is {place} far?")], max_tokens=4)
        return f"{interrupt(place)} {advice.text}"

    booking = call("Rome").replace('"look"', '"book"')
    agent = create_agent(one.chat, [look, book], checkpointer=InMemorySaver())
    app = attach(agent, one.chat, on_event=log, strict=True)

    def go(given: Any) -> Any:
        return asyncio.run(app.ainvoke(given, on("t"))) if is_async else app.invoke(given, on("t"))

    with saying(one.chat, call("Oslo") + booking):
        first = go(QUESTION)
        assert [i.value for i in first["__interrupt__"]] == ["Rome"]
        n_bytes = one.n_bytes
        done = go(Command(resume="yes"))
    assert ran == ["Rome", "Rome"]
    said = answers(done["messages"])
    assert [c["name"] for c in said[0].tool_calls] == ["look", "book"]
    assert len(said) == 2
    results = [m for m in done["messages"] if isinstance(m, ToolMessage)]
    assert len(results) == 2
    # The model was asked twice in the loop and once for each run of the tool; the paused
    # attempt's own path was hit and then given up.
    calls = [d["n_calls"] for d in log.named("step_end") if d["node"] == "model"]
    assert calls == [1, 1]
    assert log.reasons() == ["attempt abandoned"]
    labels = [lb for info in one.chat.kv.segments("t") for lb in info.labels]
    assert sorted(str(lb.node) for lb in labels) == ["model", "model", "tools"]
    assert n_bytes < one.n_bytes
    check_events(log.events)


def test_a_draft_in_a_thought_calls_nothing_and_the_thought_outlives_the_checkpoint(
    make_chat: MakeChat,
):
    """The template wants the thought back in the tool loop; the message came from a saver."""
    one, ran = make_one(make_chat, template=THINKING, max_tokens=200), []

    @tool
    def look(place: str) -> str:
        """Look a place up."""
        ran.append(place)
        return "42"

    said = f"<think>\nmaybe {call('Rome').strip()}\n</think>\n\n{call('Oslo')}"
    saver = InMemorySaver()
    agent = create_agent(one.chat, [look], checkpointer=saver, interrupt_before=["tools"])
    app = attach(agent, one.chat, strict=True)
    with saying(one.chat, said):
        app.invoke(QUESTION, on("t"))
        (reply,) = answers(app.get_state(on("t")).values["messages"])
        assert ran == []
        app.invoke(None, on("t"))
    assert ran == ["Oslo"]
    assert "Rome" in reply.additional_kwargs["reasoning_content"]
    assert reply.text == ""
    messages = app.get_state(on("t")).values["messages"]
    bound = one.chat.bind_tools([look])
    prompts = [bound.bound.prompt_ids(messages[:n], **bound.kwargs) for n in (1, 3)]
    whole = [*prompts[0], *one.answered(reply)]
    assert prompts[1][: len(whole)] == whole
    assert reused(answers(messages)[1]) >= len(whole)
    assert one.answered(answers(messages)[1]) == greedy(one.weights, prompts[1], 200)


@pytest.mark.parametrize(
    "broken",
    [
        "\n<tool_call>\n{'name': 'look'}\n</tool_call>",
        '\n<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>',
        '\n<tool_call>\n{"name": "look", "arguments": {"place": "Oslo"',
        '\n<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    ],
)
def test_a_broken_call_stops_no_agent_and_no_thread(make_chat: MakeChat, broken: str):
    one = make_one(make_chat, max_tokens=48)
    agent = create_agent(one.chat, [look], checkpointer=InMemorySaver())
    app = attach(agent, one.chat, strict=True)
    with saying(one.chat, broken):
        first = app.invoke(QUESTION, on("t", recursion_limit=8))["messages"]
    assert answers(first)[0].invalid_tool_calls or answers(first)[0].tool_calls
    before = one.n_bytes
    with saying(one.chat, call("Rome")):
        done = app.invoke({"messages": [HumanMessage("And now?")]}, on("t"))["messages"]
    assert any("Rome 1 trip" in str(m.content) for m in done if isinstance(m, ToolMessage))
    assert one.n_bytes > before
    one.chat.kv.clear("t")
    assert one.n_bytes == 0


# -- tools in the prompt -----------------------------------------------------------------


@pytest.mark.parametrize("template", [templates.TOOLS, templates.PLAIN])
def test_other_tools_are_another_prefix(make_chat: MakeChat, template: str):
    one = make_one(make_chat, template=template, max_tokens=8)
    messages = [SystemMessage("The rule"), HumanMessage("Where?")]
    asked: list[list[int]] = []
    for tools in ([look], [look, add], [add], [], [look]):
        bound = one.chat.bind_tools(tools) if tools else one.chat.bind()
        ids = bound.bound.prompt_ids(messages, **bound.kwargs)
        text = one.chat.engine.tokenizer.decode(ids, skip_special=False)
        for one_tool in (look, add):
            assert (f'"{one_tool.name}"' in text) == (one_tool in tools)
        reply = bound.invoke(messages)
        assert one.answered(reply) == greedy(one.weights, ids, 8)
        assert reused(reply) == max((n_common(ids, other) for other in asked), default=0)
        asked.append(ids)
    assert asked[3] == one.chat.prompt_ids(messages)
    # A choice of none is the prompt without tools.
    bound = one.chat.bind_tools([look], tool_choice="none")
    assert not bound.invoke(messages).tool_calls


# -- judges and helpers beside the branches they judge -----------------------------------


class Score(BaseModel):
    """How good a thought is."""

    value: int = Field(ge=0, le=9)


class Judging(TypedDict, total=False):
    i: int
    said: Annotated[list[tuple[int, AnyMessage]], operator.add]
    scores: dict[int, int]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_a_judge_with_a_form_leaves_nothing_in_what_it_judged(make_chat: MakeChat, method: Any):
    one, log = make_one(make_chat, max_tokens=40), Log()
    trunk = SystemMessage("Plan the trip")

    def thought(i: int) -> list[Any]:
        return [trunk, HumanMessage(f"branch {i}")]

    def propose(state: Judging) -> Any:
        with branch(f"b{state['i']}"):
            return {"said": [(state["i"], one.chat.invoke(thought(state["i"]), max_tokens=6))]}

    def judge(state: Judging) -> Any:
        judge = one.chat.with_structured_output(Score, method=method)
        scores = {}
        with branch("judge"):
            for i, message in sorted(state["said"], key=lambda one: one[0]):
                found = judge.invoke([trunk, HumanMessage(f"score {message.text}")])
                assert isinstance(found, Score)
                scores[i] = found.value
        best = max(scores, key=lambda i: (scores[i], i))
        prune("judge", *[f"b{i}" for i in scores if i != best])
        return {"scores": scores, "i": best}

    builder = StateGraph(Judging)
    builder.add_node("propose", propose)
    builder.add_node("judge", judge)
    sends = [Send("propose", {"i": i}) for i in range(3)]
    builder.add_conditional_edges(START, lambda _: sends, ["propose"])
    builder.add_edge("propose", "judge")
    app = attach(builder.compile(), one.chat, on_event=log, strict=True)
    found = app.invoke({}, on("t"))
    best, reply = found["i"], dict(found["said"])[found["i"]]
    assert one.answered(reply) == greedy(one.weights, one.chat.prompt_ids(thought(best)), 6)
    labels = [lb.branch for info in one.chat.kv.segments("t") for lb in info.labels]
    assert labels == [f"b{best}"]
    whole = [*one.chat.prompt_ids(thought(best)), *one.answered(reply)]
    (path,) = one.resident()
    assert list(path) == whole[: len(path)]
    assert len(path) >= len(whole) - 1
    assert one.n_bytes == BYTES_PER_TOKEN * len(path)
    check_events(log.events)


def test_agents_that_a_tool_asks_at_once_stay_apart(make_chat: MakeChat):
    """Each call of the tool runs an agent of its own, of the same name, on the same model."""
    one, log = make_one(make_chat, max_tokens=160), Log()
    helper = create_agent(one.chat, [add], name="helper")

    @tool
    def ask(place: str) -> str:
        """Ask a helper."""
        done = helper.invoke({"messages": [HumanMessage(f"Go to {place}?")]})
        return str(done["messages"][-1].text)

    calls = "".join(call(p).replace('"look"', '"ask"') for p in ("Oslo", "Rome", "Paris"))
    app = attach(create_agent(one.chat, [ask]), one.chat, on_event=log, strict=True)
    with saying(one.chat, calls):
        done = app.invoke(QUESTION, on("t"))["messages"]
    assert sum(isinstance(m, ToolMessage) for m in done) == 3
    labels = [lb for info in one.chat.kv.segments("t") for lb in info.labels]
    inner = [lb for lb in labels if str(lb.checkpoint_ns).startswith("tools:")]
    assert len(inner) == len({lb.checkpoint_ns for lb in inner}) == 3
    assert {lb.node for lb in labels} == {"model"}
    assert len(labels) == 5
    helping, right = one.chat.bind_tools([add]), []
    for place in ("Oslo", "Rome", "Paris"):
        asked = [HumanMessage(f"Go to {place}?")]
        ids = helping.bound.prompt_ids(asked, **helping.kwargs)
        right.append(greedy(one.weights, ids, 160))
    assert sorted(one.answered(AIMessage("", id=lb.call_id)) for lb in inner) == sorted(right)
    assert [d["n_calls"] for d in log.named("step_end") if d["node"] == "model"] == [1] * 5
    check_events(log.events)


# -- numbers by hand ---------------------------------------------------------------------


def test_hits_and_work_add_up_to_what_is_computed_by_hand(make_chat: MakeChat):
    """Shared heads, a retry, several samples, a release, a sweep: each counted as what it is."""
    one, log = make_chat(max_tokens=4), Log()
    trunk = SystemMessage("Plan the trip from Paris to Rome")
    prompts = {t: [trunk, HumanMessage(t)] for t in ("branch 1", "branch 2", "go on, then 3")}
    ids = {t: one.chat.prompt_ids(p) for t, p in prompts.items()}
    first, second, third = ids
    tries: list[int] = []
    replies: list[Any] = []

    def node(state: dict[str, Any]) -> dict[str, Any]:
        tries.append(1)
        replies.extend(one.chat.invoke(prompts[t]) for t in ids)
        if len(tries) < 2:
            raise ConnectionError
        return {}

    builder = StateGraph(Judging)
    policy = RetryPolicy(initial_interval=0.0, jitter=False, retry_on=ConnectionError)
    builder.add_node("node", node, retry_policy=policy)
    builder.add_edge(START, "node")
    attach(builder.compile(), one.chat, on_event=log, strict=True).invoke({}, on("t"))
    n_head = {t: max(n_common(ids[t], ids[o]) for o in ids if o < t) for t in (second,)}
    n_third = max(n_common(ids[third], ids[o]) for o in (first, second))
    # The first attempt computes what is new; the second one, nothing at all.
    expected = [0, n_head[second], n_third, *map(len, ids.values())]
    assert [reused(reply) for reply in replies] == expected
    for reply, text in zip(replies, [*ids, *ids], strict=True):
        details = reply.usage_metadata["input_token_details"]
        assert reply.usage_metadata["input_tokens"] == len(ids[text])
        assert details["cache_creation"] == len(ids[text]) - details["cache_read"]
    n_prompt = 2 * sum(map(len, ids.values()))
    usage = one.chat.kv.usage()
    assert (usage.n_prompt_tokens, usage.n_reused_tokens) == (n_prompt, sum(expected))
    assert usage.n_prefilled_tokens == n_prompt - sum(expected)
    # Attempts are counted apart.
    failed, done = log.named("step_end")
    assert failed["n_reused_tokens"] == sum(expected[:3])
    assert done["n_reused_tokens"] == sum(expected[3:])
    assert done["n_prefilled_tokens"] == 0

    # Samples: one prompt, asked three times; the first pays.
    one.chat.kv.clear()
    (samples,) = one.chat.generate([prompts[first]], n=3, temperature=1.0, seed=1).generations
    read = sorted(reused(s.message) for s in samples)
    assert read[0] == 0
    assert read[1:] == [len(ids[first])] * 2 or read[1:] == [len(ids[first]) - 1] * 2
    # What was released is computed again, and is no hit.
    one.chat.kv.clear()
    again = one.chat.invoke(prompts[first])
    assert reused(again) == 0
    # Prompts of nothing in common share what the template opens with, and that alone.
    other = one.chat.prompt_ids([HumanMessage("Oslo")])
    reply = one.chat.invoke([HumanMessage("Oslo")])
    assert reused(reply) == n_common(other, ids[first])
    tree = one.chat.engine._core.tree
    assert one.n_bytes == storage_bytes(tree)
