"""Tool calls end to end: bound, told to the model, read from its reply, streamed, forced."""

from __future__ import annotations

import asyncio
import functools
import json
import operator

import jsonschema
import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage

from sidequest_langchain.chat.tools import described
from sidequest_langchain.errors import RequestError
from tests.chat.speaking import CALL, FAMILIES, HERMES, REPLIES, TOOLS, add, look_up
from tests.support.force import force
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import END, byte_tokenizer

ASK = [HumanMessage("Where?")]


def join(chunks):
    return functools.reduce(operator.add, chunks)


async def gather(stream):
    return [chunk async for chunk in stream]


async def events_of(chat, version):
    found = [event async for event in chat.astream_events(ASK, version=version)]
    ends = [e for e in found if e["event"] == "on_chat_model_end"]
    return ends[0]["data"]["output"], found


def v3(chat):
    return chat.stream_events(ASK, version="v3").output


async def av3(chat):
    stream = await chat.astream_events(ASK, version="v3")
    return await stream.output


WAYS = {
    "invoke": lambda chat: chat.invoke(ASK),
    "ainvoke": lambda chat: asyncio.run(chat.ainvoke(ASK)),
    "stream": lambda chat: join(chat.stream(ASK)),
    "astream": lambda chat: join(asyncio.run(gather(chat.astream(ASK)))),
    "invoke, streaming inside": lambda chat: chat.invoke(ASK, stream=True),
    "generate": lambda chat: chat.batch([ASK])[0],
    "events v2": lambda chat: asyncio.run(events_of(chat, "v2"))[0],
}


