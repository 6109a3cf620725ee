"""Answers of a given shape, end to end: every form of a schema, every method, every way to call."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal

import pydantic
import pydantic.v1
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from typing_extensions import TypedDict

from sidequest_langchain.errors import GrammarError, RequestError
from tests.chat.speaking import HERMES, REPLIES, look_up
from tests.support.force import force
from tests.support.tiny import tiny_model
from tests.support.tok import END, byte_tokenizer

ASK = [HumanMessage("Where?")]
City = Literal["Oslo", "城市", 'a"b']


class Leg(pydantic.BaseModel):
    """One leg."""

    city: City
    days: Literal[1, 2, 3] = pydantic.Field(description="how long")


class LegV1(pydantic.v1.BaseModel):
    """One leg."""

    city: City
    days: Literal[1, 2, 3]


class LegDict(TypedDict):
    """One leg."""

    city: Annotated[City, ..., "where to"]
    days: Annotated[Literal[1, 2, 3], ..., "how long"]


SCHEMA = {
    "title": "Leg",
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "城市", 'a"b']}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
FORMS = {
    "pydantic": Leg,
    "pydantic v1": LegV1,
    "TypedDict": LegDict,
    "JSON schema": SCHEMA,
    "OpenAI tool": {"type": "function", "function": {"name": "Leg", "parameters": SCHEMA}},
    "Anthropic tool": {"name": "Leg", "input_schema": SCHEMA},
}
METHODS = ("json_schema", "function_calling", "json_mode")


async def last_of(stream):
    return [value async for value in stream][-1]


WAYS = {
    "invoke": lambda model: model.invoke(ASK),
    "ainvoke": lambda model: asyncio.run(model.ainvoke(ASK)),
    "stream": lambda model: list(model.stream(ASK))[-1],
    "astream": lambda model: asyncio.run(last_of(model.astream(ASK))),
    "batch": lambda model: model.batch([ASK, ASK])[1],
}


@pytest.fixture
def model():
    return tiny_model("llama", max_position_embeddings=4096)


@pytest.fixture
def chat(make_chat, model):
    """A model that says nothing of sense unless it is held to it."""
    return make_chat(model=model, template=HERMES, max_tokens=100)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_the_answer_has_the_shape_in_every_way_to_ask(chat, form, method):
    schema = FORMS[form]
    structured = chat.with_structured_output(schema, method=method)
    found = [WAYS[way](structured) for way in WAYS]
    assert all(value == found[0] for value in found)
    is_class = isinstance(schema, type) and schema is not LegDict
    assert isinstance(found[0], schema if is_class else dict)
    values = dict(found[0])
    assert list(values) == ["city", "days"]
    assert values["city"] in ("Oslo", "城市", 'a"b')
    assert values["days"] in (1, 2, 3)


@pytest.mark.parametrize("method", METHODS)
def test_the_raw_message_comes_along_on_demand(chat, method):
    structured = chat.with_structured_output(Leg, method=method, include_raw=True)
    found = structured.invoke(ASK)
    assert set(found) == {"raw", "parsed", "parsing_error"}
    assert (type(found["parsed"]), found["parsing_error"]) == (Leg, None)
    raw = found["raw"]
    said = raw.tool_calls[0]["args"] if method == "function_calling" else json.loads(raw.content)
    assert Leg(**said) == found["parsed"]
    assert raw.response_metadata["finish_reason"] in ("stop", "tool_calls")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Leg, SCHEMA])
def test_an_answer_that_was_cut_off_is_an_error_and_no_value(chat, schema, method):
    short = chat.with_structured_output(schema, method=method, max_tokens=12)
    with pytest.raises(OutputParserException, match=r"cut off after 12 tokens.*max_tokens"):
        short.invoke(ASK)
    with pytest.raises(OutputParserException, match="cut off"):
        list(short.stream(ASK))
    told = chat.with_structured_output(
        schema, method=method, max_tokens=12, include_raw=True
    ).invoke(ASK)
    assert told["parsed"] is None
    assert isinstance(told["parsing_error"], OutputParserException)
    assert told["raw"].response_metadata["finish_reason"] == "length"
    assert chat.with_structured_output(schema, method=method).invoke(ASK)  # serves on


def test_json_mode_without_a_schema_holds_to_an_object(chat, model):
    text = '{"city": "Oslo"}'
    with replying(model, text):
        assert chat.with_structured_output(method="json_mode").invoke(ASK) == {"city": "Oslo"}


def replying(model, text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return force(model, [*ids, tokenizer.convert_tokens_to_ids(END)])


def test_an_answer_may_be_calls_of_tools_instead(chat, model):
    either = chat.with_structured_output(Leg, tools=[look_up], include_raw=True)
    with replying(model, REPLIES["hermes"]):
        found = either.invoke(ASK)
    assert [call["name"] for call in found["raw"].tool_calls] == ["look_up"]
    assert (found["parsed"], found["parsing_error"]) == (None, None)
    with replying(model, '{"city": "Oslo", "days": 2}'):
        found = either.invoke(ASK)
    assert found["parsed"] == Leg(city="Oslo", days=2)
    assert not found["raw"].tool_calls


@pytest.mark.parametrize(
    ("schema", "given", "words"),
    [
        (None, {}, "needs a schema"),
        (None, {"method": "function_calling"}, "needs a schema"),
        (Leg, {"method": "xml"}, "method must be one of json_schema"),
        (Leg, {"method": "json_mode", "strict": True}, "strict"),
        (Leg, {"tools": [look_up]}, "include_raw=True"),
        (Leg, {"tools": [look_up], "method": "function_calling", "include_raw": True}, "tools go"),
        (Leg, {"frobnicate": 1}, "'frobnicate'"),
        (Leg, {"temprature": 1}, "'temperature'"),
        (5, {}, "a schema must be"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_at_once(chat, schema, given, words):
    before = chat.kv.usage()
    with pytest.raises(ValueError, match=words):
        chat.with_structured_output(schema, **given)
    assert chat.kv.usage() == before


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_strict_is_handed_on_and_changes_no_shape(chat, method, strict):
    assert chat.with_structured_output(Leg, method=method, strict=strict).invoke(ASK)


def test_settings_of_the_call_go_along(chat):
    bound = chat.with_structured_output(Leg, temperature=0.5, seed=3, include_raw=True)
    assert bound.invoke(ASK)["raw"].content == bound.invoke(ASK)["raw"].content


def test_a_schema_that_nothing_fits_is_named_and_the_engine_serves_on(chat):
    schema = {"title": "T", "type": "object", "properties": {"a": False}, "required": ["a"]}
    with pytest.raises(GrammarError):
        chat.with_structured_output(schema).invoke(ASK)
    assert chat.with_structured_output(Leg).invoke(ASK)


# -- telling the model -------------------------------------------------------------------

FORMAT = {"type": "json_schema", "json_schema": {"name": "Leg", "schema": SCHEMA}}


def fed(chat, messages, **given):
    """The text of the prompt of a call."""
    call = chat._prepare(messages, None, None, given)
    return byte_tokenizer().decode(call.requests[0].prompt_ids)


def test_the_schema_is_told_behind_the_last_question(chat):
    messages = [SystemMessage("S"), HumanMessage("a"), AIMessage("b"), HumanMessage("c")]
    plain, told = fed(chat, messages), fed(chat, messages, response_format=FORMAT)
    shown = json.dumps({k: v for k, v in SCHEMA.items() if k != "title"}, ensure_ascii=False)
    words = f"\n\nRespond only with a JSON object that matches this JSON schema:\n{shown}"
    assert told == plain.replace("user\nc", f"user\nc{words}")
    assert fed(chat, messages, response_format=FORMAT, schema_in_prompt=False) == plain
    silent = chat.model_copy(update={"schema_in_prompt": False})
    assert fed(silent, messages, response_format=FORMAT) == plain


def test_with_tools_it_is_told_as_one_of_two_and_keeps_its_place_in_a_loop(chat):
    call = {"name": "look_up", "args": {"city": "Oslo"}, "id": "c", "type": "tool_call"}
    messages = [HumanMessage("Where?")]
    first = fed(chat, messages, response_format=FORMAT, tools=[look_up])
    assert "Unless you call a tool, respond only with a JSON object" in first
    loop = [*messages, AIMessage("", tool_calls=[call]), ToolMessage("rain", tool_call_id="c")]
    again = fed(chat, loop, response_format=FORMAT, tools=[look_up])
    opening = "<|im_start|>assistant\n"
    assert again.startswith(first.removesuffix(opening))
    forced = fed(chat, messages, response_format=FORMAT, tools=[look_up], tool_choice="any")
    assert "JSON schema" not in forced


def test_what_was_said_before_the_last_question_is_shared_whatever_the_form(chat):
    long = [SystemMessage("The rule. " * 20), HumanMessage("a"), AIMessage("b")]
    n_shared = len(chat.prompt_ids([*long, HumanMessage("c")])) - 10
    chat.invoke([*long, HumanMessage("c")], max_tokens=2)
    found = chat.invoke([*long, HumanMessage("c")], response_format=FORMAT)
    assert found.usage_metadata["input_token_details"]["cache_read"] > n_shared


def test_a_form_without_a_question_is_a_question(chat):
    told = fed(chat, [SystemMessage("S")], response_format=FORMAT)
    assert "<|im_start|>user\nRespond only with" in told


def test_only_schemas_are_told(chat):
    plain = fed(chat, ASK)
    for given in ({"regex": "a+"}, {"choice": ["a"]}, {"response_format": {"type": "json_object"}}):
        assert fed(chat, ASK, **given) == plain
    with pytest.raises(RequestError, match="schema_in_prompt must be True or False"):
        chat.invoke(ASK, schema_in_prompt="yes")
