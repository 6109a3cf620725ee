"""Messages as turns: every form of content that is text, and a clear word on what is not."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from sidequest_langchain.chat.messages import ToolCall, reply_id, turns_of
from sidequest_langchain.errors import MessageError

CALL = {"name": "look_up", "args": {"city": "Oslo", "n": 2}, "id": "c1", "type": "tool_call"}


def only(message):
    (turn,) = turns_of([message])
    return turn


@pytest.mark.parametrize(
    "content",
    [
        "ab",
        ["a", "b"],
        [{"type": "text", "text": "a"}, "b"],
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"text": "b"}],
        [{"type": "output_text", "text": "ab"}, {"type": "text", "text": ""}],
    ],
)
@pytest.mark.parametrize("kind", [HumanMessage, SystemMessage, AIMessage])
def test_text_blocks_are_the_plain_string(kind, content):
    assert only(kind(content=content)).text == "ab"


@pytest.mark.parametrize("content", ["", [], [""]])
def test_empty_content_is_an_empty_turn(content):
    assert only(HumanMessage(content)).text == ""


def test_content_of_none_is_an_empty_turn():
    assert only(AIMessage.model_construct(content=None, tool_calls=[])).text == ""


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "image_url"),
        ({"type": "image", "url": "https://example.org/a.png"}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"type": "file", "base64": "AA", "mime_type": "application/pdf"}, "file"),
        ({"type": "video", "url": "https://example.org/a.mp4"}, "video"),
    ],
)
@pytest.mark.parametrize("kind", [HumanMessage, lambda c: ToolMessage(c, tool_call_id="c1")])
def test_a_block_that_is_no_text_is_named(kind, block, named):
    with pytest.raises(MessageError, match=f"'{named}'.*text only"):
        turns_of([kind([{"type": "text", "text": "see"}, block])])


def test_an_empty_list_of_messages_is_refused():
    with pytest.raises(MessageError, match="messages"):
        turns_of([])


def test_a_message_that_is_no_part_of_a_prompt_is_refused():
    with pytest.raises(MessageError, match="RemoveMessage"):
        turns_of([RemoveMessage(id="1")])


def test_roles():
    messages = [
        SystemMessage("s"),
        HumanMessage("h", name="Ann"),
        AIMessage("a"),
        ToolMessage("t", tool_call_id="c1", name="look_up", status="error", artifact=object()),
        FunctionMessage(name="f", content="r"),
        ChatMessage(role="critic", content="c"),
    ]
    turns = turns_of(messages)
    assert [turn.role for turn in turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "critic",
    ]
    assert [turn.name for turn in turns] == [None, "Ann", None, "look_up", "f", None]
    assert turns[3].tool_call_id == "c1"


def test_tool_calls_keep_their_arguments_as_a_mapping():
    turn = only(AIMessage("", tool_calls=[CALL]))
    assert turn.tool_calls == (
        ToolCall(name="look_up", arguments={"city": "Oslo", "n": 2}, call_id="c1"),
    )


def test_anthropics_blocks_are_calls_and_results():
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": CALL["args"]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"text": "42"}]}
    said = AIMessage([{"type": "text", "text": "Let me see."}, use])
    both = AIMessage(said.content, tool_calls=[CALL])
    assert only(said).tool_calls == only(both).tool_calls
    assert only(said).text == "Let me see."
    turns = turns_of([HumanMessage([result, {"type": "text", "text": "and now?"}])])
    assert [(turn.role, turn.text) for turn in turns] == [("tool", "42"), ("user", "and now?")]
    assert [turn.role for turn in turns_of([HumanMessage([result])])] == ["tool"]


def test_reasoning_is_apart_from_the_text():
    blocks = AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}])
    given = AIMessage("a", additional_kwargs={"reasoning_content": "hm"})
    assert [(only(m).text, only(m).reasoning) for m in (blocks, given)] == [("a", "hm")] * 2


def test_the_call_of_a_reply_is_its_id_or_what_its_metadata_says():
    assert reply_id(AIMessage("a", id="sq-1")) == "sq-1"
    ours = AIMessage("a", id="run-2", response_metadata={"sidequest": {"call_id": "sq-1"}})
    assert reply_id(ours) == "sq-1"
    assert reply_id(AIMessage("a", id="x", response_metadata={"sidequest": 3})) == "x"
    assert reply_id(AIMessage("a")) is None
