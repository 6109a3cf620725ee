"""Every way to run an agent of LangChain, and the conversation that each way tells of.

A way takes an agent with a checkpointer, what is asked, and a config of its own thread. It gives
back what its own stream told, not what the state says in the end: a stream that loses a message,
or tells one twice, differs. It must not know which model answers.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage

Told = tuple[str, str, tuple[Any, ...]]
Way = Callable[[Any, dict[str, Any], dict[str, Any]], list[Told]]
MODES = ("values", "updates", "messages", "tasks", "checkpoints", "debug")


def told(messages: Iterable[BaseMessage]) -> list[Told]:
    """Who says what and calls what, without what differs from run to run.

    A result tells the place of its call instead of the call's id.
    """
    places: dict[str | None, int] = {}
    found: list[Told] = []
    for message in messages:
        more: list[Any] = []
        if isinstance(message, AIMessage):
            assert message.invalid_tool_calls == []
            for call in message.tool_calls:
                places[call["id"]] = len(places)
                more.append((call["name"], tuple(sorted(call["args"].items()))))
            more.append(message.response_metadata["finish_reason"])
            more.append((message.usage_metadata or {})["output_tokens"])
        if isinstance(message, ToolMessage):
            more += [message.name, message.status, places[message.tool_call_id]]
        kind = message.type.removesuffix("MessageChunk").lower()
        found.append((kind, message.text, tuple(more)))
    return found


# -- what the parts of a stream tell -----------------------------------------------------


def _values(parts: list[Any]) -> list[BaseMessage]:
    """The last state; every state on the way begins it."""
    states = [part["messages"] for part in parts]
    for state in states:
        assert state == states[-1][: len(state)]
    assert [len(state) for state in states] == sorted({len(state) for state in states})
    return states[-1]


def _updates(parts: list[Any]) -> list[BaseMessage]:
    return [m for part in parts for update in part.values() if update for m in update["messages"]]


def _messages(parts: list[Any]) -> list[BaseMessage]:
    """Chunks of a message joined; the chunks of one message stand together."""
    joined: list[BaseMessage] = []
    for chunk, facts in parts:
        assert isinstance(chunk, ToolMessage) or facts["langgraph_node"] == "model"
        if joined and joined[-1].id == chunk.id and isinstance(chunk, AIMessageChunk):
            joined[-1] = joined[-1] + chunk  # type: ignore[assignment]
        else:
            joined.append(chunk)
    assert len({m.id for m in joined}) == len(joined)
    for message in joined:
        if isinstance(message, AIMessageChunk):
            _check_chunks(message, [c for c, _ in parts if c.id == message.id])
    return joined


def _check_chunks(whole: AIMessageChunk, chunks: list[AIMessageChunk]) -> None:
    """One beginning for each call, and a last chunk that holds nothing."""
    begun = [
        (part["name"], part["id"]) for c in chunks for part in c.tool_call_chunks if part["name"]
    ]
    assert begun == [(call["name"], call["id"]) for call in whole.tool_calls]
    assert [c.chunk_position for c in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert (chunks[-1].text, chunks[-1].tool_call_chunks) == ("", [])


def _tasks(parts: list[Any]) -> list[BaseMessage]:
    """Results of tasks, each told of as begun before."""
    begun = [part["id"] for part in parts if "result" not in part]
    done = [part for part in parts if "result" in part]
    assert [part["id"] for part in done] == begun
    assert [part["error"] for part in done] == [None] * len(done)
    return [m for part in done for m in part["result"]["messages"]]


def _checkpoints(parts: list[Any]) -> list[BaseMessage]:
    messages: list[BaseMessage] = parts[-1]["values"]["messages"]
    return messages


def _debug(parts: list[Any]) -> list[BaseMessage]:
    steps = [part["step"] for part in parts]
    assert steps == sorted(steps)
    assert {part["type"] for part in parts} == {"checkpoint", "task", "task_result"}
    tasks = _tasks([part["payload"] for part in parts if part["type"] != "checkpoint"])
    last = [part["payload"] for part in parts if part["type"] == "checkpoint"][-1]
    state: list[BaseMessage] = last["values"]["messages"]
    assert state[-len(tasks) :] == tasks
    return state


_READERS: dict[str, Callable[[list[Any]], list[BaseMessage]]] = {
    "values": _values,
    "updates": _updates,
    "messages": _messages,
    "tasks": _tasks,
    "checkpoints": _checkpoints,
    "debug": _debug,
}


def _read(mode: str, parts: list[Any]) -> list[Told]:
    """What a stream of one mode told, without the question."""
    return [one for one in told(_READERS[mode](parts)) if one[0] not in ("human", "system")]


def _read_all(parts: list[Any]) -> list[Told]:
    """What a stream of all modes told: the same in each."""
    by_mode = {mode: _read(mode, [p for m, p in parts if m == mode]) for mode in MODES}
    for one in by_mode.values():
        assert one == by_mode["values"]
    return by_mode["values"]


# -- the ways ----------------------------------------------------------------------------


def _state(state: Any) -> list[Told]:
    return _read("values", [state])


def _mode(mode: str) -> Way:
    def way(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
        return _read(mode, list(agent.stream(asked, config, stream_mode=mode)))

    return way


def _async_mode(mode: str) -> Way:
    def way(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
        return _read(mode, _gathered(agent.astream(asked, config, stream_mode=mode)))

    return way


def _gathered(stream: Any) -> list[Any]:
    async def gather() -> list[Any]:
        return [part async for part in stream]

    return asyncio.run(gather())


def _all_modes(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
    return _read_all(list(agent.stream(asked, config, stream_mode=list(MODES))))


def _async_all_modes(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
    return _read_all(_gathered(agent.astream(asked, config, stream_mode=list(MODES))))


def _typed_parts(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
    """Parts of version 2, which are dicts that tell their mode."""
    parts = list(agent.stream(asked, config, stream_mode=list(MODES), version="v2"))
    return _read_all([(part["type"], part["data"]) for part in parts])


def _events_v2(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
    """Every model's stream, joined, is the message it ends with."""
    events = _gathered(agent.astream_events(asked, config, version="v2"))
    ends = [e for e in events if e["event"] == "on_chat_model_end"]
    for end in ends:
        chunks = [
            e["data"]["chunk"]
            for e in events
            if e["event"] == "on_chat_model_stream" and e["run_id"] == end["run_id"]
        ]
        joined = functools.reduce(operator.add, chunks)
        assert told([joined]) == told([end["data"]["output"]])
    root = [e for e in events if e["event"] == "on_chain_end" and not e["parent_ids"]]
    state = _state(root[0]["data"]["output"])
    assert [one for one in state if one[0] == "ai"] == told(e["data"]["output"] for e in ends)
    return state


