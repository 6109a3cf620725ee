"""What a template cannot take is found by trying it, and given to it in another form."""

from __future__ import annotations

import itertools

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from sidequest_langchain.chat.prompt import PromptAssembler
from sidequest_langchain.chat.template import probe
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import MessageError, TemplateError
from tests.support import templates
from tests.support.tok import byte_tokenizer

H, S, A = HumanMessage, SystemMessage, AIMessage
CALL = {"name": "look_up", "args": {"city": "Oslo"}, "id": "sq000call", "type": "tool_call"}
TOOL_ROUND = [H("Where?"), A("", tool_calls=[CALL]), ToolMessage("42", tool_call_id="sq000call")]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
MAPPING_ONLY = templates.TOOLS_MAP
STRICT = (  # as Gemma has it: no system role, and user and model take turns
    "{% for m in messages %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
) + templates.TRIM
LEADING_SYSTEM_ONLY = (  # as Llama 2 has it: a later system message is not looked at
    r"{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    r"{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def text_of(template: str, messages, tools=None) -> str:
    """What is fed, as text."""
    tokenizer = ChatTokenizer(byte_tokenizer(template))
    assembler = PromptAssembler(tokenizer, find_reply=lambda _: None, name="tiny")
    return tokenizer.decode(assembler.assemble(messages, tools).ids, skip_special=False)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASK = "<|im_start|>assistant\n"


def test_a_template_that_takes_everything_gets_everything_as_it_is():
    messages = [S("S"), H("H"), H("I"), A("A"), A("B"), S("T"), H("J")]
    expected = [("system", "S"), ("user", "H"), ("user", "I"), ("assistant", "A")]
    expected += [("assistant", "B"), ("system", "T"), ("user", "J")]
    assert text_of(templates.PLAIN, messages) == "".join(turn(*t) for t in expected) + ASK


@pytest.mark.parametrize("template", [templates.PLAIN, templates.NOSYS, templates.ALT, STRICT])
@pytest.mark.parametrize(
    "messages",
    [
        [S("rule"), H("one")],
        [S("rule")],
        [S("rule"), S("law"), H("one")],
        [H("one"), S("rule")],
        [H("one"), A("two"), S("rule"), H("three")],
        [H("one"), H("also")],
        [S("rule"), H("one"), A("two"), A("more"), H("three")],
    ],
)
def test_every_text_is_in_the_prompt_once_and_in_order(template, messages):
    prompt = text_of(template, messages)
    texts = [m.content for m in messages]
    assert [prompt.count(text) for text in texts] == [1] * len(texts)
    if template in (templates.PLAIN, templates.ALT):
        assert sorted(texts, key=prompt.index) == texts
    assert prompt.endswith(ASK)


def test_a_system_message_becomes_part_of_the_first_user_turn_where_there_is_no_such_role():
    assert text_of(templates.NOSYS, [S("S"), H("H")]) == turn("user", "S\n\nH") + ASK
    assert text_of(templates.NOSYS, [S("S"), S("T"), H("H")]) == turn("user", "S\n\nT\n\nH") + ASK
    assert text_of(templates.NOSYS, [S("")]) == turn("user", "") + ASK
    assert text_of(templates.NOSYS, [S(""), H("H")]) == turn("user", "H") + ASK


@pytest.mark.parametrize("template", [templates.NOSYS, templates.ALT, STRICT, LEADING_SYSTEM_ONLY])
def test_a_longer_conversation_begins_as_the_shorter_one(template):
    whole = [S("S"), H("H"), A("A"), S("T"), H("I"), A("B"), H("J")]
    rendered = [text_of(template, whole[:n]) for n in (2, 5, 7)]
    for shorter, longer in itertools.pairwise(rendered):
        assert longer.startswith(shorter)


def test_runs_of_one_role_are_joined_where_roles_must_alternate():
    messages = [H("H"), H("I"), A("A"), A("B"), H("J")]
    expected = turn("user", "H\n\nI") + turn("assistant", "A\n\nB") + turn("user", "J")
    assert text_of(templates.ALT, messages) == expected + ASK


def test_a_system_message_that_the_template_would_drop_moves_to_the_next_user_turn():
    prompt = text_of(LEADING_SYSTEM_ONLY, [S("S"), H("H"), A("A"), S("T"), H("I")])
    assert prompt == "S\nuser: H\nassistant: A\nuser: T\n\nI\nassistant: "


def test_a_conversation_no_template_form_fits_is_a_typed_error():
    with pytest.raises(TemplateError, match="alternate"):
        text_of(templates.ALT, [A("A"), H("H")])


@pytest.mark.parametrize("name", ["TOOLS_JSON", "TOOLS_MAP", "TOOLS_STR"])
def test_a_tool_round_renders_in_the_templates_own_format(name):
    prompt = text_of(getattr(templates, name), TOOL_ROUND)
    call = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert prompt.count(call) == 1
    assert prompt.count("<tool_response>\n42\n</tool_response>") == 1
    assert prompt.endswith(ASK)


@pytest.mark.parametrize("name", ["TOOLS_JSON", "TOOLS_MAP", "TOOLS_STR"])
def test_a_call_goes_to_the_template_wherever_that_has_a_place_for_it(name):
    own_words = getattr(templates, name).replace("<tool_call>", "[CALL]")
    prompt = text_of(own_words, TOOL_ROUND)
    assert "[CALL]" in prompt
    assert "<tool_call>" not in prompt


def test_letters_of_any_script_stay_letters_in_arguments():
    call = CALL | {"args": {"city": "城市"}}
    messages = [TOOL_ROUND[0], A("", tool_calls=[call]), TOOL_ROUND[2]]
    for name in ("TOOLS_JSON", "TOOLS_MAP", "TOOLS_STR"):
        assert '"城市"' in text_of(getattr(templates, name), messages)


@pytest.mark.parametrize("template", [templates.PLAIN, templates.NOSYS, templates.ALT, STRICT])
def test_a_tool_round_is_shown_even_to_a_template_without_tools(template):
    prompt = text_of(template, [*TOOL_ROUND, A("It is 42."), H("Thanks")])
    assert prompt.count("look_up") == prompt.count("Oslo") == 1
    assert prompt.count("42") == 2
    assert prompt.index("Oslo") < prompt.index("42")


def test_tools_reach_the_template():
    assert "look_up" in text_of(templates.TOOLS, [H("Where?")], [TOOL])
    assert "look_up" not in text_of(templates.TOOLS, [H("Where?")])


def test_a_trailing_ai_message_is_continued():
    assert text_of(templates.PLAIN, [H("H"), A("The plan")]) == turn("user", "H") + ASK + "The plan"
    assert text_of(templates.PLAIN, [H("H"), A("")]) == turn("user", "H") + ASK
    assert text_of(templates.ALT, [H("H"), A("A"), A("B")]).endswith(ASK + "A\n\nB")


def test_a_call_without_an_answer_cannot_be_continued():
    with pytest.raises(MessageError, match="ToolMessages"):
        text_of(templates.TOOLS, TOOL_ROUND[:2])


def test_a_prompt_without_a_token_is_refused():
    silent = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(MessageError, match="no token"):
        text_of(silent, [H("")])
    assert text_of(silent, [H(" ")]) == " "


def test_blank_messages_render():
    for messages in ([S("")], [H("")], [H("   ")], [H(""), A(""), H("")]):
        assert text_of(templates.PLAIN, messages).endswith(ASK)


def test_what_a_template_can_take_is_tried_once():
    tokenizer = ChatTokenizer(byte_tokenizer(templates.ALT))
    n_renders = 0
    render = tokenizer.render

    def counted(*args, **given):
        nonlocal n_renders
        n_renders += 1
        return render(*args, **given)

    tokenizer.render = counted
    assembler = PromptAssembler(tokenizer, find_reply=lambda _: None)
    assembler.assemble([H("H")])
    n_first, n_renders = n_renders, 0
    assembler.assemble([H("H")])
    assert (n_renders, n_first > 5) == (1, True)


def test_the_opening_of_the_assistants_turn():
    assert probe(ChatTokenizer(byte_tokenizer(templates.PLAIN))).opening == ASK
    think = probe(ChatTokenizer(byte_tokenizer(templates.THINK)))
    assert think.opening == ASK + "<think>\n\n</think>\n\n"
