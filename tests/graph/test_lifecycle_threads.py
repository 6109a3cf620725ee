"""Threads on a real engine: cut short, replayed, forked, edited, and saved in every way there is.

Each answer is the oracle's, and what is left is what the calls' tokens say must be left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

from sidequest_langchain.graph import attach
from tests.graph.conftest import Tiny
from tests.graph.graphs import Log, check_events, fan_out, on
from tests.graph.witness import Call, Witness, n_common

MakeChat = Callable[..., Tiny]
DURABILITY = pytest.mark.parametrize("durability", ["sync", "async", "exit"])


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def talk(witness: Witness, *, is_async: bool = False, asks: bool = False) -> Any:
    """Two nodes that answer: the second one goes on from what the first one said."""

    def say(state: Talk) -> dict[str, Any]:
        return {"messages": [witness.ask(state["messages"])]}

    async def asay(state: Talk) -> dict[str, Any]:
        return {"messages": [await witness.aask(state["messages"])]}

    def more(state: Talk) -> dict[str, Any]:
        asked = HumanMessage("And then?", id=f"more{len(state['messages'])}")
        reply = witness.ask([*state["messages"], asked])
        if asks:
            interrupt("ok?")
        return {"messages": [asked, reply]}

    async def amore(state: Talk) -> dict[str, Any]:
        asked = HumanMessage("And then?", id=f"more{len(state['messages'])}")
        reply = await witness.aask([*state["messages"], asked])
        if asks:
            interrupt("ok?")
        return {"messages": [asked, reply]}

    builder = StateGraph(Talk)
    builder.add_node("say", asay if is_async else say)
    builder.add_node("more", amore if is_async else more)
    builder.add_edge(START, "say")
    builder.add_edge("say", "more")
    return builder.compile(checkpointer=InMemorySaver())


def turn(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


def run(app: Any, given: Any, config: Any, *, is_async: bool = False, **more: Any) -> Any:
    if is_async:
        return asyncio.run(app.ainvoke(given, config, **more))
    return app.invoke(given, config, **more)


def checkpoints(app: Any, config: Any, n_messages: int, *then: str) -> Any:
    """The newest state with so many messages and these nodes next."""
    for state in app.get_state_history(config):
        if len(state.values.get("messages", ())) == n_messages and state.next == then:
            return state
    raise AssertionError


# -- cut short ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["cancel", "wait_for", "break", "break updates", "timeout"])
async def test_a_run_that_is_cut_short_leaves_the_thread_as_it_was(
    cut: str, tiny_chat: MakeChat
) -> None:
    model = tiny_chat()
    witness, log = Witness(model), Log()
    before = attach(talk(witness, is_async=True), model, on_event=log, strict=True)
    await before.ainvoke(turn("Plan"), on("t"))
    history = list(witness.calls)
    await asyncio.to_thread(witness.check, history)

    async def expand(state: dict[str, Any]) -> dict[str, Any]:
        # Longer than it will be let run, whether or not the call has ended by then.
        asked = [HumanMessage("Plan"), HumanMessage(f"branch {state['i']}")]
        await model.bind(max_tokens=900).ainvoke(asked)
        await asyncio.sleep(60)
        return {"said": ["never"]}

    app = attach(fan_out(3, expand), model, on_event=log, strict=True)
    n_begun = model.kv.serial
    if cut in ("cancel", "wait_for", "timeout"):
        running = asyncio.create_task(app.ainvoke({"said": []}, on("t")))
        while model.kv.serial < n_begun + 3:
            await asyncio.sleep(0.005)
        if cut == "cancel":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        elif cut == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running, 0.05)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await running
    else:
        mode = "messages" if cut == "break" else ["updates", "messages"]
        stream = app.astream({"said": []}, on("t"), stream_mode=mode)
        async for _ in stream:
            break
        await stream.aclose()
    async with asyncio.timeout(5):
        while (await asyncio.to_thread(model.kv.usage)).n_paths > len(history):
            await asyncio.sleep(0.01)
    n_steps = (await asyncio.to_thread(model.kv.usage)).n_steps
    await asyncio.to_thread(witness.check, history)
    # Nothing runs on behind anybody's back, and the thread goes on as if nothing had been.
    await asyncio.sleep(0.1)
    assert (await asyncio.to_thread(model.kv.usage)).n_steps == n_steps
    await before.ainvoke(turn("Now"), on("t"))
    await asyncio.to_thread(witness.check, witness.calls)
    outcomes = [outcome for node, outcome in log.outcomes() if node == "expand"]
    assert set(outcomes) <= {"cancelled", "error"}
    assert len(log.named("step_start")) == len(log.named("step_end"))
    check_events(log.events)


@pytest.mark.parametrize("retain", ["run", "thread"])
@pytest.mark.parametrize("mode", ["messages", "updates", "values"])
def test_a_synchronous_stream_that_is_left_early_leaves_what_its_steps_say(
    mode: Any, retain: Any, tiny_chat: MakeChat
) -> None:
    """A synchronous node cannot be stopped: what it computed is there if it ended well."""
    witness, log = Witness(tiny_chat(retain=retain)), Log()
    app = attach(talk(witness), witness.model, on_event=log, strict=True)
    app.invoke(turn("Plan"), on("t"))
    n_before = len(log.named("step_end"))
    stream = app.stream(turn("then Rome"), on("t"), stream_mode=mode)
    next(stream)
    stream.close()
    ended = log.named("step_end")[n_before:]
    assert len(log.named("step_start")) == len(log.named("step_end"))
    done = {d["checkpoint_ns"] for d in ended if d["outcome"] == "ok"}
    kept = [*witness.calls[:2], *(c for c in witness.calls[2:] if c.checkpoint_ns in done)]
    witness.check([] if retain == "run" else kept)
    app.invoke(turn("Now"), on("t"))
    witness.check([] if retain == "run" else [*kept, *witness.calls[-2:]])
    check_events(log.events)


# -- ways of saving ----------------------------------------------------------------------


@DURABILITY
@pytest.mark.parametrize("is_async", [False, True])
def test_how_a_thread_is_saved_changes_nothing_of_what_it_leaves(
    durability: Any, is_async: bool, tiny_chat: MakeChat
) -> None:
    """A pause and a resume in each turn; with `exit`, only the pause is ever saved."""
    witness, log = Witness(tiny_chat()), Log()
    app = attach(
        talk(witness, is_async=is_async, asks=True), witness.model, on_event=log, strict=True
    )
    more = {"is_async": is_async, "durability": durability}
    kept: list[Call] = []
    for text in ("Plan", "then Rome"):
        run(app, turn(text), on("t"), **more)
        said, paused = witness.calls[-2:]
        witness.check([*kept, said, paused])
        run(app, Command(resume=1), on("t"), **more)
        resumed = witness.calls[-1]
        assert resumed.row == paused.row
        assert resumed.n_reused == resumed.n_prompt
        kept += [said, resumed]
        witness.check(kept)
    assert len(witness.calls) == 6
    assert [outcome for _, outcome in log.outcomes()] == ["ok", "interrupted", "ok"] * 2
    assert log.reasons() == ["attempt abandoned"] * 2
    # Nothing is computed twice: all that was said before is read from the cache.
    assert all(call.n_reused > 0 for call in witness.calls[1:])
    check_events(log.events)
    witness.model.kv.clear("t")
    witness.check([])


# -- time travel -------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("retain", ["run", "thread"])
def test_a_replay_is_a_visit_of_its_own_and_computes_nothing(
    is_async: bool, retain: Any, tiny_chat: MakeChat
) -> None:
    witness, log = Witness(tiny_chat(retain=retain)), Log()
    app = attach(talk(witness, is_async=is_async), witness.model, on_event=log, strict=True)
    for text in ("Plan", "then Rome"):
        run(app, turn(text), on("t"), is_async=is_async)
    assert len(witness.calls) == 4
    whole = app.get_state(on("t")).values["messages"]
    n_bytes = witness.model.n_bytes

    # From before its last node; from before its first; from its end, which runs nothing.
    point = checkpoints(app, on("t"), 6, "more")
    again = run(app, None, point.config, is_async=is_async)["messages"]
    assert [m.text for m in again] == [m.text for m in whole]
    assert len(witness.calls) == 5
    point = checkpoints(app, on("t"), 1, "say")
    again = run(app, None, point.config, is_async=is_async)["messages"]
    assert [m.text for m in again] == [m.text for m in whole[:4]]
    assert len(witness.calls) == 7
    point = checkpoints(app, on("t"), 8)
    run(app, None, point.config, is_async=is_async)
    assert len(witness.calls) == 7

    assert witness.calls[4].row == witness.calls[3].row
    assert [call.row for call in witness.calls[5:]] == [call.row for call in witness.calls[:2]]
    if retain == "thread":
        assert all(call.n_reused == call.n_prompt for call in witness.calls[4:])
    # Old and new are two visits of the same rows.
    assert len({call.checkpoint_ns for call in witness.calls}) == 7
    witness.check([] if retain == "run" else witness.calls)
    assert witness.model.n_bytes == n_bytes
    check_events(log.events)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("retain", ["run", "thread"])
def test_forks_and_edits_equal_cold_runs_and_spare_each_other(
    is_async: bool, retain: Any, tiny_chat: MakeChat
) -> None:
    """A fork by `checkpoint_id`, a fork of the fork, an edited and a removed message."""
    witness, log = Witness(tiny_chat(retain=retain)), Log()
    app = attach(talk(witness, is_async=is_async), witness.model, on_event=log, strict=True)

    def go(given: Any, config: Any) -> list[AnyMessage]:
        messages: list[AnyMessage] = run(app, given, config, is_async=is_async)["messages"]
        return messages

    for text in ("Plan", "then Rome", "then Oslo"):
        head = go(turn(text), on("t"))
    head_point = app.get_state(on("t")).config
    assert len(head) == 12

    fork = go(turn("then Lisbon"), checkpoints(app, on("t"), 4).config)
    assert [m.text for m in fork[:5]] == [*[m.text for m in head[:4]], "then Lisbon"]
    assert len(fork) == 8
    deeper = go(turn("then Paris"), app.get_state(on("t")).config)
    assert [m.id for m in deeper[:8]] == [m.id for m in fork]
    assert len(witness.calls) == 10

    # An answer is edited: what follows is computed for the text as it is now.
    edited = AIMessage("No. Go to Oslo first.", id=head[1].id)
    changed = app.update_state(head_point, {"messages": [edited]}, as_node="more")
    after_edit = go(turn("Now"), changed)
    assert after_edit[1].text == edited.text
    assert [m.text for m in after_edit[2:12]] == [m.text for m in head[2:12]]
    # A message is removed.
    changed = app.update_state(
        head_point, {"messages": [RemoveMessage(id=str(head[0].id))]}, as_node="more"
    )
    after_removal = go(turn("Now"), changed)
    assert [m.text for m in after_removal[:11]] == [m.text for m in head[1:]]
    # The head goes on as if nothing of this had been.
    onward = go(turn("Now"), head_point)
    assert [m.id for m in onward[:12]] == [m.id for m in head]
    assert len(witness.calls) == 16

    witness.check([] if retain == "run" else witness.calls)
    if retain == "thread":
        said = {call.reply.id: call for call in witness.calls}
        on_fork, on_head = said[fork[5].id], said[onward[13].id]
        # Each spared what it had in common with what was there, to the token.
        assert on_fork.n_reused == max(
            n_common(on_fork.row[: on_fork.n_prompt], call.row) for call in witness.calls[:6]
        )
        assert on_head.n_reused == max(
            n_common(on_head.row[: on_head.n_prompt], call.row)
            for call in witness.calls
            if call not in (on_head, witness.calls[-1])
        )
        # The fork can be given up alone.
        for message in (fork[5], fork[7], deeper[9], deeper[11]):
            witness.model.kv.release(message.id)
        lost = {fork[5].id, fork[7].id, deeper[9].id, deeper[11].id}
        witness.check([call for call in witness.calls if call.reply.id not in lost])
    assert log.reasons().count("attempt abandoned") == 0
    check_events(log.events)
    witness.model.kv.clear("t")
    witness.check([])


def test_a_paused_thread_is_forked_and_both_are_resumed(tiny_chat: MakeChat) -> None:
    witness, log = Witness(tiny_chat()), Log()
    app = attach(talk(witness, asks=True), witness.model, on_event=log, strict=True)
    app.invoke(turn("Plan"), on("t"))
    paused = app.get_state(on("t"))
    first, waiting = witness.calls
    witness.check([first, waiting])
    # A fork of the pause, in which the first answer is another.
    edited = AIMessage("No. Go to Oslo first.", id=first.reply.id)
    changed = app.update_state(paused.config, {"messages": [edited]}, as_node="say")
    forked = app.invoke(None, changed)
    assert "__interrupt__" in forked
    other = witness.calls[2]
    assert other.n_reused < waiting.n_prompt
    witness.check([first, waiting, other])
    done = app.invoke(Command(resume=1), on("t"))
    assert done["messages"][1].text == edited.text
    again = witness.calls[3]
    assert again.row == other.row
    witness.check([first, waiting, again])
    # The old pause is still there to be resumed.
    done = app.invoke(Command(resume=2), paused.config)
    assert done["messages"][1].id == first.reply.id
    last = witness.calls[4]
    assert last.row == waiting.row
    assert last.n_reused == last.n_prompt
    assert witness.model.n_bytes == 512 * len(
        {call.row[: n + 1] for call in (first, waiting, again, last) for n in range(len(call.row))}
    )
    check_events(log.events)
