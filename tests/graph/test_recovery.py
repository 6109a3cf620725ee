"""What goes wrong or back in a run on a real engine: the answers stay right, the memory comes back.

Retries, interrupts, time travel, recursion limits, cancelled and failing runs, many runs.
"""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, RetryPolicy, Send, interrupt
from typing_extensions import TypedDict

from sidequest_langchain.graph import attach, backtrack, branch, keep_only, prune
from tests.graph.conftest import BYTES_PER_TOKEN, Tiny
from tests.graph.graphs import Log, State, chain, check_events, fan_out, on

MakeChat = Callable[..., Tiny]
PLAN = [SystemMessage("Plan the trip"), HumanMessage("from Paris to Rome")]


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def talk(model: Tiny, **compiled: Any) -> Any:
    """One node that answers what was said so far."""
    builder = StateGraph(Talk)
    builder.add_node("say", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "say")
    return builder.compile(checkpointer=InMemorySaver(), **compiled)


def say(app: Any, text: str, config: Any) -> list[AnyMessage]:
    messages: list[AnyMessage] = app.invoke({"messages": [HumanMessage(text)]}, config)["messages"]
    return messages


def check_reply(model: Tiny, messages: list[AnyMessage]) -> None:
    """The last message is what plain transformers answers to the ones before."""
    assert model.answered(messages[-1]) == model.expected(messages[:-1])


# -- attempts ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_retry_leaves_what_one_attempt_leaves(temperature: float, tiny_chat: MakeChat) -> None:
    model, log, replies = tiny_chat(), Log(), []
    model.temperature = temperature

    def flaky(state: dict[str, Any]) -> dict[str, Any]:
        replies.append(model.invoke(PLAN))
        if len(replies) < 3:
            raise ConnectionError
        return {}

    builder = StateGraph(State)
    policy = RetryPolicy(max_attempts=3, initial_interval=0.0, jitter=False)
    builder.add_node("flaky", flaky, retry_policy=policy)
    builder.add_edge(START, "flaky")
    attach(builder.compile(), model, on_event=log, strict=True).invoke({}, on("t"))
    prompt = model.prompt_ids(PLAN)
    answer = model.answered(replies[-1])
    n_fed = len(prompt) + len(answer) - (len(answer) == model.max_tokens)
    assert model.n_bytes == BYTES_PER_TOKEN * n_fed
    assert model.kv.usage().n_paths == 1
    assert log.reasons() == ["attempt abandoned"]
    warm = [reply.usage_metadata["input_token_details"]["cache_read"] for reply in replies]
    assert warm[0] == 0
    assert warm[1] == warm[2] >= len(prompt) - 1
    if not temperature:
        assert len({tuple(model.answered(reply)) for reply in replies}) == 1


def test_a_resume_hits_what_the_interrupt_left(tiny_chat: MakeChat) -> None:
    model, log, replies = tiny_chat(), Log(), []

    def asks(state: dict[str, Any]) -> dict[str, Any]:
        replies.append(model.invoke(PLAN))
        interrupt("one")
        interrupt("two")
        return {}

    app = attach(chain(("asks", asks), checkpointer=InMemorySaver()), model, on_event=log)
    app.invoke({}, on("t"))
    n_bytes = model.n_bytes
    assert n_bytes > 0
    app.invoke(Command(resume=1), on("t"))
    assert model.n_bytes == n_bytes
    app.invoke(Command(resume=2), on("t"))
    assert model.n_bytes == n_bytes
    assert model.kv.usage().n_paths == 1
    n_prompt = len(model.prompt_ids(PLAN))
    read = [reply.usage_metadata["input_token_details"]["cache_read"] for reply in replies]
    assert read[0] == 0
    assert min(read[1:]) >= n_prompt - 1
    assert len({reply.text for reply in replies}) == 1
    check_events(log.events)


# -- time travel -------------------------------------------------------------------------


def test_a_fork_from_an_old_checkpoint_equals_a_cold_run_and_spares_the_head(
    tiny_chat: MakeChat,
) -> None:
    model = tiny_chat()
    app = attach(talk(model), model, strict=True)
    for text in ("Plan", "then Rome", "then Oslo"):
        head = say(app, text, on("t"))
    check_reply(model, head)
    before = model.n_bytes

    history = list(app.get_state_history(on("t")))
    (old,) = [s for s in history if len(s.values.get("messages", ())) == 2 and not s.next]
    forked = say(app, "then Lisbon", old.config)
    assert [m.text for m in forked[:3]] == [*[m.text for m in head[:2]], "then Lisbon"]
    check_reply(model, forked)
    read = forked[-1].usage_metadata["input_token_details"]["cache_read"]
    assert read >= len(model.prompt_ids(head[:1]))  # the shared turn came from the old path

    # The fork added its own rows only.
    shared = [*model.prompt_ids(forked[:3]), *model.answered(forked[3])]
    longest = [*model.prompt_ids(head[:5]), *model.answered(head[5])]
    n_common = next(n for n, (a, b) in enumerate(zip(shared, longest, strict=False)) if a != b)
    n_own = len(shared) - (len(model.answered(forked[3])) == model.max_tokens) - n_common
    assert model.n_bytes == before + BYTES_PER_TOKEN * n_own

    # Releasing the fork leaves the head, which goes on as if nothing had been.
    receipt = model.kv.release(forked[-1].id)
    assert receipt.freed_tokens == n_own
    assert model.n_bytes == before
    (tip,) = [s for s in history if len(s.values.get("messages", ())) == 6]
    n_prefilled = model.kv.usage().n_prefilled_tokens
    onward = say(app, "Now", tip.config)
    check_reply(model, onward)
    assert model.kv.usage().n_prefilled_tokens - n_prefilled < 20


