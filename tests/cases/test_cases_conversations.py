"""Conversations that go on, shrink, end oddly or meet a stubborn template: ids, reuse, bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from sidequest_langchain.errors import ContextLengthError, TemplateError
from tests.cases.conftest import BYTES_PER_TOKEN
from tests.support import templates
from tests.support.force import force
from tests.support.tiny import tiny_model
from tests.support.tok import END, byte_tokenizer

MakeChat = Callable[..., Any]
H, S, A = HumanMessage, SystemMessage, AIMessage
CALL = {"name": "look_up", "args": {"city": "Oslo"}, "id": "c1", "type": "tool_call"}


def reused(message: Any) -> int:
    return message.usage_metadata["input_token_details"]["cache_read"]


def n_common(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def ask(one: Any, messages: list[Any], n: int = 8) -> Any:
    """The reply, which is the right one."""
    reply = one.chat.invoke(messages, max_tokens=n)
    assert one.answered(reply) == one.expected(messages, n)
    return reply


# -- ends of a conversation --------------------------------------------------------------


def test_a_tools_result_follows_on_the_call_it_answers(make_chat: MakeChat):
    one = make_chat(template=templates.TOOLS)
    asked = [H("Where?"), A("", tool_calls=[CALL], id="a1")]
    ask(one, [*asked, ToolMessage("41", tool_call_id="c1")])
    first = one.chat.prompt_ids([*asked, ToolMessage("41", tool_call_id="c1")])
    messages = [*asked, ToolMessage("42", tool_call_id="c1")]
    ids = one.chat.prompt_ids(messages)
    text = one.chat.engine.tokenizer.decode(ids, skip_special=False)
    assert text.count("<tool_response>\n42\n</tool_response>") == text.count("42") == 1
    reply = ask(one, messages)
    assert reused(reply) == n_common(first, ids)
    head = text[: text.index("42")]
    assert reused(reply) >= len(byte_tokenizer().encode(head, add_special_tokens=False)) - 1


def test_a_conversation_may_end_with_a_system_message(make_chat: MakeChat):
    for template in (templates.PLAIN, templates.NOSYS, templates.ALT):
        one = make_chat(template=template)
        messages = [H("Plan"), S("Be brief")]
        text = one.chat.engine.tokenizer.decode(one.chat.prompt_ids(messages))
        assert text.count("Be brief") == 1
        ask(one, messages)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("n_next", [1, 8])
def test_replies_of_any_length_are_gone_on_from(make_chat: MakeChat, n: int, n_next: int):
    one = make_chat()
    messages = [H("Plan")]
    for text in ("And then?", "More", "Now"):
        messages = [*messages, ask(one, messages, n), H(text)]
        n = n_next
    ask(one, messages)
    one.chat.kv.clear()
    assert one.n_bytes == 0


def test_an_answer_given_up_leaves_nothing_to_the_next_turn(make_chat: MakeChat):
    one = make_chat(max_tokens=200)
    messages = [H("Plan"), ask(one, [H("Plan")]), H("And then?")]
    before = one.resident()
    for chunk in one.chat.stream(messages):
        assert chunk.content
        break
    assert one.resident() == before
    ask(one, messages)


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        (["The plan", "xEND.", "no"], "END"),
        (["END"], "END"),
        (["The plan", "\n", "Obs", "ervation", ":", " no"], "\nObservation:"),
    ],
)
def test_text_behind_a_stop_string_is_no_part_of_the_next_turn(
    make_chat: MakeChat, pieces: list[str], stop: str
):
    one, tok = make_chat(max_tokens=32), byte_tokenizer()
    script = [i for p in [*pieces, END] for i in tok.encode(p, add_special_tokens=False)]
    messages = [H("Plan the day")]
    with force(one.weights, script):
        reply = one.chat.invoke(messages, stop=[stop])
    assert reply.content == "".join(pieces).split(stop)[0]
    (path,) = one.resident()
    prompt = one.chat.prompt_ids(messages)
    assert list(path[: len(prompt)]) == prompt
    assert reply.content.startswith(tok.decode(path[len(prompt) :]))
    ask(one, [*messages, reply, H("And?")])


def test_the_last_turn_is_taken_back_and_asked_again(make_chat: MakeChat):
    one = make_chat()
    start = [H("Plan the day")]
    first = ask(one, start)
    longer = [*start, first, H("And then?")]
    ask(one, longer)
    n_bytes = one.n_bytes
    for _ in range(2):
        again = ask(one, start)
        assert reused(again) >= len(one.chat.prompt_ids(start)) - 1
        assert again.content == first.content
    assert one.n_bytes == n_bytes
    other = [*start, first, H("Where to?")]
    reply = ask(one, other)
    both = (one.chat.prompt_ids(longer), one.chat.prompt_ids(other))
    assert reused(reply) == n_common(*both)


# -- system messages ---------------------------------------------------------------------


@pytest.mark.parametrize("head", [[S("The rule")], [S("The rule"), S("One more")]])
def test_a_system_message_without_a_place_is_stable_over_turns(make_chat: MakeChat, head: list):
    one = make_chat(template=templates.NOSYS)
    ask(one, head)
    messages = [*head, H("Plan the day")]
    reply = ask(one, messages)
    n_first = len(one.chat.prompt_ids(messages)) + len(one.answered(reply))
    longer = [*messages, reply, H("And then?")]
    text = one.chat.engine.tokenizer.decode(one.chat.prompt_ids(longer))
    for message in head:
        assert text.count(message.content) == 1
        assert text.index(message.content) < text.index("Plan the day")
    assert reused(ask(one, longer)) >= n_first - 1


def test_a_refused_conversation_is_no_bare_jinja_error_and_leaves_nothing(make_chat: MakeChat):
    refuse = "{{ raise_exception('System role not supported, nor any other') }}"
    one = make_chat(template=refuse)
    before = one.chat.kv.usage()
    with pytest.raises(TemplateError, match="System role not supported") as caught:
        one.chat.invoke([S("S"), H("H")])
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, jinja2.TemplateError)
    assert one.chat.kv.usage() == before


# -- odd contents ------------------------------------------------------------------------


def test_blocks_are_the_same_prompt_as_their_text_and_hit_the_same_rows(make_chat: MakeChat):
    one = make_chat(template=templates.TOOLS)
    block = {"type": "text", "text": "42"}
    plain = [S("ab"), H("Where?"), A("", tool_calls=[CALL]), ToolMessage("42", tool_call_id="c1")]
    rewritten = [
        S([{"type": "text", "text": "a"}, "b"]),
        H(["Where?"]),
        A([], tool_calls=[CALL]),
        ToolMessage([block], tool_call_id="c1", artifact={"any": object()}),
    ]
    ids = one.chat.prompt_ids(plain)
    assert one.chat.prompt_ids(rewritten) == ids
    ask(one, plain)
    n_bytes = one.n_bytes
    assert reused(ask(one, rewritten)) == len(ids)
    assert one.n_bytes == n_bytes


@pytest.mark.parametrize(
    "messages", [[S("")], [H("")], [H("   ")], [H([])], [S("The rule")], [H(""), A("", id="a")]]
)
def test_conversations_without_text_are_answered(make_chat: MakeChat, messages: list):
    one = make_chat()
    ask(one, messages)


# -- reasoning that a template strips ----------------------------------------------------


def test_every_turn_of_a_reasoning_template_reuses_the_common_prefix_and_no_more(
    make_chat: MakeChat,
):
    """Three turns, then a tool round, then a user again."""
    one, tok = make_chat(template=templates.THINK, max_tokens=32), byte_tokenizer()
    pieces = ("<think>", "\nhm\n", "</think>", "\n\n", "The plan", END)
    script = [i for p in pieces for i in tok.encode(p, add_special_tokens=False)]
    messages: list[Any] = []
    turns: list[Any] = [
        H("Plan the day"),
        H("And then?"),
        H("Where?"),
        A("", tool_calls=[CALL], id="call"),
        ToolMessage("42", tool_call_id="c1"),
        H("Now"),
    ]
    for n, turn in enumerate(turns):
        messages = [*messages, turn]
        if isinstance(turn, AIMessage):
            continue
        ids, before = one.chat.prompt_ids(messages), one.resident()
        best = max((n_common(path, ids) for path in before), default=0)
        if n % 2:
            reply = ask(one, messages, 6)
        else:
            with force(one.weights, {len(ids): script}):
                reply = one.chat.invoke(messages)
        assert reused(reply) == best
        # Exactly the ids of this render and of the answer are resident, nothing stripped.
        whole = [*ids, *one.answered(reply)]
        assert one.n_bytes in [BYTES_PER_TOKEN * m for m in (len(whole) - 1, len(whole))]
        assert max(one.resident(), key=len) == tuple(whole[: one.n_bytes // BYTES_PER_TOKEN])
        messages.append(reply)


# -- the end of the context --------------------------------------------------------------


def test_the_context_ends_a_conversation_before_anything_is_computed(make_chat: MakeChat):
    one = make_chat(model=tiny_model("llama", max_position_embeddings=64), max_tokens=16)
    messages: list[Any] = [H("Plan")]
    while (n := len(one.chat.prompt_ids(messages))) < 64:
        reply = one.chat.invoke(messages)
        assert one.answered(reply) == one.expected(messages, min(16, 64 - n))
        if n + 16 > 64 and reply.usage_metadata["total_tokens"] == 64:
            assert reply.response_metadata["finish_reason"] == "length"
        messages = [*messages, reply, H("more")]
    before = one.chat.kv.usage()
    with pytest.raises(ContextLengthError, match=rf"\b{n} tokens.* 64\b") as caught:
        one.chat.invoke(messages)
    assert isinstance(caught.value, ValueError)
    assert one.chat.kv.usage() == before