def replying(chat, text, model, *, ends=True):
    """The scripted reply, inside of a `with`."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return force(model, [*ids, tokenizer.convert_tokens_to_ids(END)] if ends else ids)


def told(message):
    """What a message says and calls, without ids."""
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    invalid = [(call["name"], call["args"]) for call in message.invalid_tool_calls]
    usage = message.usage_metadata["output_tokens"]
    reason = message.response_metadata["finish_reason"]
    return message.content, calls, invalid, usage, reason, dict(message.additional_kwargs)


def roomy(seed=0):
    return tiny_model("llama", seed=seed, max_position_embeddings=4096)


@pytest.fixture
def model():
    return roomy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_the_same_however_it_is_asked_for(make_chat, model, family, way):
    chat = make_chat(model=model, template=FAMILIES[family], max_tokens=90)
    with replying(chat, REPLIES[family], model):
        message = WAYS[way](chat.bind_tools(TOOLS))
    assert told(message)[:3] == ("", [(CALL["name"], CALL["args"])], [])
    assert told(message)[4:] == ("tool_calls", {})
    (call,) = message.tool_calls
    assert len(call["id"]) == 9


@pytest.mark.parametrize("way", ["stream", "astream", "ainvoke"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The plan.\n", "stop"),
        (f"Yes.\n{REPLIES['hermes']}\n{REPLIES['hermes']}", "tool_calls"),
        ("<tool_call>\n{'name': 'add'}\n</tool_call>", "tool_calls"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call> So.', "tool_calls"),
        ('```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', "tool_calls"),
    ],
)
def test_every_way_tells_the_same(make_chat, model, text, reason, way):
    chat = make_chat(model=model, template=HERMES, max_tokens=200)
    bound = chat.bind_tools([look_up, add])
    with replying(chat, text, model):
        expected = told(bound.invoke(ASK))
    with replying(chat, text, model):
        assert told(WAYS[way](bound)) == expected
    assert expected[4] == reason


@pytest.mark.parametrize("is_async", [False, True])
def test_streamed_events_of_version_3_have_the_call(make_chat, model, is_async):
    chat = make_chat(model=model, template=HERMES, max_tokens=90)
    with replying(chat, f"Yes.\n{REPLIES['hermes']}", model):
        message = (
            asyncio.run(av3(chat.bind_tools(TOOLS))) if is_async else v3(chat.bind_tools(TOOLS))
        )
    blocks = [(block["type"], block.get("text") or block.get("args")) for block in message.content]
    assert blocks == [("text", "Yes."), ("tool_call", CALL["args"])]
    assert [call["args"] for call in message.tool_calls] == [CALL["args"]]


def test_chunks_are_as_langchain_wants_them(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=200)
    with replying(chat, f"Yes.\n{REPLIES['hermes']}\n{REPLIES['hermes']}", model):
        chunks = list(chat.bind_tools(TOOLS).stream(ASK))
    assert "".join(chunk.content for chunk in chunks) == "Yes."
    parts = [part for chunk in chunks for part in chunk.tool_call_chunks]
    for index in (0, 1):
        first, *deltas = [part for part in parts if part["index"] == index]
        assert (first["name"], first["args"]) == ("look_up", "")
        assert first["id"]
        assert len(deltas) > 3
        assert {(part["name"], part["id"]) for part in deltas} == {(None, None)}
        assert json.loads("".join(part["args"] for part in deltas)) == CALL["args"]
        assert "城市" in "".join(part["args"] for part in deltas)
    last = chunks[-1]
    assert last.chunk_position == "last"
    assert (last.content, last.tool_call_chunks) == ("", [])
    assert [chunk.chunk_position for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1
    ids = [call["id"] for call in join(chunks).tool_calls]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_content_is_one_text_block_beside_its_calls(make_chat, model, version):
    chat = make_chat(model=model, template=HERMES, max_tokens=90, output_version=version)
    bound = chat.bind_tools(TOOLS)
    text = f"Yes. The plan.\n{REPLIES['hermes']}"
    with replying(chat, text, model):
        message = bound.invoke(ASK)
    with replying(chat, text, model):
        streamed = join(bound.stream(ASK))
    for one in (message, streamed):
        assert [b["type"] for b in one.content_blocks] == ["text", "tool_call"]
        assert one.text == "Yes. The plan."
        assert one.content_blocks[1]["args"] == CALL["args"]


def test_a_call_cut_off_is_no_call(make_chat, model):
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2222222'
    tokens = byte_tokenizer().encode(text, add_special_tokens=False)
    for n in range(3, len(tokens), 8):
        chat = make_chat(model=model, template=HERMES, max_tokens=n)
        messages = []
        for way in ("invoke", "stream"):
            with replying(chat, text, model, ends=False):
                messages.append(WAYS[way](chat.bind_tools(TOOLS)))
        assert told(messages[0]) == told(messages[1])
        content, calls, invalid, _, reason, _ = told(messages[0])
        assert (calls, reason) == ([], "length")
        assert content == ""
        ours = messages[0].response_metadata["sidequest"].get("invalid_tool_calls", {})
        assert list(ours.values()) == ["it was cut off"] * len(invalid)
        assert len(invalid) == (byte_tokenizer().decode(tokens[:n]).strip() != "<tool_call>")
        chat.engine.close()


def test_a_call_without_a_tool_of_that_name_is_told_as_it_is(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=90)
    with replying(chat, '<tool_call>{"name": "no_such", "arguments": {}}</tool_call>', model):
        message = chat.bind_tools(TOOLS).invoke(ASK)
    assert [call["name"] for call in message.tool_calls] == ["no_such"]


def test_tags_that_are_special_tokens_are_read_too(make_chat, model):
    chat = make_chat(
        model=model, tokenizer=byte_tokenizer(HERMES, special_tags=True), max_tokens=90
    )
    bound = chat.bind_tools(TOOLS)
    text = f"Yes.\n{REPLIES['hermes']}"
    with replying(chat, text, model):
        message = bound.invoke(ASK)
    with replying(chat, text, model):
        streamed = join(bound.stream(ASK))
    assert told(message)[:2] == told(streamed)[:2] == ("Yes.", [(CALL["name"], CALL["args"])])
    forced = chat.bind_tools(TOOLS, tool_choice="look_up").invoke(ASK)
    assert [call["name"] for call in forced.tool_calls + forced.invalid_tool_calls] == ["look_up"]


# -- choosing ------------------------------------------------------------------------------


class Trip(pydantic.BaseModel):
    """Plan a trip."""

    city: str = pydantic.Field(max_length=6)
    days: int = pydantic.Field(ge=0, le=99)
    kind: str = pydantic.Field(pattern="^[ab]$")


class Choosing(pydantic.BaseModel):
    """Choose."""

    yes: bool


def schemas(tools):
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in described(tools)}


@pytest.mark.parametrize(
    ("family", "tool_choice"),
    [("hermes", "any"), ("mistral", "required"), ("llama", True), ("python", "any")]
    + [(family, "Trip") for family in FAMILIES],
)
def test_a_forced_call_is_sound_whatever_the_model_wants(make_chat, family, tool_choice):
    chat = make_chat(model=roomy(), template=FAMILIES[family], max_tokens=250)
    chat.temperature, chat.seed = 1.0, 1
    bound = chat.bind_tools([Trip, Choosing], tool_choice=tool_choice)
    for message in (bound.invoke(ASK), join(bound.stream(ASK))):
        assert message.response_metadata["finish_reason"] == "tool_calls"
        (call,) = message.tool_calls
        assert message.content == ""
        assert message.invalid_tool_calls == []
        assert tool_choice not in ("Trip",) or call["name"] == "Trip"
        jsonschema.validate(call["args"], schemas([Trip, Choosing])[call["name"]])


def test_several_calls_may_be_forced(make_chat):
    chat = make_chat(model=roomy(), template=HERMES, max_tokens=200, temperature=1.0, seed=3)
    bound = chat.bind_tools([Choosing], tool_choice="any", parallel_tool_calls=True)
    answers = [bound.invoke(ASK, seed=seed) for seed in range(4)]
    counts = {len(answer.tool_calls) for answer in answers}
    assert max(counts) > 1
    assert {a.content for a in answers} == {""}


@pytest.mark.parametrize(
    ("of_model", "of_call", "n_calls"),
    [(None, False, 1), (False, None, 1), (False, True, 2), (None, None, 2)],
)
def test_one_call_at_a_time_if_that_is_asked(make_chat, model, of_model, of_call, n_calls):
    chat = make_chat(model=model, template=HERMES, max_tokens=200, parallel_tool_calls=of_model)
    bound = chat.bind_tools(TOOLS, parallel_tool_calls=of_call)
    with replying(chat, f"{REPLIES['hermes']}\n{REPLIES['hermes']}", model):
        message = bound.invoke(ASK)
    assert len(message.tool_calls) == n_calls


def test_with_no_choice_there_are_no_tools(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=90)
    bound = chat.bind_tools(TOOLS, tool_choice="none")
    with replying(chat, REPLIES["hermes"], model):
        message = bound.invoke(ASK)
    assert (message.tool_calls, message.content) == ([], REPLIES["hermes"])
    assert message.usage_metadata["input_tokens"] == len(chat.prompt_ids(ASK))


def test_calls_and_a_form_are_both_open(make_chat):
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "found",
            "schema": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            },
        },
    }
    chat = make_chat(model=roomy(), template=HERMES, max_tokens=60, temperature=1.5)
    bound = chat.bind_tools([Choosing], response_format=form, parallel_tool_calls=False)
    seen = set()
    for seed in range(8):
        message = bound.invoke(ASK, seed=seed)
        if message.tool_calls:
            assert message.content == ""
            assert all(set(call["args"]) == {"yes"} for call in message.tool_calls)
        else:
            assert set(json.loads(message.content)) == {"ok"}
        seen.add(bool(message.tool_calls))
        assert message.invalid_tool_calls == []
    assert seen == {True, False}
    assert set(json.loads(chat.bind_tools([], response_format=form).invoke(ASK).content)) == {"ok"}


def test_answers_keep_to_a_form(make_chat):
    chat = make_chat(max_tokens=60)
    assert chat.invoke(ASK, choice=["Paris", "Rome"]).content in ("Paris", "Rome")
    assert chat.invoke(ASK, regex="[ab]{3}").content.strip("ab") == ""
    loose = chat.invoke(ASK, response_format={"type": "json_object"}, max_tokens=4).content
    assert loose.startswith("{")
    assert chat.invoke(ASK, response_format={"type": "text"}).content == chat.invoke(ASK).content
    results = chat.generate([ASK], choice=["Paris", "Rome"], n=3, temperature=2.0, seed=1)
    assert {g.text for g in results.generations[0]} <= {"Paris", "Rome"}


def test_tools_alone_change_nothing_but_the_prompt(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=20)
    bound = chat.bind_tools(TOOLS)
    ids = greedy(model, chat.prompt_ids(ASK, tools=TOOLS), 20)
    text = byte_tokenizer().decode(ids, skip_special_tokens=True)
    message = bound.invoke(ASK)
    assert message.content == join(bound.stream(ASK)).content == text
    assert message.tool_calls == message.invalid_tool_calls == []


WRONG = [
    ({"tool_choice": "no_such"}, r"'no_such'.*'add', 'look_up'"),
    ({"tool_choice": 5}, "tool_choice must be"),
    ({"tool_choice": {"type": "magic"}}, "tool_choice must be"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls must be True or False"),
    ({"no_such": 1}, "unknown argument 'no_such'"),
    ({"response_format": {"type": "xml"}}, "response_format must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format must be"),
    ({"regex": 5}, "regex must be"),
    ({"choice": "Paris"}, "choice must be a list"),
    ({"choice": []}, "choice must be a list"),
    ({"choice": ["a"], "regex": "a"}, "one form"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_wrong_settings_are_named_when_they_are_bound(make_chat, given, words):
    with pytest.raises(RequestError, match=words):
        make_chat(model=roomy(), template=HERMES).bind_tools(TOOLS, **given)


def test_wrong_tools_are_named(make_chat):
    chat = make_chat(model=roomy(), template=HERMES)
    for wrong in (5, {"type": "object", "properties": {}}, {"type": "web_search_preview"}):
        with pytest.raises(RequestError, match="tool"):
            chat.bind_tools([wrong])
    with pytest.raises(RequestError, match="list of tools"):
        chat.bind_tools("look_up")
    with pytest.raises(RequestError, match="no tools"):
        chat.bind_tools([], tool_choice="any")
    with pytest.raises(RequestError, match="constraint"):
        chat.bind_tools(TOOLS, tool_choice="any", constraint=lambda: None)


def test_a_schema_that_no_grammar_can_express_fails_its_own_call_only(make_chat):
    chat = make_chat(model=roomy(), template=HERMES, max_tokens=8)
    before = chat.invoke(ASK).content
    tool = {
        "name": "odd",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "(?=x)y"}},
        },
    }
    with pytest.raises(RequestError):
        chat.bind_tools([tool], tool_choice="any").invoke(ASK)
    with pytest.raises(RequestError):
        chat.invoke(ASK, regex="(")
    assert chat.invoke(ASK).content == before


def test_a_tool_loop_of_several_calls(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=200)
    bound = chat.bind_tools(TOOLS)
    two = f"{REPLIES['hermes']}\n" + REPLIES["hermes"].replace("城市 é", "Oslo")
    with replying(chat, two, model):
        asked = bound.invoke(ASK)
    results = [
        ToolMessage(look_up(**call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls
    ]
    with replying(chat, "It rains.", model):
        answer = bound.invoke([*ASK, asked, *results])
    assert answer.content == "It rains."
    text = chat.engine.tokenizer.decode(
        chat.prompt_ids([*ASK, asked, *results], tools=TOOLS), skip_special=False
    )
    assert f"assistant\n{two}{END}" in text
