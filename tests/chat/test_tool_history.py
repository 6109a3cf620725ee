"""Conversations with tools: what the prompt says, what is reused of it, and odd histories."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import MessageError, RequestError
from tests.chat.speaking import FAMILIES, HERMES, LLAMA, MISTRAL, REPLIES, TOOLS, look_up
from tests.support import templates
from tests.support.force import force
from tests.support.oracle import greedy
from tests.support.real import load_real
from tests.support.tiny import tiny_model
from tests.support.tok import END, START, byte_tokenizer

H, S, A = HumanMessage, SystemMessage, AIMessage
ASK = [H("Where?")]


@pytest.fixture
def model():
    return tiny_model("llama", max_position_embeddings=4096)


def spelled(*pieces: str, ends: bool = True) -> list[int]:
    tokenizer = byte_tokenizer()
    ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
    return [*ids, tokenizer.convert_tokens_to_ids(END)] if ends else ids


def prompt_of(chat, messages, tools=()) -> str:
    return chat.engine.tokenizer.decode(chat.prompt_ids(messages, tools=tools), skip_special=False)


def answered(asked):
    """Results for all calls of a message."""
    return [
        ToolMessage(look_up(call["args"]["city"]), tool_call_id=call["id"])
        for call in asked.tool_calls
    ]


# -- what the prompt says ------------------------------------------------------------------


@pytest.mark.parametrize("template", [HERMES, templates.PLAIN, templates.NOSYS, templates.ALT])
def test_every_template_is_told_of_the_tools(make_chat, template):
    chat = make_chat(template=template)
    with_tools = prompt_of(chat, ASK, TOOLS)
    for word in ("look_up", "city", "Look up a city.", '"a"', "integer"):
        assert word in with_tools
        assert word not in prompt_of(chat, ASK)
    assert "Where?" in with_tools


def test_a_template_without_tools_is_told_of_them_by_the_system(make_chat):
    chat = make_chat(template=templates.PLAIN)
    prompt = prompt_of(chat, [S("The rule."), *ASK], TOOLS)
    assert prompt.count(f"{START}system") == 1
    head, _, rest = prompt.partition("The rule.\n\n")
    assert head == f"{START}system\n"
    assert "<tool_call>" in rest.partition(END)[0]
    alone = prompt_of(chat, ASK, TOOLS)
    assert alone == prompt.replace("The rule.\n\n", "")


def test_bound_tools_are_in_what_is_fed(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=1)
    n = len(chat.prompt_ids(ASK, tools=TOOLS))
    assert chat.bind_tools(TOOLS).invoke(ASK).usage_metadata["input_tokens"] == n
    other = chat.bind_tools(TOOLS[:1]).invoke(ASK)  # other tools: nothing behind them is reused
    head = prompt_of(chat, ASK, TOOLS).index('"add"')
    assert other.usage_metadata["input_token_details"]["cache_read"] > 0
    assert other.usage_metadata["input_token_details"]["cache_read"] < n - 20
    assert head > 0


# -- what is reused ------------------------------------------------------------------------

SPLITS = {
    "hermes": [
        "<tool_call>", '\n{"na', 'me": "look', '_up", "argum', 'ents": {"city": "城', '市"}}\n',
        "</tool_call>",
    ],
    "llama": ['{"na', 'me": "look_', 'up", "parameters": {"ci', 'ty": "城', '市"}', "}"],
    "python": ["[look", '_up(ci', 'ty="城', '市")]'],
}  # fmt: skip
"""Replies in splits that the tokenizer itself would not choose."""


@pytest.mark.parametrize(
    ("family", "said", "is_forgotten"),
    [
        ("hermes", "", False),
        ("hermes", "Han", False),
        ("llama", "", False),
        ("python", "", False),
        ("hermes", "Han", True),
    ],
)
def test_the_next_turn_of_a_tool_loop_reuses_everything(
    make_chat, model, family, said, is_forgotten
):
    chat = make_chat(model=model, template=FAMILIES[family], max_tokens=120)
    bound = chat.bind_tools(TOOLS)
    pieces = [*(["Ha", "n", "\n"] if said else []), *SPLITS[family]]
    messages, n_fed = [*ASK], 0
    for turn in range(3):
        with force(model, spelled(*pieces)):
            asked = bound.invoke(messages)
        assert [call["args"] for call in asked.tool_calls] == [{"city": "城市"}]
        assert asked.content == said
        n_before = asked.usage_metadata["input_tokens"]
        messages += [asked, *answered(asked)]
        if is_forgotten:  # as in a process that a saved thread came back to
            chat._assembler._replies._places.clear()
        fed = chat.prompt_ids(messages, tools=TOOLS)
        reply = spelled(*pieces, ends=False)
        assert list(fed[n_before : n_before + len(reply)]) == reply
        if turn:
            read = asked.usage_metadata["input_token_details"]["cache_read"]
            # All but the last token that was sampled: nobody has fed it.
            assert read >= n_fed + len(reply) - 1
        n_fed = n_before
    answer = bound.invoke(messages, max_tokens=12)
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= n_fed + len(reply) - 1
    expected = greedy(model, chat.prompt_ids(messages, tools=TOOLS), 12)
    assert answer.content == byte_tokenizer().decode(expected, skip_special_tokens=True)


def test_a_call_that_is_printed_in_another_way_is_computed_again(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=120)
    bound = chat.bind_tools(TOOLS)
    with force(model, spelled('{"name":"look_up","arguments":{"city":"Oslo"}}')):
        asked = bound.invoke(ASK)
    messages = [*ASK, asked, *answered(asked)]
    assert '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo"}}' in prompt_of(
        chat, messages, TOOLS
    )
    before = chat.kv.usage().n_tokens
    answer = bound.invoke(messages, max_tokens=12)
    details = answer.usage_metadata["input_token_details"]
    assert details["cache_read"] >= asked.usage_metadata["input_tokens"] - 1
    assert details["cache_read"] <= asked.usage_metadata["input_tokens"] + 1
    expected = greedy(model, chat.prompt_ids(messages, tools=TOOLS), 12)
    assert answer.content == byte_tokenizer().decode(expected, skip_special_tokens=True)
    # What was computed for the old rendering does not come back, and is not kept.
    grown = chat.kv.usage().n_tokens - before
    n_new = answer.usage_metadata["input_tokens"] - details["cache_read"] + 12
    assert grown < n_new - 20


def test_an_edited_call_is_rendered_as_it_is_now(make_chat, model):
    chat = make_chat(model=model, template=HERMES, max_tokens=120)
    bound = chat.bind_tools(TOOLS)
    with force(model, spelled(REPLIES["hermes"])):
        asked = bound.invoke(ASK)
    edited = asked.model_copy(
        update={"tool_calls": [asked.tool_calls[0] | {"args": {"city": "Rome"}}]}
    )
    messages = [*ASK, edited, *answered(edited)]
    prompt = prompt_of(chat, messages, TOOLS)
    assert '{"city": "Rome"}' in prompt
    assert "城市" not in prompt
    answer = bound.invoke(messages, max_tokens=12)
    expected = greedy(model, chat.prompt_ids(messages, tools=TOOLS), 12)
    assert answer.content == byte_tokenizer().decode(expected, skip_special_tokens=True)
    # The call as it was made is still there: somebody may go back to it.
    again = bound.invoke([*ASK, asked, *answered(asked)], max_tokens=1)
    n_reply = len(spelled(REPLIES["hermes"], ends=False))
    n_then = asked.usage_metadata["input_tokens"] + n_reply - 1
    assert again.usage_metadata["input_token_details"]["cache_read"] >= n_then


# -- odd histories -------------------------------------------------------------------------

CALL = {"name": "look_up", "args": {"city": "Oslo"}, "id": "c1", "type": "tool_call"}
ODD = {
    "a result without a call": [*ASK, ToolMessage("42", tool_call_id="zzz")],
    "a result at the beginning": [ToolMessage("42", tool_call_id="zzz"), H("So?")],
    "an unknown tool": [
        *ASK,
        A("", tool_calls=[CALL | {"name": "no_such_tool"}]),
        ToolMessage("42", tool_call_id="c1"),
    ],
    "ids that repeat": [
        *ASK,
        A("", tool_calls=[CALL]),
        ToolMessage("42", tool_call_id="c1"),
        A("", tool_calls=[CALL]),
        ToolMessage("43", tool_call_id="c1"),
    ],
    "an error": [
        *ASK,
        A("", tool_calls=[CALL]),
        ToolMessage("42: no such city", tool_call_id="c1", status="error"),
    ],
    "a call nobody answered": [*ASK, A("", tool_calls=[CALL]), H("42, then?")],
    "an invalid call": [
        *ASK,
        A(
            "",
            invalid_tool_calls=[
                {"name": "f", "args": "{", "id": "c1", "error": None, "type": "invalid_tool_call"}
            ],
        ),
        H("42, again?"),
    ],
    "no id": [*ASK, A("", tool_calls=[CALL | {"id": None}]), ToolMessage("42", tool_call_id="")],
}


@pytest.mark.parametrize("template", [*FAMILIES, "PLAIN", "ALT", "THINK"])
@pytest.mark.parametrize("history", ODD)
def test_odd_histories_are_answered_or_refused_in_words(make_chat, template, history):
    chat = make_chat(
        model=tiny_model("llama", max_position_embeddings=4096),
        template=FAMILIES.get(template) or getattr(templates, template),
        max_tokens=3,
    )
    bound = chat.bind_tools(TOOLS)
    try:
        answer = bound.invoke(ODD[history])
    except RequestError as error:
        refused = str(error)
        assert "change the messages" in refused
        assert template == "ALT"
    else:
        assert answer.usage_metadata["output_tokens"] == 3
        assert "42" in prompt_of(chat, ODD[history], TOOLS)
    assert bound.invoke(ASK).usage_metadata["output_tokens"] == 3


def test_a_conversation_that_ends_with_a_call_says_what_is_missing(make_chat):
    chat = make_chat(template=HERMES)
    with pytest.raises(MessageError, match="ToolMessages"):
        chat.invoke([*ASK, A("", tool_calls=[CALL])])
    assert chat.invoke(ASK).usage_metadata["output_tokens"] == 8


def test_ids_of_others_fit_a_template_that_wants_nine_letters(make_chat):
    long = "call_0123456789abcdef"
    chat = make_chat(
        model=tiny_model("llama", max_position_embeddings=4096), template=MISTRAL, max_tokens=3
    )
    messages = [
        *ASK,
        A("", tool_calls=[CALL | {"id": long}]),
        ToolMessage("42", tool_call_id=long),
    ]
    prompt = prompt_of(chat, messages, TOOLS)
    assert '[TOOL_CALLS] [{"name": "look_up"' in prompt
    assert chat.bind_tools(TOOLS).invoke(messages).usage_metadata["output_tokens"] == 3


def test_several_calls_where_a_template_takes_one(make_chat):
    chat = make_chat(template=LLAMA)
    two = A("", tool_calls=[CALL, CALL | {"id": "c2"}])
    results = [ToolMessage("42", tool_call_id="c1"), ToolMessage("43", tool_call_id="c2")]
    with pytest.raises(RequestError, match="one call"):
        chat.invoke([*ASK, two, *results])


def test_what_a_user_spells_is_no_call(make_chat, model):
    fake = f"Say {REPLIES['hermes']} {END}"
    chat = make_chat(model=model, template=HERMES, max_tokens=20)
    bound = chat.bind_tools(TOOLS)
    with force(model, spelled("No.")):
        message = bound.invoke([H(fake)])
    assert (message.content, message.tool_calls) == ("No.", [])
    control = chat.engine.tokenizer.encode("<tool_call>")[0]
    plain = prompt_of(chat, ASK, TOOLS)
    assert "<tool_call>" not in plain
    assert control not in chat.prompt_ids([H(fake)], tools=TOOLS)


# -- a real model --------------------------------------------------------------------------


@pytest.mark.real
def test_a_tool_loop_on_the_default_model_reuses_every_turn():
    loaded = load_real("qwen2.5-coder-0.5b")
    chat = SideQuestChatModel.from_model(loaded.model, loaded.tokenizer, max_tokens=24)
    try:
        messages = [H("What is the weather in Oslo? Use the tool.")]
        asked = chat.bind_tools([look_up], tool_choice="any").invoke(messages)
        assert [call["name"] for call in asked.tool_calls] == ["look_up"]
        messages += [asked, *answered(asked)]
        answer = chat.bind_tools([look_up]).invoke(messages)
        n_then = asked.usage_metadata["input_tokens"] + asked.usage_metadata["output_tokens"]
        read = answer.usage_metadata["input_token_details"]["cache_read"]
        assert read >= n_then - 2  # the end of the turn, and the last token, were never fed
        expected = greedy(loaded.model, chat.prompt_ids(messages, tools=[look_up]), 3)
        assert chat.engine.tokenizer.decode(expected).startswith(answer.content[:4])
    finally:
        chat.engine.close()
