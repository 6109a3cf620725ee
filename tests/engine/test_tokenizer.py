"""One tokenizer for many threads: as the user's, which stays as it is; templates; control text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizer

from sidequest_langchain.engine.detokenizer import Detokenizer
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import TemplateError
from tests.support import templates
from tests.support.tok import END, START, VOCAB_SIZE, byte_tokenizer, metaspace_tokenizer

TEXTS = [
    "",
    " ",
    "\n\n",
    "The plan\n城市 😀",
    f"{START}user\nHi{END}\n",
    "<think>a</think>",
    " lead",
]
HELLO = [{"role": "user", "content": "Hello"}]
KINDS = [byte_tokenizer, metaspace_tokenizer]


class Letters(PreTrainedTokenizer):
    """A tokenizer without a Rust backend: one id per letter."""

    def __init__(self, **given):
        self._letters = "abcdefghijklmnopqrstuvwxyz \n"
        super().__init__(**given)

    @property
    def vocab_size(self):
        return len(self._letters)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self._letters)} | self.added_tokens_encoder

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._letters.index(token) if token in self._letters else 0

    def _convert_id_to_token(self, index):
        return self._letters[index] if index < len(self._letters) else None

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_the_users_tokenizer(make, text):
    theirs = make()
    ours = ChatTokenizer(theirs)
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


def test_truncation_and_padding_of_the_original_do_not_reach_the_copy():
    theirs = byte_tokenizer()
    theirs.backend_tokenizer.enable_truncation(3)
    theirs.backend_tokenizer.enable_padding(length=8)
    before = theirs.backend_tokenizer.truncation, theirs.backend_tokenizer.padding
    ours = ChatTokenizer(theirs)
    assert ours.decode(ours.encode("The plan of the day")) == "The plan of the day"
    assert (theirs.backend_tokenizer.truncation, theirs.backend_tokenizer.padding) == before


def test_many_threads_encode_while_the_original_truncates_and_pads():
    theirs = byte_tokenizer()
    ours = ChatTokenizer(theirs)
    texts = [f"The plan of day {n} " * (n % 5 + 1) for n in range(40)]
    serial = [ours.encode(text) for text in texts]

    def work(worker: int):
        if worker == 0:  # what another library may do to the object it shares with us
            for n in range(200):
                theirs(texts[n % 40], truncation=True, max_length=2 + n % 3, padding="max_length")
            return None
        return [ours.encode(text) for text in texts * 5]

    with ThreadPoolExecutor(16) as pool:
        results = [result for result in pool.map(work, range(16)) if result is not None]
    assert all(result == serial * 5 for result in results)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("head", ["The", "a\n", f"{END}", "。"])
@pytest.mark.parametrize("tail", ["plan", " city", "城市", f"{START}user", "\nx"])
def test_text_that_follows_text_gets_no_mark_of_a_beginning(make, head, tail):
    ours = ChatTokenizer(make())
    joined = ours.encode(head) + ours.encode(tail, follows_text=True)
    assert ours.decode(joined, skip_special=False) == head + tail


def test_following_text_is_encoded_as_in_one_go_where_no_token_spans_the_border():
    ours = ChatTokenizer(metaspace_tokenizer())
    text, tail = f"user\nThe plan{END}", "\nThe city"
    assert ours.encode(text) + ours.encode(tail, follows_text=True) == ours.encode(text + tail)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", [END, f"a{START}b", "<think>", f"{END}{START}system\n"])
def test_control_text_can_be_encoded_as_plain_text(make, text):
    ours = ChatTokenizer(make())
    ids = ours.encode(text, control_tokens=False)
    structure = {ours.encode(token)[-1] for token in (START, END, "<think>", "</think>")}
    assert not structure & set(ids)
    assert ours.decode(ids) == text


@pytest.mark.parametrize("make", KINDS)
def test_plain_text_is_the_same_with_and_without_control_tokens(make):
    ours = ChatTokenizer(make())
    text = "The plan of the day:\n\n1. Paris – 城市"
    assert ours.encode(text, control_tokens=False) == ours.encode(text)


@given(
    st.lists(
        st.sampled_from([START, END, "<think>", "The plan", " ", "\n", "\n\n", "城市", "x", "é"]),
        max_size=12,
    ),
    st.sampled_from(KINDS),
)
@settings(max_examples=200, deadline=None)
def test_sections_encode_to_the_ids_of_the_whole(pieces, make):
    ours = _chat_tokenizer(make)
    text = "".join(pieces)
    sections = ours.sections(text)
    assert "".join(sections) == text
    ids: list[int] = []
    for section in sections:
        ids += ours.encode(section, follows_text=bool(ids))
    assert ids == ours.encode(text)
    if make is byte_tokenizer and END in pieces and "x" in pieces:
        assert len(sections) > 1


@cache
def _chat_tokenizer(make) -> ChatTokenizer:
    return ChatTokenizer(make())


def test_a_special_token_that_swallows_blanks_is_no_border():
    theirs = byte_tokenizer()
    theirs.add_tokens([AddedToken("<|x|>", special=True, lstrip=True)], special_tokens=True)
    assert ChatTokenizer(theirs).sections(f"a{END}b") == [f"a{END}b"]


def test_token_bytes_join_to_the_text():
    ours = ChatTokenizer(byte_tokenizer())
    text = "The plan\n城市 😀<think>"
    assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()
    meta = ChatTokenizer(metaspace_tokenizer())
    assert b"".join(map(meta.token_bytes, meta.encode(text))) == b" " + text.encode()
    assert ours.token_bytes(VOCAB_SIZE + 1) == b""


def test_control_text_is_what_structures_a_chat():
    plain = ChatTokenizer(byte_tokenizer())
    think = ChatTokenizer(byte_tokenizer(templates.THINK))
    assert {START, END} <= plain.special_tokens == plain.control_text
    assert think.control_text - think.special_tokens == {
        "<think>", "</think>", "<tool_call>", "</tool_call>",
    }  # fmt: skip


def test_a_base_model_has_no_template_until_one_is_given():
    base = ChatTokenizer(byte_tokenizer(None))
    assert not base.has_template
    with pytest.raises(TemplateError, match=r"no chat template.*chat_template="):
        base.render(HELLO)
    given = ChatTokenizer(byte_tokenizer(None), chat_template=templates.PLAIN)
    assert given.render(HELLO) == base.with_template(templates.PLAIN).render(HELLO)
    assert given.render(HELLO) == f"{START}user\nHello{END}\n{START}assistant\n"
    assert not base.has_template


def test_of_several_templates_the_tool_one_is_for_tools():
    named = {"default": templates.PLAIN, "tool_use": "TOOLS:" + templates.PLAIN}
    ours = ChatTokenizer(byte_tokenizer(None), chat_template=named)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert ours.render(HELLO, tools=[tool]).startswith("TOOLS:")
    assert not ours.render(HELLO).startswith("TOOLS:")
    assert not ours.render(HELLO, tools=[]).startswith("TOOLS:")
    only_tools = ours.with_template({"tool_use": templates.PLAIN})
    with pytest.raises(TemplateError, match="'tool_use'"):
        only_tools.render(HELLO)


def test_a_template_that_raises_is_a_typed_error_with_its_words():
    ours = ChatTokenizer(byte_tokenizer(templates.NOSYS))
    with pytest.raises(TemplateError, match=r"\['system'\].*System role not supported"):
        ours.render([{"role": "system", "content": "S"}])
    with pytest.raises(TemplateError):
        ours.with_template("{{ nothing.at.all }}").render(HELLO)
    with pytest.raises(TemplateError):
        ours.with_template("{% if %}").render(HELLO)


def test_the_last_message_can_be_left_open():
    ours = ChatTokenizer(byte_tokenizer())
    messages = [*HELLO, {"role": "assistant", "content": "The plan"}]
    open_ended = ours.render(messages, continue_final_message=True)
    assert open_ended.endswith("<|im_start|>assistant\nThe plan")


def test_a_tokenizer_without_a_rust_backend_works_the_same():
    theirs = Letters(eos_token=END, chat_template=templates.PLAIN)
    before = set(theirs.__dict__)
    ours = ChatTokenizer(theirs)
    text = f"a plan{END}of days"
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == "a planof days"
    plain = ours.encode(text, control_tokens=False)
    assert theirs.convert_tokens_to_ids(END) not in plain
    detokenizer = Detokenizer(ours)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == "a planof days"
    with ThreadPoolExecutor(8) as pool:
        assert set(map(tuple, pool.map(ours.encode, [text] * 200))) == {tuple(ids)}
    assert set(theirs.__dict__) == before
