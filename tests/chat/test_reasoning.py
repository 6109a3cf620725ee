"""Models that think: reasoning apart from the answer, counted, streamed, and given back."""

from __future__ import annotations

import asyncio
import functools
import operator

import pytest
from langchain_core.messages import (
    HumanMessage,
    ToolMessage,
    message_to_dict,
    messages_from_dict,
)

from tests.chat.speaking import CALL, OPENED, REPLIES, THINKING, TOOLS, look_up
from tests.support import templates
from tests.support.force import force
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import END, byte_tokenizer

ASK = [HumanMessage("Where?")]
THOUGHT = "<think>\nThe plan. Han?\n</think>\n\n"


def join(chunks):
    return functools.reduce(operator.add, chunks)


async def gather(stream):
    return [chunk async for chunk in stream]


WAYS = {
    "invoke": lambda chat: chat.invoke(ASK),
    "ainvoke": lambda chat: asyncio.run(chat.ainvoke(ASK)),
    "stream": lambda chat: join(chat.stream(ASK)),
    "astream": lambda chat: join(asyncio.run(gather(chat.astream(ASK)))),
}


@pytest.fixture
def model():
    return tiny_model("llama", max_position_embeddings=4096)


def spelled(text: str, *, ends: bool = True) -> list[int]:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.convert_tokens_to_ids(END)] if ends else ids


def told(message):
    thought = message.additional_kwargs.get("reasoning_content")
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    usage, reason = message.usage_metadata, message.response_metadata["finish_reason"]
    return message.content, thought, calls, usage.get("output_token_details"), reason


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_special", [False, True])
def test_thoughts_are_apart_from_the_answer(make_chat, model, is_special, way):
    tokenizer = byte_tokenizer(THINKING, special_tags=is_special)
    chat = make_chat(model=model, tokenizer=tokenizer, max_tokens=60)
    with force(model, spelled(f"{THOUGHT}Paris, then.")):
        message = WAYS[way](chat)
    n_thought = len(spelled(THOUGHT.rstrip("\n"), ends=False))
    usage = {"reasoning": n_thought}
    assert told(message) == ("Paris, then.", "The plan. Han?", [], usage, "stop")
    kinds = [block["type"] for block in message.content_blocks]
    assert kinds == ["reasoning", "text"]


@pytest.mark.parametrize("way", WAYS)
def test_a_thought_that_the_prompt_opened_is_one(make_chat, model, way):
    chat = make_chat(model=model, template=OPENED, max_tokens=60)
    with force(model, spelled("The plan.\n</think>\n\nParis.")):
        message = WAYS[way](chat)
    n_thought = len(spelled("The plan.\n</think>", ends=False))
    assert told(message)[:4] == ("Paris.", "The plan.", [], {"reasoning": n_thought})


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_thought_that_never_ends_says_and_calls_nothing(make_chat, model, way):
    text = f"<think>\nThe plan. {REPLIES['hermes']}"
    chat = make_chat(model=model, template=THINKING, max_tokens=len(spelled(text, ends=False)))
    with force(model, spelled(text, ends=False)):
        message = WAYS[way](chat.bind_tools(TOOLS))
    content, thought, calls, usage, reason = told(message)
    assert (content, calls, reason) == ("", [], "length")
    assert thought == f"The plan. {REPLIES['hermes']}"
    assert usage == {"reasoning": message.usage_metadata["output_tokens"]}


@pytest.mark.parametrize("way", WAYS)
def test_calls_in_thoughts_are_not_made(make_chat, model, way):
    draft = REPLIES["hermes"].replace("城市 é", "Rome")
    chat = make_chat(model=model, template=THINKING, max_tokens=200)
    with force(model, spelled(f"<think> maybe {draft} </think>{REPLIES['hermes']}")):
        message = WAYS[way](chat.bind_tools(TOOLS))
    content, thought, calls, _, reason = told(message)
    assert (content, calls, reason) == ("", [(CALL["name"], CALL["args"])], "tool_calls")
    assert thought == f" maybe {draft} "


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_content_is_one_text_block_behind_one_of_reasoning(make_chat, model, version):
    chat = make_chat(model=model, template=THINKING, max_tokens=90, output_version=version)
    text = f"{THOUGHT}Yes. The plan.\n{REPLIES['hermes']}"
    messages = []
    for way in ("invoke", "stream"):
        with force(model, spelled(text)):
            messages.append(WAYS[way](chat.bind_tools(TOOLS)))
    for message in messages:
        blocks = message.content_blocks
        assert [b["type"] for b in blocks] == ["reasoning", "text", "tool_call"]
        assert blocks[0]["reasoning"] == "The plan. Han?"
        assert blocks[2]["args"] == CALL["args"]
        assert message.text == "Yes. The plan."