def test_a_replayed_step_is_a_visit_of_its_own(tiny_chat: MakeChat) -> None:
    model, log = tiny_chat(), Log()
    app = attach(talk(model), model, on_event=log, strict=True)
    say(app, "Plan", on("t"))
    head = say(app, "then Rome", on("t"))
    before = model.n_bytes
    point = next(s for s in app.get_state_history(on("t")) if s.next == ("say",))
    again = app.invoke(None, point.config)["messages"]
    assert again[-1].text == head[-1].text
    assert model.n_bytes == before
    assert len({d["task_id"] for d in log.named("step_end")}) == 3
    assert log.named("release") == []


def test_two_graphs_on_one_thread_share_prefixes_and_keep_their_paths_apart(
    tiny_chat: MakeChat,
) -> None:
    model, logs = tiny_chat(), (Log(), Log())
    graphs = [
        attach(fan_out(3, _thinks(model), ("select", act)), model, on_event=log, strict=True)
        for log, act in zip(logs, (lambda s: {}, lambda s: prune("b1") and {}), strict=True)
    ]
    for graph in graphs:
        graph.invoke({"said": []}, on("1"))
    labels = [label for info in model.kv.segments("1") for label in info.labels]
    # The same thoughts in the same thread: stored once, labelled by each visit.
    assert sorted(str(label.branch) for label in labels) == ["b0", "b0", "b2", "b2"]
    assert len({label.checkpoint_ns for label in labels}) == 4
    check_events([*logs[0].events, *logs[1].events])


def _thinks(model: Tiny) -> Any:
    def expand(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state['i']}"):
            reply = model.invoke([*PLAN, HumanMessage(f"branch {state['i']}")])
        return {"said": [reply.text]}

    return expand


# -- runs that do not end well -----------------------------------------------------------


@pytest.mark.parametrize("retain", ["run", "thread"])
def test_after_a_recursion_limit_the_thread_goes_on(retain: Any, tiny_chat: MakeChat) -> None:
    model = tiny_chat(retain=retain)

    def again(state: Talk) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"]), HumanMessage("again")]}

    builder = StateGraph(Talk)
    builder.add_node("again", again)
    builder.add_edge(START, "again")
    builder.add_conditional_edges("again", lambda s: "again", ["again"])
    app = attach(builder.compile(checkpointer=InMemorySaver()), model, strict=True)
    with pytest.raises(GraphRecursionError):
        app.invoke({"messages": [HumanMessage("Plan")]}, on("t", recursion_limit=6))
    committed = app.get_state(on("t")).values["messages"]
    n_bytes = model.n_bytes
    assert n_bytes <= BYTES_PER_TOKEN * len(model.prompt_ids(committed))
    assert (n_bytes == 0) == (retain == "run")

    def once(state: Talk) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(Talk)
    builder.add_node("again", once)
    builder.add_edge(START, "again")
    app = attach(builder.compile(checkpointer=app.checkpointer), model, strict=True)
    check_reply(model, say(app, "Now", on("t")))
    model.kv.clear("t")
    assert model.n_bytes == 0


async def test_a_cancelled_run_gives_everything_back(tiny_chat: MakeChat) -> None:
    model, log = tiny_chat(max_tokens=400, retain="run"), Log()

    async def expand(state: dict[str, Any]) -> dict[str, Any]:
        await model.ainvoke([*PLAN, HumanMessage(f"branch {state['i']}")])
        return {}

    app = attach(fan_out(4, expand), model, on_event=log, strict=True)
    running = asyncio.create_task(app.ainvoke({"said": []}, on("t")))
    while not model.kv.serial:
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(5):
        while await asyncio.to_thread(lambda: model.n_bytes):
            await asyncio.sleep(0.01)
    assert {outcome for node, outcome in log.outcomes() if node == "expand"} == {"cancelled"}
    check_reply(model, [*PLAN, await model.ainvoke(PLAN, max_tokens=400)])
    check_events(log.events)


def test_a_stream_left_in_the_middle_gives_everything_back(tiny_chat: MakeChat) -> None:
    model = tiny_chat(max_tokens=200)
    graph = chain(("a", lambda s: {"said": [model.invoke(PLAN).text]}))
    stream = attach(graph, model, strict=True).stream({"said": []}, stream_mode="messages")
    next(stream)
    stream.close()
    assert model.n_bytes == 0