def _check_v3(streamed: list[AIMessage], state: list[Told]) -> list[Told]:
    spoken = [(one[1], one[2][:-2]) for one in state if one[0] == "ai"]
    found = [
        (
            m.text,
            tuple((call["name"], tuple(sorted(call["args"].items()))) for call in m.tool_calls),
        )
        for m in streamed
    ]
    assert found == spoken
    return state


def _events_v3(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
    with agent.stream_events(asked, config, version="v3") as run:
        streamed = [message.output for message in run.messages]
        return _check_v3(streamed, _state(run.output))


def _async_events_v3(agent: Any, asked: dict[str, Any], config: dict[str, Any]) -> list[Told]:
    async def drive() -> list[Told]:
        async with await agent.astream_events(asked, config, version="v3") as run:
            streamed = [await message.output async for message in run.messages]
            return _check_v3(streamed, _state(await run.output()))

    return asyncio.run(drive())


WAYS: dict[str, Way] = {
    "invoke": lambda agent, asked, config: _state(agent.invoke(asked, config)),
    "ainvoke": lambda agent, asked, config: _state(asyncio.run(agent.ainvoke(asked, config))),
    **{f"stream {mode}": _mode(mode) for mode in MODES},
    **{f"astream {mode}": _async_mode(mode) for mode in MODES},
    "stream all modes": _all_modes,
    "astream all modes": _async_all_modes,
    "stream all modes, version 2": _typed_parts,
    "astream_events v2": _events_v2,
    "stream_events v3": _events_v3,
    "astream_events v3": _async_events_v3,
}
"""`custom` tells what tools write, not messages: tested apart."""
FULL_WAYS = [way for way in WAYS if " all " in way or "events" in way or "invoke" in way]
"""Those that between them go through everything the others do."""
