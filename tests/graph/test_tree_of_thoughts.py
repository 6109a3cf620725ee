"""Fan-out, prune and loops on a real engine: what is stored, what is freed, what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from sidequest_langchain.graph import attach, backtrack, branch, keep_only, prune
from tests.graph.conftest import BYTES_PER_TOKEN, Tiny
from tests.graph.graphs import Log, chain, check_events, fan_out, on

MakeChat = Callable[..., Tiny]
TRUNK = SystemMessage("Plan the trip from Paris to Rome in 4 days, then fly to Oslo.")
CITIES = ["Lisbon", "Rome", "Oslo", "Paris", "Han", "城市", "score", "answer"]


def thought(i: int) -> list[AnyMessage]:
    return [TRUNK, HumanMessage(f"branch {CITIES[i]}")]


def tree(model: Tiny, *prunes: str, is_async: bool = False) -> Any:
    """Eight thoughts over one trunk, then a prune."""

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state['i']}"):
            return {"said": [model.invoke(thought(state["i"])).id]}

    async def aexpand(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state['i']}"):
            return {"said": [(await model.ainvoke(thought(state["i"]))).id]}

    return fan_out(
        8, aexpand if is_async else expand, ("select", lambda state: prune(*prunes) and {})
    )


def run(app: Any, how: str, config: Any) -> None:
    async def arun() -> None:
        if how == "ainvoke":
            await app.ainvoke({"said": []}, config)
        else:
            async for _ in app.astream({"said": []}, config, stream_mode="messages"):
                pass

    if how == "invoke":
        app.invoke({"said": []}, config)
    elif how in ("updates", "messages"):
        for _ in app.stream({"said": []}, config, stream_mode=how):
            pass
    else:
        asyncio.run(arun())


def n_trunk(model: Tiny) -> int:
    """Tokens that all eight prompts begin with."""
    prompts = [model.prompt_ids(thought(i)) for i in range(8)]
    return next(n for n in range(999) if len({p[n] for p in prompts}) > 1)


def stored(model: Tiny, i: int) -> int:
    """Tokens of branch `i` whose K/V is stored: the last one sampled was never fed."""
    n_generated = len(model.expected(thought(i)))
    n_fed = n_generated - 1 if n_generated == model.max_tokens else n_generated
    return len(model.prompt_ids(thought(i))) + n_fed


@pytest.mark.parametrize("how", ["invoke", "updates", "messages", "ainvoke", "astream"])
def test_eight_sends_are_eight_paths_over_one_trunk(how: str, tiny_chat: MakeChat) -> None:
    model, log = tiny_chat(), Log()
    app = attach(tree(model, "b3"), model, on_event=log, strict=True)
    run(app, how, on("t"))

    labels = [label for info in model.kv.segments("t") for label in info.labels]
    assert sorted(label.branch for label in labels) == [f"b{i}" for i in range(8) if i != 3]
    assert len({label.checkpoint_ns for label in labels}) == 7
    assert {label.node for label in labels} == {"expand"}
    for label in labels:
        i = int(label.branch[1:])
        assert model.answered(AIMessage("", id=label.call_id)) == model.expected(thought(i))
    # Siblings may share more than the common trunk; the tree holds each distinct row once.
    rows = {i: (*model.prompt_ids(thought(i)), *model.expected(thought(i))) for i in range(8)}
    heads = {rows[i][: n + 1] for i in rows if i != 3 for n in range(stored(model, i))}
    assert model.n_bytes == BYTES_PER_TOKEN * len(heads)
    assert model.kv.usage().n_prefilled_tokens < 2 * n_trunk(model) + 8 * 20
    check_events(log.events)


def test_every_way_to_run_leaves_the_same_tree(tiny_chat: MakeChat) -> None:
    shapes = []
    for how in ("invoke", "updates", "messages", "ainvoke", "astream"):
        model = tiny_chat()
        run(attach(tree(model, "b1", "b6"), model, strict=True), how, on("t"))
        shapes.append(model.tree("t"))
    model = tiny_chat()
    run(attach(tree(model, "b1", "b6", is_async=True), model, strict=True), "astream", on("t"))
    shapes.append(model.tree("t"))
    assert all(shape == shapes[0] for shape in shapes[1:])


def test_what_a_prune_frees_is_what_was_predicted(tiny_chat: MakeChat) -> None:
    model, log, before = tiny_chat(), Log(), []

    def select(state: dict[str, Any]) -> dict[str, Any]:
        before.append((model.n_bytes, model.kv.predict_release("b3", thread_id="t")))
        prune("b3")
        return {}

    graph = tree(model)
    builder = graph.builder
    builder.add_node("really", select)
    builder.add_edge("select", "really")
    attach(builder.compile(), model, on_event=log, strict=True).invoke({"said": []}, on("t"))
    ((n_before, predicted),) = before
    n_after = model.n_bytes  # asked after the release, hence answered after it
    (event,) = log.named("release")
    assert predicted.freed_bytes > 0
    assert event["bytes"] == predicted.freed_bytes == n_before - n_after
    assert event["bytes"] == BYTES_PER_TOKEN * event["tokens"]
    assert event["segments"] == list(predicted.segments)
    # Pruned again, even from another run, there is nothing left to free.
    assert model.kv.release("b3", thread_id="t").n_paths == 0


def test_pruning_everything_goes_back_to_the_baseline(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    attach(tree(model, *[f"b{i}" for i in range(8)]), model).invoke({"said": []}, on("t"))
    assert model.n_bytes == 0
    assert model.kv.usage().n_paths == 0


def test_a_run_without_a_thread_goes_back_to_the_baseline(tiny_chat: MakeChat) -> None:
    model, log = tiny_chat(), Log()
    app = attach(tree(model, "b0"), model, on_event=log, strict=True)
    for how in ("invoke", "messages", "ainvoke", "astream"):
        run(app, how, {})
        assert model.n_bytes == 0
    assert sum(d["bytes"] for d in log.named("release")) == model.kv.usage().n_released_bytes
    check_events(log.events)


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def test_a_loop_extends_its_own_path(tiny_chat: MakeChat) -> None:
    model = tiny_chat()

    def say(state: Talk) -> dict[str, Any]:
        reply = model.invoke(state["messages"])
        return {"messages": [reply, HumanMessage(f"then {len(state['messages'])}")]}

    builder = StateGraph(Talk)
    builder.add_node("say", say)
    builder.add_edge(START, "say")
    again = {"again": "say", "end": "__end__"}
    builder.add_conditional_edges(
        "say", lambda s: "again" if len(s["messages"]) < 9 else "end", again
    )
    result = attach(builder.compile(), model, strict=True).invoke(
        {"messages": [HumanMessage("Plan")]}, on("t")
    )
    messages = result["messages"]
    replies = [n for n, message in enumerate(messages) if isinstance(message, AIMessage)]
    assert len(replies) == 4
    for n in replies:
        assert model.answered(messages[n]) == model.expected(messages[:n])
    # Four visits of one node, and still each row is stored once.
    last = [*model.prompt_ids(messages[:7]), *model.answered(messages[7])]
    n_fed = len(last) - (len(model.answered(messages[7])) == model.max_tokens)
    assert model.n_bytes == BYTES_PER_TOKEN * n_fed
    usage = messages[7].usage_metadata
    assert usage["input_token_details"]["cache_read"] >= len(model.prompt_ids(messages[:5]))
    # An earlier visit stands below a later one: releasing it frees nothing.
    tasks = {lb.task_id: lb.step for info in model.kv.segments() for lb in info.labels}
    first = min(tasks, key=lambda task: tasks[task])
    receipt = model.kv.release(first)
    assert (receipt.n_paths, receipt.freed_bytes) == (1, 0)


class Tree(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    kept: str


def test_the_evaluators_text_is_no_part_of_the_branch_it_judged(tiny_chat: MakeChat) -> None:
    model, log, judged = tiny_chat(), Log(), []
    question = HumanMessage("Plan a trip", id="q")

    def propose(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"p{state['i']}"):
            asked = HumanMessage(f"branch {CITIES[state['i']]}", id=f"ask{state['i']}")
            return {"messages": [asked, model.invoke([question, asked])]}

    def evaluate(state: Tree) -> dict[str, Any]:
        # A flat list holds every sibling's messages: each is judged by its own.
        for message in state["messages"]:
            if isinstance(message, AIMessage):
                prompt = f"Observation score {message.text} yes no"
                verdict = model.invoke([SystemMessage("score"), HumanMessage(prompt)])
                judged.append(verdict)
                prune(verdict, reason="scored")
        keep_only("p1")
        return {"kept": "p1"}

    def go_on(state: Tree) -> dict[str, Any]:
        mine = _branch_of(state["messages"], "1")
        with branch("p1"):
            return {"messages": [model.invoke([question, *mine, HumanMessage("Now", id="now")])]}

    builder = StateGraph(Tree)
    builder.add_node("propose", propose)
    builder.add_node("evaluate", evaluate)
    builder.add_node("go_on", go_on)
    sends = [Send("propose", {"i": i}) for i in range(3)]
    builder.add_conditional_edges(START, lambda _: sends, ["propose"])
    builder.add_edge("propose", "evaluate")
    builder.add_edge("evaluate", "go_on")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    result = app.invoke({"messages": [question]}, on("t"))

    mine = _branch_of(result["messages"], "1")
    history = [question, *mine, HumanMessage("Now", id="now")]
    last = result["messages"][-1]
    assert model.answered(last) == model.expected(history)
    first = model.prompt_ids([question, mine[0]])
    assert last.usage_metadata["input_token_details"]["cache_read"] > len(first)
    # Only the kept branch is left, to the last row: nothing of siblings or of verdicts.
    ids = [*model.prompt_ids(history), *model.answered(last)]
    n_fed = len(ids) - (len(model.answered(last)) == model.max_tokens)
    assert model.n_bytes == BYTES_PER_TOKEN * n_fed
    assert len(judged) == 3
    assert log.reasons().count("scored") == 3
    labels = [label.branch for info in model.kv.segments() for label in info.labels]
    assert labels == ["p1", "p1"]


def _branch_of(messages: list[AnyMessage], name: str) -> list[AnyMessage]:
    at = next(n for n, message in enumerate(messages) if message.id == f"ask{name}")
    return messages[at : at + 2]


def test_depth_first_search_gives_each_dead_end_back(tiny_chat: MakeChat) -> None:
    model, log, resident = tiny_chat(), Log(), []

    class Search(TypedDict):
        stack: list[int]
        tried: int

    def path(stack: list[int]) -> list[AnyMessage]:
        return [TRUNK, *[HumanMessage(f"plan {CITIES[i]}") for i in stack]]

    def expand(state: Search) -> Command[Any]:
        stack = state["stack"]
        name, parent = "/".join(map(str, stack)), "/".join(map(str, stack[:-1])) or None
        with branch(name, parent=parent):
            reply = model.invoke(path(stack))
            assert model.answered(reply) == model.expected(path(stack))
            resident.append(model.n_bytes)
            if len(stack) < 3:
                return Command(goto="expand", update={"stack": [*stack, 0]})
            if stack[-1] < 3:
                up = [*stack[:-1], stack[-1] + 1]
                update = {"stack": up, "tried": state["tried"] + 1}
                return backtrack(to=parent, goto="expand", update=update)
        return Command(goto="__end__")

    builder = StateGraph(Search)
    builder.add_node("expand", expand, destinations=("expand", "__end__"))
    builder.add_edge(START, "expand")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    result = app.invoke({"stack": [0], "tried": 0}, on("t"))
    assert result["tried"] == 3
    assert log.reasons() == ["backtracked"] * 3
    assert [d["path"] for d in log.named("release")] == ["0/0/0", "0/0/1", "0/0/2"]
    assert all(d["bytes"] > 0 for d in log.named("release"))
    # Each leaf costs what it costs alone: the dead ends before it are gone.
    assert max(resident[2:]) - min(resident[2:]) <= 4 * BYTES_PER_TOKEN
    check_events(log.events)


def test_nested_subgraphs_store_and_prune_like_one_graph(tiny_chat: MakeChat) -> None:
    model, log = tiny_chat(), Log()
    nodes = (("again", lambda s: {"said": [model.invoke(thought(0)).id]}),)
    inner = tree(model, "b1", "b2", "b3")
    middle = chain(("inner", inner), *nodes)
    app = attach(chain(("middle", middle)), model, on_event=log, strict=True)
    app.invoke({"said": []}, on("t"))
    flat = tiny_chat()
    attach(tree(flat, "b1", "b2", "b3"), flat, strict=True).invoke({"said": []}, on("t"))
    assert model.n_bytes == flat.n_bytes
    depths = {len(d["checkpoint_ns"].split("|")) for d in log.named("step_end")}
    assert depths == {1, 2, 3}
    app.invoke({"said": []}, {})
    assert model.n_bytes == flat.n_bytes
    check_events(log.events)
