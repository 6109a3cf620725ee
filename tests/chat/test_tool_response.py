"""Replies read by a tokenizer's own response template, with transformers' parser."""

from __future__ import annotations

import functools
import operator

import pytest
from langchain_core.messages import HumanMessage
from transformers.utils.chat_parsing import parse_response

from tests.chat.speaking import CALL, REPLIES, THINKING, TOOLS
from tests.support.force import force
from tests.support.tiny import tiny_model
from tests.support.tok import END, byte_tokenizer

ASK = [HumanMessage("Where?")]
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>\n", "close": "\n</think>\n\n"},
        "tool_calls": {
            "open": "<tool_call>\n",
            "close": "\n</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
THOUGHT = "<think>\nThe plan.\n</think>\n\n"


def spelled(text: str) -> list[int]:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.convert_tokens_to_ids(END)]


@pytest.fixture(params=[False, True])
def chat_and_model(request, make_chat):
    model = tiny_model("llama", max_position_embeddings=4096)
    tokenizer = byte_tokenizer(THINKING, special_tags=request.param)
    tokenizer.response_template = TEMPLATE
    return make_chat(model=model, tokenizer=tokenizer, max_tokens=200), model


def both(chat, model, text):
    messages = []
    for way in ("invoke", "stream"):
        with force(model, spelled(text)):
            if way == "invoke":
                messages.append(chat.invoke(ASK))
            else:
                messages.append(functools.reduce(operator.add, chat.stream(ASK)))
    return messages


def told(message):
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    invalid = [call["args"] for call in message.invalid_tool_calls]
    return message.content, message.additional_kwargs.get("reasoning_content"), calls, invalid


def test_thoughts_text_and_calls_are_those_of_transformers(chat_and_model):
    chat, model = chat_and_model
    text = f"{THOUGHT}I look.\n{REPLIES['hermes']}"
    parsed = parse_response(text, TEMPLATE, prefix="")
    (call,) = parsed["tool_calls"]
    assert call["function"]["arguments"] == CALL["args"]
    for message in both(chat.bind_tools(TOOLS), model, text):
        expected = [(call["function"]["name"], call["function"]["arguments"])]
        assert told(message) == ("I look.", parsed["thinking"], expected, [])
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert message.usage_metadata["output_token_details"]["reasoning"] > 3


def test_what_the_template_cannot_read_is_an_invalid_call(chat_and_model):
    chat, model = chat_and_model
    text = "Yes.\n<tool_call>\n{bad\n</tool_call>" + REPLIES["hermes"]
    for message in both(chat.bind_tools(TOOLS), model, text):
        content, _, calls, invalid = told(message)
        assert (content, calls) == ("Yes.", [(CALL["name"], CALL["args"])])
        assert len(invalid) == 1
        assert invalid[0].startswith("{bad")


def test_without_tools_it_is_text(chat_and_model):
    chat, model = chat_and_model
    for message in both(chat, model, f"{THOUGHT}Paris."):
        assert told(message) == ("Paris.", "The plan.", [], [])
    for message in both(chat, model, f"So: {REPLIES['hermes']}"):
        content, _, calls, invalid = told(message)
        assert (calls, invalid) == ([], [])
        assert "look_up" in content
