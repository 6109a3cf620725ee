"""An agent on the default model: six steps with two tools, chosen freely, whatever way it is run.

The model has half a billion parameters. What it needs is said here and in docs/agents.md: one call
at a time, since it goes on to guess the results of calls; and an ending that is itself a call,
since behind results of tools it writes calls and never a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field

from sidequest_langchain import SideQuestChatModel, attach
from sidequest_langchain.config import CacheConfig
from tests.graph.agent_ways import FULL_WAYS, WAYS, Told
from tests.support.real import require_real

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:The v3 streaming protocol")]
MODEL = "qwen2.5-coder-0.5b"
QUESTION = (
    "Follow the notes from room to room until you find the treasure, then report it. "
    "Begin with the attic."
)
ASKED = {"messages": [("user", QUESTION)]}
NOTES = {"attic": "garden", "garden": "cellar", "cellar": "library", "library": "kitchen"}


@tool
def look_in(room: str) -> str:
    """Look into a room of the house. Says what is found there."""
    name = room.lower().removeprefix("the ")
    if name == "kitchen":
        return "The treasure is here. It is a silver cup."
    if name not in NOTES:
        return f"There is no room {room}."
    return f"Nothing here but a note: look in the {NOTES[name]}."


@tool(return_direct=True)
def report(treasure: str) -> str:
    """Report what the treasure is, once it is found."""
    return f"Found: {treasure}"


PLACES = {
    "attic": "A note: look in the garden.",
    "garden": "A chest with the number 7. It is locked: open it.",
    "cellar": "A note: look in the library.",
    "library": "A chest with the number 3. It is locked: open it.",
}
CHESTS = {
    7: "A note: look in the cellar.",
    3: "You have found the treasure. It is a silver cup. The search is over.",
}


@tool("look_in")
def look_for_chests(room: str) -> str:
    """Look into a room of the house. Tells what is there."""
    return PLACES.get(room.lower().removeprefix("the "), f"There is no {room}.")


@tool
def open_chest(number: int) -> str:
    """Open the chest with this number. Tells what is in it."""
    return CHESTS.get(number, f"There is no chest {number}.")


class Found(BaseModel):
    """The treasure that was found."""

    treasure: str = Field(description="What the treasure is.")


@pytest.fixture(scope="module")
def model() -> Iterator[SideQuestChatModel]:
    """Threads share prefixes: each way computes what no way before it had."""
    require_real(MODEL)
    config = CacheConfig(isolation="shared", retain="thread")
    # The first call of an answer counts; the others would have guessed its result.
    given = {"temperature": 0.0, "max_tokens": 40, "parallel_tool_calls": False}
    made = SideQuestChatModel(model=MODEL, cache=config, **given)
    yield made
    made.kv.clear()


def calls_of(found: list[Told]) -> list[tuple[str, Any]]:
    calls = [call for kind, _, more in found if kind == "ai" for call in more[:-2]]
    return [(name, dict(args)) for name, args in calls]


LOOKS = [
    ("look_in", {"room": room}) for room in ("attic", "garden", "cellar", "library", "kitchen")
]


@pytest.fixture(scope="module")
def searching(model: SideQuestChatModel) -> Any:
    """No choice is forced: `tool_choice` is `None`, and nothing masks what the model writes."""
    agent = create_agent(model, [look_in, report], checkpointer=InMemorySaver())
    return attach(agent, model, strict=True)


@pytest.mark.parametrize("way", FULL_WAYS)
def test_six_steps_are_done_in_every_way(
    model: SideQuestChatModel, searching: Any, way: str
) -> None:
    config = {"configurable": {"thread_id": way}, "recursion_limit": 30}
    found = WAYS[way](searching, ASKED, config)
    assert calls_of(found) == [*LOOKS, ("report", {"treasure": "silver cup"})]
    assert [text for kind, text, _ in found if kind == "tool"] == [
        *[f"Nothing here but a note: look in the {room}." for room in NOTES.values()],
        "The treasure is here. It is a silver cup.",
        "Found: silver cup",
    ]
    assert [text for kind, text, _ in found if kind == "ai"] == [""] * 6
    model.kv.check_integrity()


SOME_WAYS = ("invoke", "astream all modes", "astream_events v2", "stream_events v3")
CHEST_STEPS = [
    ("look_in", {"room": "attic"}),
    ("look_in", {"room": "garden"}),
    ("open_chest", {"number": 7}),
    ("look_in", {"room": "cellar"}),
    ("look_in", {"room": "library"}),
    ("open_chest", {"number": 3}),
]
SEARCH = "Follow the notes until you find the treasure, then say what it is. Begin with the attic."


def structured(model: SideQuestChatModel, response_format: Any) -> tuple[list[Told], Any]:
    """What one way of each kind tells, and the object that they end with: plain `create_agent`."""
    agent = create_agent(
        model,
        [look_for_chests, open_chest],
        response_format=response_format,
        checkpointer=InMemorySaver(),
    )
    app = attach(agent, model, strict=True)
    by_way, answers = {}, []
    for way in SOME_WAYS:
        config = {"configurable": {"thread_id": f"{type(response_format).__name__} {way}"}}
        by_way[way] = WAYS[way](app, {"messages": [("user", SEARCH)]}, config)
        answers.append(app.get_state(config).values["structured_response"])
    assert by_way == dict.fromkeys(by_way, by_way["invoke"])
    assert answers == [answers[0]] * len(answers)
    model.kv.check_integrity()
    return by_way["invoke"], answers[0]


def test_six_steps_end_in_a_response_format(model: SideQuestChatModel) -> None:
    """LangChain forces a call here, which one is the model's choice; no middleware is needed."""
    found, answer = structured(model, ToolStrategy(Found))
    assert calls_of(found) == [*CHEST_STEPS, ("Found", {"treasure": "silver cup"})]
    assert answer == Found(treasure="silver cup")


def test_a_response_format_beside_free_calls_is_kept_to(model: SideQuestChatModel) -> None:
    """Whether to call or to answer is the model's choice: this one answers at once, unasked."""
    found, answer = structured(model, ProviderStrategy(Found))
    assert isinstance(answer, Found)
    assert found[-1][:2] == ("ai", answer.model_dump_json().replace('":"', '": "'))
