"""Replies as they are read: calls in every syntax, sound and not, however the text arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk

from sidequest_langchain.chat.reasoning import Thinking
from sidequest_langchain.chat.tool_events import CallBegun, CallText, Said, Thought, spoiling
from sidequest_langchain.chat.tool_reading import Reading, ReplyReader
from sidequest_langchain.chat.tool_syntax import HERMES, PLAIN, Syntax

MISTRAL = Syntax(style="mistral", openings=("[TOOL_CALLS]",))
LLAMA = Syntax(style="json", openings=("<|python_tag|>",), between='", "parameters": ')
PYTHON = Syntax(style="python")
THINK = Thinking("<think>", "</think>")
TOOLS = frozenset({"add", "look_up"})
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
FIND = '{"name": "look_up", "arguments": {"city": "Oslo"}}'


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def fenced(call: str) -> str:
    return f"```json\n{call}\n```"


def read(parts, **reading):
    """What is said, thought and called: names with arguments, as LangChain takes them."""
    made = {"names": TOOLS} | reading
    reader = ReplyReader(Reading(**made))
    events = [event for part in parts for event in reader.feed(part)]
    events += reader.finish()
    said = "".join(event.text for event in events if isinstance(event, Said))
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    calls: list[list[str | None]] = []
    for event in events:
        if isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallText):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return said, thought, calls, dict(reader.calls.problems), reader.thoughts


def taken(calls):
    """The calls that LangChain makes of their chunks, and those it calls invalid."""
    chunks = [
        tool_call_chunk(name=name, args=args, id=str(i), index=i)
        for i, (name, args) in enumerate(calls)
    ]
    message = AIMessageChunk(content="", tool_call_chunks=chunks)
    sound = [(call["name"], call["args"]) for call in message.tool_calls]
    return sound, [(call["name"], call["args"]) for call in message.invalid_tool_calls]


ADDED, FOUND = ("add", {"a": 1, "b": 2}), ("look_up", {"city": "Oslo"})

SOUND = [
    # Hermes, Qwen
    (HERMES, tagged(ADD), "", [ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call>", "", [ADDED]),
    (HERMES, f"I look.\n{tagged(ADD)}", "I look.", [ADDED]),
    (HERMES, f"{tagged(ADD)}\n{tagged(FIND)}", "", [ADDED, FOUND]),
    (HERMES, f"One.\n\n{tagged(ADD)}\nTwo.{tagged(FIND)} ", "One.\nTwo.", [ADDED, FOUND]),
    (HERMES, f"One.\n{tagged(ADD)}Two.", "One.\nTwo.", [ADDED]),
    (HERMES, f"<tool_call>\n{ADD}\n{FIND}\n</tool_call>", "", [ADDED, FOUND]),
    (HERMES, f"<tool_call>\n{ADD}", "", [ADDED]),
    (HERMES, f"<tool_call>\n{ADD}\nThat is it.", "That is it.", [ADDED]),
    (HERMES, tagged('{"arguments": {"city": "Oslo"}, "name": "look_up"}'), "", [FOUND]),
    (HERMES, tagged('{"name": "add", "parameters": {"a": 1, "b": 2}}'), "", [ADDED]),
    (HERMES, tagged('{"type": "function", "function": ' + FIND + "}"), "", [FOUND]),
    (HERMES, tagged('{"function": "look_up", "args": {"city": "Oslo"}}'), "", [FOUND]),
    (HERMES, tagged('{"id": 7, "name": "add", "args": "{\\"a\\": 1}"}'), "", [("add", {"a": 1})]),
    (HERMES, tagged('{"name": "add"}'), "", [("add", {})]),
    (HERMES, tagged('{"name": "add", "arguments": null}'), "", [("add", {})]),
    (HERMES, tagged('{"name": "unknown", "arguments": {}}'), "", [("unknown", {})]),
    (HERMES, "It is 3.\n", "It is 3.\n", []),
    (HERMES, " \n", " \n", []),
    (HERMES, "a < b and <tool", "a < b and <tool", []),
    (HERMES, "<tool_call>", "", []),
    (HERMES, "<tool_call>\n</tool_call> So.", "So.", []),
    # Without tags: calls if they are the whole answer.
    (HERMES, ADD, "", [ADDED]),
    (HERMES, f"\n{ADD} \n", "", [ADDED]),
    (HERMES, fenced(ADD), "", [ADDED]),
    (HERMES, f"```\n{ADD}```", "", [ADDED]),
    (HERMES, f"```json\n{ADD}", "", [ADDED]),
    (HERMES, f"<tools>\n{FIND}\n</tools>", "", [FOUND]),
    (HERMES, f"{ADD}\nSo it is.", f"{ADD}\nSo it is.", []),
    (HERMES, f"{fenced(ADD)}\nSo.", f"{fenced(ADD)}\nSo.", []),
    (HERMES, f"So: {ADD}", f"So: {ADD}", []),
    (HERMES, f"{ADD}\n{FIND}", "", [ADDED, FOUND]),
    (HERMES, f"{ADD},\n{FIND};{ADD} ", "", [ADDED, FOUND, ADDED]),
    (HERMES, f"{ADD}{FIND}", "", [ADDED, FOUND]),
    (HERMES, fenced(f"{ADD}\n\n{FIND}"), "", [ADDED, FOUND]),
    (HERMES, f"{fenced(ADD)}\n{fenced(FIND)}", "", [ADDED, FOUND]),
    (HERMES, f"{ADD}\n{fenced(FIND)}", "", [ADDED, FOUND]),
    (HERMES, f"[{ADD}, {FIND}]", "", [ADDED, FOUND]),
    (HERMES, fenced(f"[\n  {ADD},\n  {FIND}\n]"), "", [ADDED, FOUND]),
    (HERMES, f"<tools>\n{ADD}\n</tools>\n<tools>\n{FIND}\n</tools>", "", [ADDED, FOUND]),
    *[
        (HERMES, text, text, [])
        for text in (
            f"{ADD}\n{FIND}\nSo.",
            f"{ADD} and {FIND}",
            f"{ADD}\n{FIND[:-1]}",
            f"{ADD},",
            f"{ADD},,{FIND}",
            f",{ADD}",
            f"[{ADD}",
            f"{ADD}]",
            f"[{fenced(ADD)}]",
            f"[{ADD},]",
            f"{ADD}\n```",
            f"{fenced(ADD)}\n```python\nadd()\n```",
            f'{ADD}\n{{"name": "Ann", "arguments": {{}}}}',
            f'{ADD}\n{{"name": "look_up"}}',
            "[]",
            "[1] A note.",
            "```\n```",
        )
    ],
    (HERMES, '{"name": "Ann", "arguments": {}}', '{"name": "Ann", "arguments": {}}', []),
    (HERMES, '{"name": "add"}', '{"name": "add"}', []),
    (HERMES, '{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    (HERMES, ADD[:-1], ADD[:-1], []),
    (HERMES, "```python\nadd(1)\n```", "```python\nadd(1)\n```", []),
    (HERMES, f"{fenced(ADD[:-3])}", f"{fenced(ADD[:-3])}", []),
    # Mistral
    (MISTRAL, f"[TOOL_CALLS] [{ADD}, {FIND}]", "", [ADDED, FOUND]),
    (MISTRAL, f"[TOOL_CALLS]{ADD}", "", [ADDED]),
    (MISTRAL, 'Yes.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', "Yes.", [ADDED]),
    (MISTRAL, 'A[TOOL_CALLS]look_up{"city": "Oslo"}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}',
     "A", [FOUND, ("add", {"a": 1})]),
    (MISTRAL, "[TOOL_CALLS] [" + ADD[:-1] + ', "id": "123456789"}] ', "", [ADDED]),
    # Llama 3
    (LLAMA, ADD, "", [ADDED]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADDED]),
    (LLAMA, f"<|python_tag|>{ADD}; {FIND}", "", [ADDED, FOUND]),
    (LLAMA, f"{ADD}\n{FIND}", "", [ADDED, FOUND]),
    (LLAMA, f"[{ADD}, {FIND}]", "", [ADDED, FOUND]),
    (LLAMA, f"{ADD} So.", "So.", [ADDED]),
    (LLAMA, '{"name": "Ann"}', '{"name": "Ann"}', []),
    (LLAMA, '{"city": "Oslo"}', '{"city": "Oslo"}', []),
    # plain JSON
    (PLAIN, ADD, "", [ADDED]),
    (PLAIN, fenced(ADD), "", [ADDED]),
    # Python
    (PYTHON, '[add(a=1, b=2), look_up(city="Oslo")]', "", [ADDED, FOUND]),
    (PYTHON, "[add()]\n", "", [("add", {})]),
    (PYTHON, "[add(a=[1, -2.5], b={'k': (True, None)}, c='](')]", "",
     [("add", {"a": [1, -2.5], "b": {"k": [True, None]}, "c": "]("})]),
    (PYTHON, "[add(a=true, b=null)]", "", [("add", {"a": True, "b": None})]),
    (PYTHON, "[1, 2]", "[1, 2]", []),
    (PYTHON, "[print(1)]", "[print(1)]", []),
    (PYTHON, "[see the notes]", "[see the notes]", []),
    (PYTHON, ADD, "", [ADDED]),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text", "said", "calls"), SOUND)
def test_sound_calls_are_read(syntax, text, said, calls):
    found_said, thought, found, problems, _ = read([text], syntax=syntax)
    assert (found_said, thought, problems) == (said, "", {})
    assert taken(found) == (calls, [])


UNSOUND = [
    (HERMES, "<tool_call>{bad}</tool_call> So.", "So.", [(None, "{bad}")]),
    (HERMES, "<tool_call>add(1)</tool_call>", "", [(None, "add(1)")]),
    (HERMES, tagged("{'name': 'add'}"), "", [(None, "{'name': 'add'}\n")]),
    (HERMES, tagged('{"a": 1}'), "", [(None, '{"a": 1}')]),
    (HERMES, tagged('{"name": 5}'), "", [(None, '{"name": 5}')]),
    (HERMES, tagged('{"name": "add", "arguments": [1]}'), "", [("add", "[1]")]),
    (HERMES, tagged('{"name": "add", "arguments": 7}'), "", [("add", "7")]),
    (HERMES, tagged('{"name": "add", "arguments": "x"}'), "", [("add", "x")]),
    (HERMES, tagged('{"name": "add", "arguments": {"a": 1,}}'), "", [("add", '{"a": 1,}')]),
    (HERMES, tagged('{"name": "add", "arguments": {"a": NaN}}'), "", [("add", '{"a": NaN}')]),
    (HERMES, tagged('{"name": "add", "arguments": {\'a\': 1}}'), "", [("add", "{'a': 1}")]),
    (HERMES, tagged(ADD[:-1]), "", [("add", '{"a": 1, "b": 2}')]),
    (HERMES, tagged(ADD + "}"), "", [("add", '{"a": 1, "b": 2}')]),
    (HERMES, tagged(ADD + " and more"), "", [("add", '{"a": 1, "b": 2}')]),
    (HERMES, f"<tool_call>\n{ADD[:-4]}", "", [("add", '{"a": 1, "b":')]),
    (HERMES, f"<tool_call>\n{FIND[:-4]}", "", [("look_up", '{"city": "Osl')]),
    (HERMES, '<tool_call>\n{"name": "add", "argu', "", [("add", "")]),
    (HERMES, '<tool_call>\n{"na', "", [(None, '{"na')]),
    (HERMES, "<tool_call>\n" + FIND[:-4] + "\\", "", [("look_up", '{"city": "Osl\\')]),
    (MISTRAL, "[TOOL_CALLS]add", "", [(None, "add")]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a"', "", [("add", '{"a"')]),
    (MISTRAL, 'So.[TOOL_CALLS]add[ARGS]{"a": 1', "So.", [("add", '{"a": 1')]),
    (LLAMA, ADD[:-4], "", [("add", '{"a": 1, "b":')]),
    (LLAMA, "<|python_tag|>print(1)", "", [(None, "print(1)")]),
    (PYTHON, "[add(a=1", "", [("add", "[add(a=1")]),
    (PYTHON, "[add(a=f(1))] So.", "", [("add", "[add(a=f(1))] So.")]),
    (PYTHON, "[add(1)]", "", [("add", "[add(1)]")]),
    (PYTHON, "[add(**x)]", "", [("add", "[add(**x)]")]),
    (PYTHON, "[add(a=1, a=2)]", "", [("add", "[add(a=1, a=2)]")]),
]


@pytest.mark.parametrize(("syntax", "text", "said", "calls"), UNSOUND)
def test_what_is_no_sound_call_is_an_invalid_one_with_its_text(syntax, text, said, calls):
    found_said, _, found, problems, _ = read([text], syntax=syntax)
    assert found_said == said
    sound, invalid = taken(found)
    assert sound == []
    assert [name for name, _ in invalid] == [name for name, _ in calls]
    for (_, args), (_, raw) in zip(invalid, calls, strict=True):
        assert args.startswith(raw)
    assert set(problems) == set(range(len(calls)))
    assert all(problems.values())


TRICKY = ["</tool_call>", "<tool_call>", "{", "}", "[", "]", '"', "\\", "\n", "é", "😀", "城市"]


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.lists(st.sampled_from(TRICKY) | st.text(max_size=3), max_size=4).map("".join),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.text(max_size=3), inner, max_size=2)
            ),
            max_leaves=5,
        ),
        max_size=3,
    ),
    st.booleans(),
    st.sampled_from([HERMES, MISTRAL, LLAMA, PYTHON]),
)
@settings(max_examples=150)
def test_arguments_of_any_kind_come_out_as_they_are(arguments, is_ascii, syntax):
    text = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=is_ascii)
    if syntax is PYTHON:
        text = f"[add(value={arguments!r})]"
        arguments = {"value": arguments}
    elif syntax is not LLAMA:
        text = {HERMES: tagged(text), MISTRAL: f"[TOOL_CALLS] [{text}]"}[syntax]
    said, _, calls, problems, _ = read([text], syntax=syntax)
    assert (said, problems) == ("", {})
    assert taken(calls) == ([("add", arguments)], [])


def test_a_very_long_argument_is_read_whole():
    arguments = {"text": '{"</tool_call>' * 2_000}
    call = json.dumps({"name": "add", "arguments": arguments})
    assert taken(read([tagged(call)], syntax=HERMES)[2]) == ([("add", arguments)], [])


THOUGHTS = [
    ("<think>\nIt is 3.\n</think>\n\nThree.", "It is 3.", "Three.", []),
    ("It is 3.\n</think>\n\nThree.", "It is 3.", "Three.", []),
    ("<think></think>Three.", "", "Three.", []),
    ("<think>\nfor ever\n", "for ever", "", []),
    (f"<think>\nOr {tagged(FIND)}\n</think>\n\n{tagged(ADD)}", f"Or {tagged(FIND)}", "", [ADDED]),
    (f"<think>\n{tagged(FIND)}", tagged(FIND), "", []),
    (f"<think>a</think>\n\n{ADD}", "a", "", [ADDED]),
    (f"<think>a</think>I look.{tagged(ADD)}<think>b</think>\nSo.", "ab", "I look.So.", [ADDED]),
    ("Three. <think>Or 4?</think> Yes.", "Or 4?", "Three. Yes.", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "thought", "said", "calls"), THOUGHTS)
def test_thoughts_are_apart_and_call_nothing(text, thought, said, calls):
    is_open = not text.startswith("<think>") and "<think>" not in text
    found = read([text], syntax=HERMES, thinking=THINK, is_thinking=is_open)
    assert found[:2] == (said, thought)
    assert taken(found[2]) == (calls, [])
    for start, end in found[4]:
        assert is_open or text[start:].startswith("<think>")
        assert end == len(text) or text[:end].endswith("</think>")


def test_without_tools_nothing_is_a_call():
    text = f"So: {tagged(ADD)}"
    assert read([text], syntax=None)[0] == text
    assert read([ADD], syntax=None, thinking=THINK)[0] == ADD


def test_calls_beyond_the_most_are_dropped():
    text = f"{tagged(ADD)}\n{tagged(FIND)}"
    assert taken(read([text], syntax=HERMES, n_most_calls=1)[2]) == ([ADDED], [])


@pytest.mark.parametrize("text", [f"{ADD}\n{FIND}", f"{ADD}\n{FIND[:-5]}", f"[{ADD},", f"{ADD},"])
def test_what_is_dropped_of_a_row_may_be_cut_off(text):
    assert taken(read([text], syntax=HERMES, n_most_calls=1)[2]) == ([ADDED], [])


PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "[TOOL_CALLS]", "[ARGS]", "```",
    "json", "<tools>", ",", "</tools>", ADD, FIND, ADD[:30], FIND[-9:], '{"name": "add"', ", ", "}",
    "{", "[", "]", "\n", " ", "\n\n", "add", "[add(", "a=1", ")]", '"', "'", "\\", "So.", "城", ";",
]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
    st.sampled_from([HERMES, MISTRAL, LLAMA, PYTHON, PLAIN]),
    st.sampled_from([None, THINK]),
    st.booleans(),
)
@example(f"a\n{tagged(ADD)}\n", [1, 3, 9, 14, 15, 40], HERMES, None, False)
@example(f"<think>{tagged(ADD)}</think>{ADD}", [*range(90)], HERMES, THINK, False)
@settings(max_examples=400)
def test_how_a_reply_is_split_does_not_matter(text, cuts, syntax, thinking, is_thinking):
    cuts = sorted({min(cut, len(text)) for cut in cuts})
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reading = {"syntax": syntax, "thinking": thinking}
    reading["is_thinking"] = is_thinking and thinking is not None
    whole = read([text], **reading)
    assert read(parts, **reading) == whole
    assert read(list(text), **reading) == whole
    said, _, calls, problems, _ = whole
    if not calls and thinking is None and not any(o in text for o in syntax.openings):
        assert said == text
    sound, invalid = taken(calls)
    assert len(invalid) == len(problems)
    assert len(sound) == len(calls) - len(problems)


@given(st.text(alphabet='{}[]",:\\a1 \n', max_size=20))
def test_what_is_spoiled_is_taken_by_nobody(arguments):
    spoiled = arguments + spoiling(arguments)
    assert taken([["add", spoiled]])[0] == []


def test_text_is_held_back_no_longer_than_it_may_be_a_call():
    reader = ReplyReader(Reading(syntax=HERMES, names=TOOLS))
    seen = [reader.feed(part) for part in ("So", " it", " <", "b> ", "<tool_", "box>", "\n", "x")]
    texts = ["".join(event.text for event in events) for events in seen]
    assert texts == ["So", " it", "", " <b>", "", " <tool_box>", "", "\nx"]


def test_arguments_arrive_as_they_are_written():
    reader = ReplyReader(Reading(syntax=HERMES, names=TOOLS))
    assert reader.feed('<tool_call>{"name": "add", "arg') == [CallBegun(0, "add")]
    assert reader.feed('uments": {"a"') == [CallText(0, '{"a"')]
    assert reader.feed(": 1}") == [CallText(0, ": 1}")]
    assert reader.feed("}</tool_call>") == []