def test_a_call_in_a_thread_without_the_context_answers_right(tiny_chat: MakeChat) -> None:
    model, replies = tiny_chat(), []

    def node(state: dict[str, Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            replies.extend(pool.map(model.invoke, [PLAN, PLAN[1:]]))
        return {}

    attach(chain(("node", node)), model, strict=True).invoke({}, on("t"))
    for reply, prompt in zip(replies, (PLAN, PLAN[1:]), strict=True):
        check_reply(model, [*prompt, reply])
    assert model.kv.segments("t") == []
    assert model.kv.release(replies[0].id).n_paths == 1
    assert sum(release.n_paths for release in prune(replies[1]).releases) == 1
    assert model.n_bytes == 0


# -- many runs ---------------------------------------------------------------------------


def test_five_hundred_threads_stay_inside_the_budget(tiny_chat: MakeChat) -> None:
    budget = 64 * BYTES_PER_TOKEN
    model, peaks = tiny_chat(max_tokens=2, budget_bytes=budget), []
    app = attach(talk(model), model, strict=True)
    for n in range(500):
        app.invoke({"messages": [HumanMessage(f"Plan {n}")]}, on(f"thread-{n}"))
        if not n % 50:
            peaks.append(model.n_bytes)
    assert 0 < max(peaks) <= budget
    assert model.kv.usage().peak_bytes <= 2 * budget
    assert len(model.kv.receipts()) == 0  # swept by the budget, not asked for
    held = weakref.ref(model.engine)
    kv = weakref.ref(model.kv)
    model.engine.close()
    del app, model
    tiny_chat.__closure__[0].cell_contents.clear()  # type: ignore[index]
    gc.collect()
    assert held() is None
    assert kv() is None


def test_five_hundred_runs_go_back_to_the_baseline(tiny_chat: MakeChat) -> None:
    model = tiny_chat(max_tokens=2, retain="run")
    app = attach(talk(model), model, strict=True)
    handler = app.config["callbacks"][0]
    for n in range(500):
        app.invoke({"messages": [HumanMessage(f"Plan {n}")]}, on(f"thread-{n}"))
    assert model.n_bytes == 0
    assert handler.n_errors == 0
    assert handler.lifecycle._book.runs == {}


@pytest.mark.parametrize("seed", range(4))
def test_random_searches_end_where_they_began(seed: int, tiny_chat: MakeChat) -> None:
    """Expand, keep, prune twice, backtrack, fail and retry, in any order and on any thread."""
    model, log, rng = tiny_chat(max_tokens=3), Log(), random.Random(seed)
    policy = RetryPolicy(max_attempts=50, initial_interval=0.0, jitter=False)

    class Search(TypedDict):
        frontier: Annotated[list[str], lambda old, new: new]
        found: Annotated[list[str], lambda old, new: [*old, *new] if new else []]
        level: int

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        name = state["name"]
        with branch(name, parent=name[:-1] or None):
            reply = model.invoke([*PLAN, HumanMessage(" ".join(name))])
            check_reply(model, [*PLAN, HumanMessage(" ".join(name)), reply])
            if rng.random() < 0.2:
                prune(name)
                raise ConnectionError
        return {"found": [name]}

    def select(state: Search) -> Command[Any]:
        found = sorted(state["found"])
        kept = rng.sample(found, min(2, len(found)))
        act = rng.randrange(3)
        if act == 0:
            keep_only(*kept, under=sorted({name[:-1] for name in found if name[:-1]}) or None)
        elif act == 1:
            prune(*(set(found) - set(kept)), immediate=rng.random() < 0.5)
            prune(*(set(found) - set(kept)))
        if rng.random() < 0.2:
            raise ConnectionError
        children = [name + child for name in kept for child in "ab"]
        over = state["level"] >= 3
        goto = "__end__" if over else [Send("expand", {"name": name}) for name in children]
        update = {"found": [], "level": state["level"] + 1}
        return backtrack(update=update, goto=goto, prune=[found[0]] if act == 2 else ())

    builder = StateGraph(Search)
    builder.add_node("expand", expand, retry_policy=policy)
    builder.add_node("select", select, retry_policy=policy, destinations=("expand", "__end__"))
    builder.add_conditional_edges(
        START, lambda s: [Send("expand", {"name": name}) for name in "ab"], ["expand"]
    )
    builder.add_edge("expand", "select")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    state = {"frontier": [], "found": [], "level": 0}
    for n in range(3):
        app.invoke(state, on(f"t{n}") if n else {})
    assert model.kv.usage().n_paths > 0
    kept = {(lb.thread_id, lb.branch) for i in model.kv.segments() for lb in i.labels}
    assert {thread for thread, _ in kept} == {"t1", "t2"}
    for thread_id, name in kept:
        model.kv.release(str(name), thread_id=thread_id)
    assert model.n_bytes == 0
    assert model.kv.usage().n_released_bytes >= sum(d["bytes"] for d in log.named("release"))
    check_events(log.events)
