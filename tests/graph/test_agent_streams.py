"""An agent of six steps, scripted: every way to run it tells the same, and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from pydantic import BaseModel

from sidequest_langchain import SideQuestChatModel, attach
from sidequest_langchain.config import CacheConfig
from tests.graph.agent_ways import FULL_WAYS, WAYS, Told
from tests.graph.agents import call, look, saying, told_of
from tests.support.templates import TOOLS
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
ASKED = {"messages": [("user", "Plan a trip.")]}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    get_stream_writer()({"sum": a + b})
    return a + b


class Plan(BaseModel):
    """A plan."""

    city: str
    days: int


def adding(a: int, b: int) -> str:
    return f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


CALLS = [call("Oslo"), adding(1, 2), call("Rome"), adding(3, 3), call("Paris"), adding(6, 1)]
RESULTS = [told_of("Oslo"), "3", told_of("Rome"), "6", told_of("Paris"), "7"]
PLAN = {"city": "Rome", "days": 7}
AS_TEXT = json.dumps(PLAN)
AS_CALL = f'\n<tool_call>\n{{"name": "Plan", "arguments": {AS_TEXT}}}\n</tool_call>'


@pytest.fixture(scope="module")
def model() -> Iterator[SideQuestChatModel]:
    made = SideQuestChatModel.from_model(
        tiny_model("llama", max_position_embeddings=4096),
        byte_tokenizer(TOOLS),
        max_tokens=64,
        cache=CacheConfig(retain="run"),
    )
    yield made
    made.engine.close()
    gc.collect()


@pytest.fixture
def agent_of(model: SideQuestChatModel) -> Callable[..., Any]:
    def make(**given: Any) -> Any:
        agent = create_agent(model, [look, add], checkpointer=InMemorySaver(), **given)
        return attach(agent, model, strict=True)

    return make


def config(thread: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}}


def n_bytes(model: SideQuestChatModel) -> int:
    model.kv.check_integrity()
    return model.kv.usage().n_bytes


def said_and_done(found: list[Told]) -> list[tuple[Any, ...]]:
    """Who says what, with its one call, or the place of the call that it answers."""
    short: list[tuple[Any, ...]] = []
    for kind, text, more in found:
        if kind == "tool":
            short.append((kind, text, more[-1]))
        else:
            *calls, reason, n_tokens = more
            # A form ends as soon as it is complete, text by a token more.
            said = len(byte_tokenizer().encode(text or as_text(calls), add_special_tokens=False))
            assert n_tokens in (said, said + 1)
            assert reason == ("tool_calls" if calls else "stop")
            short.append((kind, text, *[(name, dict(args)) for name, args in calls]))
    return short


def as_text(calls: list[Any]) -> str:
    ((name, args),) = calls
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': dict(args)})}\n</tool_call>"


FORMATS = {
    "text": (None, "The answer."),
    "provider": (ProviderStrategy(Plan), AS_TEXT),
    "tool": (ToolStrategy(Plan), AS_CALL),
}
ENDINGS: dict[str, list[tuple[Any, ...]]] = {
    "text": [("ai", "The answer.")],
    "provider": [("ai", AS_TEXT)],
    "tool": [
        ("ai", "", ("Plan", PLAN)),
        ("tool", f"Returning structured response: {Plan(**PLAN)}", 6),
    ],
}


@pytest.mark.parametrize(
    ("form", "way"),
    [("text", way) for way in WAYS]
    + [(form, way) for form in ("provider", "tool") for way in FULL_WAYS],
)
def test_every_way_tells_the_same_and_leaves_nothing(
    model: SideQuestChatModel, agent_of: Callable[..., Any], form: str, way: str
) -> None:
    response_format, last = FORMATS[form]
    agent = agent_of(response_format=response_format)
    with saying(model, *CALLS, last) as script:
        found = WAYS[way](agent, ASKED, config(way))
    assert script.n_left == 0
    assert said_and_done(found) == [
        ("ai", "", ("look", {"place": "Oslo"})), ("tool", told_of("Oslo"), 0),
        ("ai", "", ("add", {"a": 1, "b": 2})), ("tool", "3", 1),
        ("ai", "", ("look", {"place": "Rome"})), ("tool", told_of("Rome"), 2),
        ("ai", "", ("add", {"a": 3, "b": 3})), ("tool", "6", 3),
        ("ai", "", ("look", {"place": "Paris"})), ("tool", told_of("Paris"), 4),
        ("ai", "", ("add", {"a": 6, "b": 1})), ("tool", "7", 5),
        *ENDINGS[form],
    ]  # fmt: skip
    state = agent.get_state(config(way)).values
    assert state.get("structured_response") == (None if form == "text" else Plan(**PLAN))
    assert n_bytes(model) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_what_tools_write_is_streamed(
    model: SideQuestChatModel, agent_of: Callable[..., Any], is_async: bool
) -> None:
    agent = agent_of()

    async def gather() -> list[Any]:
        return [p async for p in agent.astream(ASKED, config("c"), stream_mode="custom")]

    with saying(model, *CALLS, "The answer."):
        if is_async:
            written = asyncio.run(gather())
        else:
            written = list(agent.stream(ASKED, config("c"), stream_mode="custom"))
    assert written == [{"sum": 3}, {"sum": 6}, {"sum": 7}]
    assert n_bytes(model) == 0


def test_every_step_computes_the_result_and_nothing_before_it(
    model: SideQuestChatModel, agent_of: Callable[..., Any]
) -> None:
    with saying(model, *CALLS, "The answer."):
        messages = agent_of().invoke(ASKED, config("p"))["messages"]
    facts = [m.response_metadata["sidequest"] for m in messages if m.type == "ai"]
    sizes = [len(model.get_token_ids(result)) for result in RESULTS]
    for fact, size in zip(facts[1:], sizes, strict=True):
        assert size < fact["prefilled_tokens"] < size + 60