def test_a_template_that_does_not_think_leaves_the_tags_alone(make_chat, model):
    chat = make_chat(model=model, max_tokens=60)
    with force(model, spelled(f"{THOUGHT}Paris.")):
        message = chat.invoke(ASK)
    assert told(message) == (f"{THOUGHT}Paris.", None, [], None, "stop")


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("template", [THINKING, OPENED, templates.THINK])
def test_a_tool_loop_gives_the_thoughts_back_and_reuses_everything(
    make_chat, model, template, version
):
    chat = make_chat(model=model, template=template, max_tokens=120, output_version=version)
    bound = chat.bind_tools(TOOLS)
    said = {THINKING: THOUGHT, OPENED: THOUGHT.removeprefix("<think>\n"), templates.THINK: ""}
    # These templates print a line end before the call, as the model did.
    text = said[template] + f"\n{REPLIES['hermes']}"
    messages, n_fed, n_reply = [*ASK], 0, len(spelled(text, ends=False))
    for turn in range(3):
        with force(model, spelled(text)):
            asked = bound.invoke(messages)
        assert asked.tool_calls[0]["args"] == CALL["args"]
        if turn:
            read = asked.usage_metadata["input_token_details"]["cache_read"]
            assert read >= n_fed + n_reply - 1
        n_fed = asked.usage_metadata["input_tokens"]
        (kept,) = messages_from_dict([message_to_dict(asked)])  # as a checkpoint does
        result = ToolMessage(look_up("Oslo"), tool_call_id=asked.tool_calls[0]["id"])
        messages += [kept, result]
        fed = chat.prompt_ids(messages, tools=TOOLS)
        assert list(fed[n_fed : n_fed + n_reply]) == spelled(text, ends=False)
    messages.append(HumanMessage("And now?"))
    prompt = chat.engine.tokenizer.decode(chat.prompt_ids(messages, tools=TOOLS))
    assert "Han?" not in prompt  # these templates drop the thoughts of turns that are over
    answer = bound.invoke(messages, max_tokens=12)
    expected = greedy(model, chat.prompt_ids(messages, tools=TOOLS), 12)
    plain = byte_tokenizer().decode(expected, skip_special_tokens=True)
    if "<think>" not in plain and "</think>" not in plain and template is not OPENED:
        assert answer.text == plain


def test_a_forced_call_comes_after_the_thought_that_the_prompt_opened(make_chat, model):
    chat = make_chat(model=model, template=OPENED, max_tokens=400)
    bound = chat.bind_tools(TOOLS, tool_choice="look_up", temperature=1.0, seed=3)
    with force(model, spelled("The plan.\n</think>", ends=False)):
        message = bound.invoke(ASK)
    assert told(message)[:2] == ("", "The plan.")
    found = [call["name"] for call in message.tool_calls + message.invalid_tool_calls]
    assert found == ["look_up"]
    with force(model, spelled("The plan.\n</think>", ends=False)):
        message = chat.invoke(ASK, choice=["Paris", "Rome"])
    assert told(message)[1] == "The plan."
    assert message.content in ("Paris", "Rome")


def test_a_forced_call_of_a_model_that_may_think_comes_at_once(make_chat, model):
    chat = make_chat(model=model, template=THINKING, max_tokens=400)
    message = chat.bind_tools(TOOLS, tool_choice="any").invoke(ASK)
    assert told(message)[:2] == ("", None)
    assert len(message.tool_calls + message.invalid_tool_calls) == 1
    assert chat.invoke(ASK, choice=["Paris", "Rome"]).content in ("Paris", "Rome")
