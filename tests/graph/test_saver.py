"""Checkpoints and their KV on a real engine: found, gone, freed; answers equal a cold run's."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from sidequest_langchain import SideQuestSaver, Tiers, attach, branch, prune
from tests.engine.managing import LITTLE, managed
from tests.engine.test_managed_faults import archive_idle
from tests.graph.conftest import BYTES_PER_TOKEN, Tiny
from tests.graph.graphs import Log, check_events, on
from tests.graph.savers import (
    FullSaver,
    Talk,
    asay,
    check_reply,
    fed,
    n_rows,
    read,
    say,
    talk,
)

MakeChat = Callable[..., Tiny]
ODD_IDS = ["../x", "a/b\\c", "", " ", "*", "💥", "x" * 3000, 7]


def n_said(snapshot: Any) -> int:
    return len(snapshot.values.get("messages", ()))


def at(app: Any, config: Any, n: int) -> Any:
    """The checkpoint after `n` messages, where a run ended."""
    (found,) = [s for s in app.get_state_history(config) if n_said(s) == n and not s.next]
    return found


# -- what a checkpoint holds ---------------------------------------------------------------


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_each_checkpoint_knows_its_kv(durability: Any, tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    said: list[Any] = []
    for text in ("Plan", "then Rome", "then Oslo"):
        said = say(app, text, on("t"), durability=durability)
        check_reply(model, said)
    ends = 0
    for snapshot in app.get_state_history(on("t")):
        messages = snapshot.values.get("messages", [])
        replies = [k for k, m in enumerate(messages) if isinstance(m, AIMessage)]
        paths = [fed(model, messages[: k + 1]) for k in replies]
        held = saver.kv_of(snapshot.config)
        assert held.paths == tuple(messages[k].id for k in replies)
        assert held.n_tokens == n_rows(*paths)
        assert held.n_bytes == BYTES_PER_TOKEN * held.n_tokens
        assert held.state == ("resident" if replies else "gone")
        assert held.checkpoint_id == snapshot.config["configurable"]["checkpoint_id"]
        ids = [info.segment_id for info in model.kv.segments()]
        assert [i for i in ids if i in held.segments] == list(held.segments)
        ends += not snapshot.next
    assert ends == 3
    assert saver.kv_of(on("t")) == saver.kv_of(at(app, on("t"), 6).config)
    model.kv.release(said[-1].id)
    assert saver.kv_of(on("t")).paths == (said[1].id, said[3].id)
    model.kv.clear("t")
    assert saver.kv_of(on("t")).state == "gone"


async def test_the_same_asynchronously(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    said = await asay(app, "Plan", on("t"))
    held = await saver.akv_of(on("t"))
    assert held == await asyncio.to_thread(saver.kv_of, on("t"))
    assert held.paths == (said[-1].id,)
    assert (await saver.akv_of(on("unknown"))).checkpoint_id is None


def test_lineage_needs_nothing_but_the_checkpoints(tiny_chat: MakeChat, tmp_path: Path) -> None:
    """As after a restart: another saver object on the same database, which saw no write."""
    model = tiny_chat()
    with closing(sqlite3.connect(tmp_path / "db", check_same_thread=False)) as conn:
        app = talk(model, SideQuestSaver(SqliteSaver(conn), model))
        for text in ("Plan", "then Rome"):
            said = say(app, text, on("t"))
    with closing(sqlite3.connect(tmp_path / "db", check_same_thread=False)) as conn:
        saver = SideQuestSaver(SqliteSaver(conn), model)
        assert saver.kv_of(on("t")).paths == (said[1].id, said[3].id)
        app = talk(model, saver)
        check_reply(model, say(app, "then Oslo", on("t")))
        saver.delete_thread("t")
        assert model.n_bytes == 0


def test_a_checkpoint_whose_rows_are_in_a_slower_tier_says_so(tiny_chat: MakeChat) -> None:
    settings = managed(
        archive_idle,
        budget_tokens=170,
        tiers=Tiers(int8=False, int4=False, cpu_bytes=10**6),
        protection=replace(LITTLE, question=False, delimiters=False),
    )
    model = tiny_chat(**{field.name: getattr(settings, field.name) for field in fields(settings)})
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    said = say(app, "Plan the trip from Paris to Rome " * 6, on("t"))
    held = saver.kv_of(on("t"))
    assert (held.state, held.n_tokens) == ("resident", len(fed(model, said)))
    say(app, "then Oslo and then Lisbon and back " * 7, on("u"))
    away = saver.kv_of(on("t"))
    assert away.state == "archived"
    assert away.n_tokens == held.n_tokens
    assert away.n_bytes < held.n_bytes
    model.engine._core.manager._returns.costs.tokens_a_second = 1e-3  # computing is slow here
    onward = say(app, "Now", on("t"))
    check_reply(model, onward)
    assert read(onward[-1]) >= held.n_tokens


# -- time travel -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_fork_finds_the_kv_of_its_checkpoint_or_computes_it(
    durability: Any, is_gone: bool, tiny_chat: MakeChat
) -> None:
    model, log = tiny_chat(), Log()
    saver = SideQuestSaver(InMemorySaver(), model)
    app = attach(talk(model, saver), model, on_event=log)
    for text in ("Plan", "then Rome", "then Oslo"):
        head = say(app, text, on("t"), durability=durability)
    old = at(app, on("t"), 2)
    if is_gone:
        model.kv.clear("t")
    held = saver.kv_of(old.config)
    assert held.state == ("gone" if is_gone else "resident")
    forked = say(app, "then Lisbon", old.config, durability=durability)
    check_reply(model, forked)
    n_prompt = len(model.prompt_ids(forked[:-1]))
    figures = log.named("step_end")[-1]
    assert figures["n_reused_tokens"] + figures["n_prefilled_tokens"] == n_prompt
    assert figures["n_reused_tokens"] == forked[-1].response_metadata["sidequest"]["reused_tokens"]
    assert (figures["n_reused_tokens"] >= held.n_tokens) if held.n_tokens else True
    assert (figures["n_reused_tokens"] == 0) == is_gone
    # The fork's own checkpoint holds its own path, and the head's holds the head's.
    tip = saver.kv_of(app.get_state(on("t")).config)
    assert forked[-1].id in tip.paths
    assert head[-1].id not in tip.paths
    if not is_gone:
        assert tip.n_tokens == n_rows(fed(model, forked[:2]), fed(model, forked))
    onward = say(app, "Now", at(app, on("t"), 6).config, durability=durability)
    check_reply(model, onward)
    assert onward[:6] == head
    saver.delete_thread("t")
    assert model.n_bytes == 0
    check_events(log.events)


def test_an_update_and_a_replay_begin_with_what_led_to_them(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    for text in ("Plan", "then Rome"):
        head = say(app, text, on("t"))
    (before,) = [s for s in app.get_state_history(on("t")) if n_said(s) == 3 and s.next == ("say",)]
    n_bytes = model.n_bytes
    again = app.invoke(None, before.config)["messages"]
    assert again[-1].text == head[-1].text
    assert model.n_bytes == n_bytes
    assert head[-1].id not in saver.kv_of(on("t")).paths
    assert again[-1].id in saver.kv_of(on("t")).paths

    changed = app.update_state(before.config, {"messages": [HumanMessage("by train")]})
    held = saver.kv_of(changed)
    assert held.paths == (head[1].id,)
    assert held.n_tokens == n_rows(fed(model, head[:2]))
    fork = app.invoke(None, changed)["messages"]
    check_reply(model, fork)
    assert [m.text for m in fork[:4]] == [*(m.text for m in head[:3]), "by train"]
    assert read(fork[-1]) >= held.n_tokens
    assert saver.kv_of(on("t")).paths == (head[1].id, fork[-1].id)


def test_a_paused_run_holds_what_the_resume_begins_with(tiny_chat: MakeChat) -> None:
    model, replies = tiny_chat(), []
    saver = SideQuestSaver(InMemorySaver(), model)

    def asks(state: Talk) -> dict[str, Any]:
        replies.append(model.invoke(state["messages"]))
        return {"messages": [replies[-1], HumanMessage(interrupt("Which?"))]}

    builder = StateGraph(Talk)
    builder.add_node("asks", asks)
    builder.add_edge(START, "asks")
    app = attach(builder.compile(checkpointer=saver), model, strict=True)
    app.invoke({"messages": [HumanMessage("Plan")]}, on("t"))
    held = saver.kv_of(on("t"))
    assert held.paths == (replies[0].id,)
    assert held.state == "resident"
    n_bytes = model.n_bytes
    said = app.invoke(Command(resume="Rome"), on("t"))["messages"]
    assert read(replies[1]) >= held.n_tokens - model.max_tokens
    assert model.n_bytes == n_bytes
    assert saver.kv_of(on("t")).paths == (replies[1].id,)
    check_reply(model, said[:-1])
    saver.delete_thread("t")
    assert model.n_bytes == 0


def test_what_a_subgraph_computed_belongs_to_the_step_around_it(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)

    def once(name: str) -> Any:
        builder = StateGraph(Talk)
        builder.add_node(name, lambda s: {"messages": [model.invoke(s["messages"])]})
        builder.add_edge(START, name)
        return builder.compile()

    builder = StateGraph(Talk)
    builder.add_node("plan", once("inner"))
    builder.add_node("planner", once("inner"))
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "planner")
    app = attach(builder.compile(checkpointer=saver), model, strict=True)
    said = say(app, "Plan", on("t"))
    check_reply(model, said)
    steps = {s.next: s for s in app.get_state_history(on("t"))}
    assert saver.kv_of(steps["planner",].config).paths == (said[1].id,)
    assert saver.kv_of(steps[()].config).paths == (said[1].id, said[2].id)
    saver.delete_thread("t")
    assert model.n_bytes == 0


def test_what_a_task_computed_belongs_to_its_workflow(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)
    replies: list[AIMessage] = []

    @task
    def ask(text: str) -> str:
        replies.append(model.invoke(text))
        return replies[-1].text

    @entrypoint(checkpointer=saver)
    def work(texts: list[str]) -> list[str]:
        return [ask(text).result() for text in texts]

    app = attach(work, model, strict=True)
    app.invoke(["Plan", "score"], on("t"))
    held = saver.kv_of(on("t"))
    assert set(held.paths) == {reply.id for reply in replies}
    app.invoke(["back"], on("t"))
    assert set(saver.kv_of(on("t")).paths) == {reply.id for reply in replies}
    assert len(replies) == 3
    saver.delete_thread("t")
    assert model.n_bytes == 0


# -- deleting --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("thread_id", ODD_IDS, ids=lambda t: repr(t)[:12])
async def test_deleting_a_thread_frees_its_kv_and_no_other(
    thread_id: Any, is_async: bool, tiny_chat: MakeChat
) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    other = await asay(app, "then Oslo", on("other"))
    before = model.n_bytes
    said = await asay(app, "Plan", on(thread_id))
    check_reply(model, said)
    # LangGraph takes an empty id for none, and what has no thread goes with its run.
    n_own = n_rows(fed(model, said)) if thread_id != "" else 0
    assert model.n_bytes == before + BYTES_PER_TOKEN * n_own
    if is_async:
        await saver.adelete_thread(str(thread_id))  # LangGraph's own form of it
    else:
        await asyncio.to_thread(saver.delete_thread, str(thread_id))
    assert model.n_bytes == before
    assert (await app.aget_state(on(thread_id))).values == {}
    again = await asay(app, "Plan", on(thread_id))
    assert read(again[-1]) == 0
    check_reply(model, again)
    onward = await asay(app, "Now", on("other"))
    assert read(onward[-1]) >= len(fed(model, other))


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_thread_deleted_while_it_runs_goes_when_its_calls_end(
    durability: Any, tiny_chat: MakeChat
) -> None:
    model = tiny_chat(max_tokens=20)
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    said = say(app, "Plan", on("t"), durability=durability)
    began, may_go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        began.set()
        assert may_go_on.wait(30)

    hook = model.engine._core.adapter.model.register_forward_pre_hook(wait)
    done: list[Any] = []
    run = threading.Thread(
        target=lambda: done.append(say(app, "then Rome", on("t"), durability=durability))
    )
    run.start()
    assert began.wait(30)
    deletion = threading.Thread(target=saver.delete_thread, args=("t",))
    deletion.start()
    time.sleep(0.05)
    may_go_on.set()
    deletion.join(30)
    run.join(30)
    hook.remove()
    assert done[0][:2] == said
    check_reply(model, done[0])
    assert model.n_bytes == 0
    # What the run stored after the deletion is a thread again, as with the bare saver.
    assert saver.kv_of(on("t")).state == "gone"
    saver.delete_thread("t")
    assert list(saver.list(on("t"))) == []
    assert model.n_bytes == 0


async def test_a_run_on_an_asynchronous_saver(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    async with AsyncSqliteSaver.from_conn_string(":memory:") as inner:
        saver = SideQuestSaver(inner, model)
        app = talk(model, saver)
        said = await asay(app, "Plan", on("t"))
        old = (await app.aget_state(on("t"))).config
        said = await asay(app, "then Rome", on("t"))
        check_reply(model, said)
        assert (await saver.akv_of(on("t"))).paths == (said[1].id, said[3].id)
        assert (await saver.akv_of(old)).paths == (said[1].id,)
        async for _ in app.astream(
            {"messages": [HumanMessage("then Oslo")]}, old, stream_mode="messages"
        ):
            pass
        forked = (await app.aget_state(on("t"))).values["messages"]
        assert len(forked) == 4
        check_reply(model, forked)
        await saver.adelete_thread("t")
        assert model.n_bytes == 0
        assert (await app.aget_state(on("t"))).values == {}


async def test_deleting_never_holds_up_the_event_loop(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)
    app = talk(model, saver)
    await asay(app, "Plan", on("t"))
    may_go_on = threading.Event()
    busy = model.engine._core.call(lambda: may_go_on.wait(30))
    deletion = asyncio.create_task(saver.adelete_thread("t"))
    asking = asyncio.create_task(saver.akv_of(on("t")))
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not deletion.done()
    assert not asking.done()
    deletion.cancel()  # whoever gives up waiting does not take the deletion back
    may_go_on.set()
    assert busy.result()
    await asyncio.wait([deletion, asking])
    await asyncio.to_thread(model.kv.usage)
    assert model.n_bytes == 0


def test_a_thread_begun_anew_has_branches_of_its_own(tiny_chat: MakeChat) -> None:
    """A branch that was declared below another one, in the thread that was deleted, is not."""
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model)

    def expand(state: Talk) -> dict[str, Any]:
        text = state["messages"][-1].text
        with branch("child", parent="root" if text == "Plan" else None):
            return {"messages": [model.invoke(state["messages"])]}

    def select(state: Talk) -> dict[str, Any]:
        if state["messages"][-2].text != "Plan":
            prune("root")
        return {}

    builder = StateGraph(Talk)
    builder.add_node("expand", expand)
    builder.add_node("select", select)
    builder.add_edge(START, "expand")
    builder.add_edge("expand", "select")
    app = attach(builder.compile(checkpointer=saver), model, strict=True)
    say(app, "Plan", on("t"))
    saver.delete_thread("t")
    said = say(app, "then Rome", on("t"))
    assert saver.kv_of(on("t")).paths == (said[-1].id,)


def test_an_engine_that_is_closed_or_not_loaded_is_no_hindrance(tiny_chat: MakeChat) -> None:
    from sidequest_langchain import SideQuestChatModel

    unloaded = SideQuestSaver(InMemorySaver(), SideQuestChatModel(model="no-such-model"))
    unloaded.delete_thread("t")
    assert unloaded.kv_of(on("t")).state == "gone"
    model = tiny_chat()
    saver = SideQuestSaver(FullSaver(), model.bind(stop=["x"]))
    app = talk(model, saver)
    say(app, "Plan", on("t"))
    model.engine.close()
    saver.prune(["t"])
    saver.delete_thread("t")
    assert list(saver.list(on("t"))) == []


# -- pruning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("durability", ["sync", "exit"])
async def test_pruning_frees_abandoned_forks_and_leaves_the_head_warm(
    durability: Any, is_async: bool, tiny_chat: MakeChat
) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(FullSaver(), model)
    app = talk(model, saver)
    say(app, "Plan", on("t"), durability=durability)
    lost = say(app, "then Lisbon", on("t"), durability=durability)
    head = say(app, "then Rome", at(app, on("t"), 2).config, durability=durability)
    head = say(app, "then Oslo", on("t"), durability=durability)
    both = n_rows(fed(model, lost), fed(model, head))
    assert model.n_bytes == BYTES_PER_TOKEN * both
    if is_async:
        await saver.aprune(["t"])
    else:
        await asyncio.to_thread(saver.prune, ["t"])
    assert len(list(saver.list(on("t")))) == 1
    assert model.n_bytes == BYTES_PER_TOKEN * n_rows(fed(model, head))
    onward = say(app, "Now", on("t"), durability=durability)
    assert onward[:6] == head
    check_reply(model, onward)
    assert read(onward[-1]) >= len(fed(model, head))
    saver.prune(["t"], strategy="delete")
    assert model.n_bytes == 0


def test_pruning_leaves_the_last_visit_of_every_node(tiny_chat: MakeChat) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(FullSaver(), model)

    def critic(state: Talk) -> dict[str, Any]:
        return {"messages": [model.invoke([HumanMessage("score"), *state["messages"]])]}

    builder = StateGraph(Talk)
    builder.add_node("draft", lambda s: {"messages": [model.invoke(s["messages"])]})
    builder.add_node("critic", critic)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "critic")
    app = attach(builder.compile(checkpointer=saver), model, strict=True)
    say(app, "Plan", on("t"))
    said = say(app, "then Rome", on("t"))
    saver.prune(["t"])
    assert set(saver.kv_of(on("t")).paths) == {said[-2].id, said[-1].id}
    onward = say(app, "then Oslo", on("t"))
    assert read(onward[-2]) >= len(model.prompt_ids(said[:4]))
    assert read(onward[-1]) >= len(model.prompt_ids([HumanMessage("score"), *said[:5]]))
    assert model.answered(onward[-1]) == model.expected([HumanMessage("score"), *onward[:-1]])


@pytest.mark.parametrize("is_saved", [True, False])
def test_pruning_frees_what_subgraphs_of_older_steps_computed(
    is_saved: bool, tiny_chat: MakeChat
) -> None:
    """Their own checkpoints live on, one in each namespace; nothing leads to them any more."""
    model = tiny_chat()
    saver = SideQuestSaver(FullSaver(), model)
    inner = StateGraph(Talk)
    inner.add_node("say", lambda s: {"messages": [model.invoke(s["messages"])]})
    inner.add_edge(START, "say")
    builder = StateGraph(Talk)
    builder.add_node("inner", inner.compile(checkpointer=None if is_saved else False))
    builder.add_edge(START, "inner")
    app = attach(builder.compile(checkpointer=saver), model, strict=True)
    say(app, "Plan", on("t"))
    old = next(s for s in app.get_state_history(on("t")) if not s.next)
    say(app, "then Lisbon", on("t"))
    head = say(app, "then Rome", old.config)
    saver.prune(["t"])
    namespaces = {found.config["configurable"]["checkpoint_ns"] for found in saver.list(on("t"))}
    assert (len(namespaces) > 2) == is_saved
    assert saver.kv_of(on("t")).paths == (head[-1].id,)
    assert model.n_bytes == BYTES_PER_TOKEN * n_rows(fed(model, head))
    onward = say(app, "Now", on("t"))
    check_reply(model, onward)
    assert read(onward[-1]) >= len(fed(model, head))


def test_pruning_while_a_run_is_on_leaves_what_is_under_way(tiny_chat: MakeChat) -> None:
    model, found = tiny_chat(), []
    saver = SideQuestSaver(FullSaver(), model)

    def twice(state: Talk) -> dict[str, Any]:
        model.invoke(state["messages"])
        saver.prune(["t"])
        found.append(read(model.invoke(state["messages"])))
        return {"messages": [AIMessage("done")]}

    builder = StateGraph(Talk)
    builder.add_node("twice", twice)
    builder.add_edge(START, "twice")
    app = attach(builder.compile(checkpointer=saver), model, strict=True)
    said = say(app, "Plan", on("t"))
    assert found == [len(model.prompt_ids(said[:1]))]


@pytest.mark.parametrize("is_async", [False, True])
async def test_deleting_a_run_frees_what_only_it_needed(
    is_async: bool, tiny_chat: MakeChat
) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(FullSaver(), model)
    app = talk(model, saver)
    kept = say(app, "Plan", on("t", metadata={"run_id": "first"}))
    other = say(app, "Plan", on("u", metadata={"run_id": "other"}))
    before = model.n_bytes
    say(app, "then Rome", on("t", metadata={"run_id": "second"}))
    assert model.n_bytes > before
    if is_async:
        await saver.adelete_for_runs(["second", "unknown"])
    else:
        await asyncio.to_thread(saver.delete_for_runs, ["second", "unknown"])
    assert model.n_bytes == before
    assert saver.kv_of(on("t")).paths == (kept[-1].id,)
    assert saver.kv_of(on("u")).paths == (other[-1].id,)
    onward = say(app, "then Oslo", on("t"))
    assert onward[:2] == kept
    check_reply(model, onward)
    saver.delete_for_runs(["other"])
    assert saver.kv_of(on("u")).state == "gone"


# -- copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["thread", "shared"])
def test_a_copied_thread_finds_the_kv_that_it_may_use(isolation: Any, tiny_chat: MakeChat) -> None:
    model = tiny_chat(isolation=isolation)
    saver = SideQuestSaver(FullSaver(), model)
    app = talk(model, saver)
    said = say(app, "Plan", on("t"))
    n_bytes = model.n_bytes
    saver.copy_thread("t", "copy")
    held = saver.kv_of(on("copy"))
    assert held.state == ("resident" if isolation == "shared" else "gone")
    onward = say(app, "then Rome", on("copy"))
    assert onward[:2] == said
    check_reply(model, onward)
    assert read(onward[-1]) >= held.n_tokens
    assert (read(onward[-1]) == 0) == (isolation == "thread")
    # Deleting either leaves the other as it was.
    saver.delete_thread("t")
    assert model.n_bytes == BYTES_PER_TOKEN * n_rows(fed(model, onward))
    again = say(app, "Now", on("copy"))
    assert read(again[-1]) >= len(fed(model, onward))
    saver.delete_thread("copy")
    assert model.n_bytes == 0 < n_bytes


# -- nothing is kept -----------------------------------------------------------------------------


def test_many_threads_leave_nothing_behind(tiny_chat: MakeChat) -> None:
    model = tiny_chat(max_tokens=1)
    inner = InMemorySaver()
    saver = SideQuestSaver(inner, model)
    app = talk(model, saver)
    for n in range(30):
        say(app, "Plan", on(f"t{n}"))
        saver.delete_thread(f"t{n}")
    assert model.n_bytes == 0
    assert not any(inner.storage.values())
    seen = weakref.ref(saver)
    del app, saver
    gc.collect()
    assert seen() is None
