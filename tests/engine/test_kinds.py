"""The kinds of generated tokens, token by token; and where tokens end in a text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.kind_tracker import KindTracker
from sidequest_langchain.engine.placing import ends_by_bytes
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.kinds import TokenKind as K
from tests.engine.driving import Listener, ask, ids, model_of, run
from tests.support.force import force
from tests.support.tok import END, START, byte_tokenizer, metaspace_tokenizer

MAKERS = {
    "byte-level": byte_tokenizer,
    "metaspace": metaspace_tokenizer,
    "special tags": lambda: byte_tokenizer(special_tags=True),
}


@pytest.fixture(params=MAKERS)
def tokenizer(request) -> ChatTokenizer:
    return ChatTokenizer(MAKERS[request.param]())


def kinds_of_text(tokenizer: ChatTokenizer, text: str) -> list[tuple[K, str]]:
    """(kind, text) of each token, with the tokens of one kind joined."""
    tracker = KindTracker(tokenizer)
    found: list[tuple[K, bytes]] = []
    for token_id in tokenizer.encode(text, follows_text=True):
        kind, spelled = tracker.push(token_id), tokenizer.token_bytes(token_id)
        if found and found[-1][0] is kind:
            spelled = found.pop()[1] + spelled
        found.append((kind, spelled))
    return [(kind, spelled.decode()) for kind, spelled in found]


CALL = '<tool_call>\n{"name": "f"}</tool_call>'


def test_blocks_are_told_with_their_tags(tokenizer):
    text = f"a<think>hm {CALL}</think>b{CALL}c"
    assert kinds_of_text(tokenizer, text) == [
        (K.ANSWER, "a"),
        (K.THOUGHT, f"<think>hm {CALL}</think>"),
        (K.ANSWER, "b"),
        (K.TOOL_CALL, CALL),
        (K.ANSWER, "c"),
    ]


@pytest.mark.parametrize("opening", ["[TOOL_CALLS]", "<|python_tag|>"])
def test_a_marker_in_several_tokens_counts_from_its_last(tokenizer, opening):
    ids = tokenizer.encode(opening)
    assert len(ids) > 1
    tracker = KindTracker(tokenizer)
    kinds = [tracker.push(token_id) for token_id in [*ids, *tokenizer.encode("{}<think>")]]
    n = len(ids) - 1
    assert kinds[:n] == [K.ANSWER] * n
    assert set(kinds[n:]) == {K.TOOL_CALL}  # to the end: nothing closes it


def test_what_looks_like_a_marker_is_none(tokenizer):
    said = "a < think > b <thinks> </think> </tool_call> > ]"
    assert {kind for kind, _ in kinds_of_text(tokenizer, said)} == {K.ANSWER}


@given(text=st.lists(st.sampled_from(["<think>", "</think>", CALL, "a", "城", "\n"]), max_size=9))
@settings(max_examples=100, deadline=None)
def test_kinds_do_not_depend_on_the_split_outside_of_markers(text):
    tokenizer = _TOKENIZER
    joined = "".join(text)
    whole = kinds_of_text(tokenizer, joined)
    assert "".join(part for _, part in whole) == joined
    depth = K.ANSWER
    expected = []
    for part in text:
        if depth is K.ANSWER and part == "<think>":
            depth = K.THOUGHT
        kind = K.TOOL_CALL if part == CALL and depth is K.ANSWER else depth
        if depth is K.THOUGHT and part == "</think>":
            depth = K.ANSWER
        if expected and expected[-1][0] is kind:
            part = expected.pop()[1] + part
        expected.append((kind, part))
    assert whole == expected


_TOKENIZER = ChatTokenizer(byte_tokenizer())


@pytest.mark.parametrize("has_kinds", [True, False])
@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (f"{START}assistant\n<think>\n", K.THOUGHT),
        (f"{START}assistant\n<think>\n\n</think>\n\n", K.ANSWER),
        (f"{START}assistant\n", K.ANSWER),
        (f"<think>{END}\n{START}assistant\n", K.ANSWER),
    ],
)
def test_a_block_that_the_prompt_left_open_goes_on(tokenizer, end, kind, has_kinds):
    asked, opened = tokenizer.encode("<think> why"), tokenizer.encode(end, follows_text=True)
    kinds = bytes([K.QUESTION] * len(asked) + [K.DELIMITER] * len(opened))
    if not has_kinds:
        asked, kinds = [], b""
    tracker = KindTracker(tokenizer)
    tracker.read_prompt([*asked, *opened], kinds)
    assert tracker.push(tokenizer.encode("a")[0]) is kind


def test_what_the_user_wrote_opens_nothing(tokenizer):
    ids = tokenizer.encode("<think>")
    tracker = KindTracker(tokenizer)
    tracker.read_prompt(ids, bytes([K.QUESTION] * len(ids)))
    assert tracker.push(tokenizer.encode("a")[0]) is K.ANSWER


# -- a sequence -------------------------------------------------------------------------


@pytest.mark.parametrize("has_kinds", [True, False])
def test_a_sequence_knows_the_kinds_of_what_it_feeds(tokenizer, has_kinds):
    prompt = tokenizer.encode("The plan")
    kinds = bytes([K.QUESTION] * len(prompt)) if has_kinds else b""
    request = replace(ask(prompt, 30), kinds=kinds)
    sequence = Sequence(request, Listener(), tokenizer, context_length=500, eos_ids=frozenset())
    known = kinds or bytes(len(prompt))
    n = len(prompt)
    assert sequence.kinds_of(0, n) == known
    assert sequence.kinds_of(1, 3) == known[1:3]
    said = tokenizer.encode("a<think>b</think>c", follows_text=True)
    expected = known + bytes([K.ANSWER, *[K.THOUGHT] * 3, K.ANSWER])
    for i, token_id in enumerate(said):
        sequence.take(token_id, None)
        if i != 1:  # not asked at every step: a step may store several
            assert sequence.kinds_of(n - 1, n + i + 1) == expected[n - 1 : n + i + 1]
    assert sequence.kinds_of(n + 1, n + 2) == bytes([K.THOUGHT])


@pytest.mark.parametrize("prompt_lookup", [0, 3])
def test_an_engine_knows_the_kind_of_every_row_it_counts(make_engine, monkeypatch, prompt_lookup):
    """In whatever portions: chunks of a prompt, single tokens, guesses that were right."""
    rows: list[tuple[int, int]] = []

    def extend(core, sequence, tokens):
        first = sequence.n_resident
        kinds = sequence.kinds_of(first, first + len(tokens))
        rows.extend(zip(tokens, kinds, strict=True))
        plain(core, sequence, tokens)

    plain = EngineCore._extend
    monkeypatch.setattr(EngineCore, "_extend", extend)
    model = model_of("llama")
    engine = make_engine(model, config=CacheConfig(prefill_chunk=8, prompt_lookup=prompt_lookup))
    said = engine.tokenizer.encode("a<think>the plan</think>the plan the plan the plan")
    prompt = [*ids(20), *said]
    kinds = bytes([K.SYSTEM] * 20 + [K.QUESTION] * len(said))
    with force(model, said):
        run(engine, replace(ask(prompt, len(said)), kinds=kinds))
    texts = [K.ANSWER, *[K.THOUGHT] * (said.index(TO_ANSWER) - 1)]
    texts += [K.THOUGHT, *[K.ANSWER] * (len(said) - len(texts) - 1)]
    assert rows == list(zip([*prompt, *said], [*kinds, *texts], strict=True))[:-1]


TO_ANSWER = ChatTokenizer(byte_tokenizer()).encode("</think>")[0]


# -- where tokens end -------------------------------------------------------------------

TEXTS = st.text("aH é\u0301\n城市😀.<>", max_size=20) | st.sampled_from(
    [f"{START}user\nHi{END}\n", " lead", "a\ud800b", "The plan\n\n"]
)


@pytest.mark.parametrize("follows_text", [True, False])
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_tokens_end_where_their_texts_do(follows_text, text):
    for one in _ALL:
        ids = one.encode(text, follows_text=follows_text)
        for ends in (
            one.ends_of(text, ids, follows_text=follows_text),
            one.spelled_ends(text, ids),
        ):
            assert len(ends) == len(ids)
            assert ends == sorted(ends)
            assert not ids or ends[-1] == len(text)
        check_heads(one, text, ids, one.ends_of(text, ids, follows_text=follows_text))


def check_heads(one: ChatTokenizer, text: str, ids: list[int], ends: list[int]) -> None:
    """A head of the ids that decodes to whole characters ends after as many."""
    if "\ud800" in text:
        return
    for n, end in enumerate(ends, 1):
        spelled = b"".join(map(one.token_bytes, ids[:n])).lstrip(b" ")
        try:
            head = spelled.decode()
        except UnicodeDecodeError:
            continue
        if head:  # a space put in front ends where the character after it does
            assert text[:end].lstrip(" ") == head


_ALL = [ChatTokenizer(make()) for make in MAKERS.values()]


def test_ids_that_the_tokenizer_would_not_choose_are_placed_by_their_bytes(tokenizer):
    text = "城市 Hanzi"
    ids = [t for letter in text for t in tokenizer.encode(letter, follows_text=True)]
    ends = tokenizer.ends_of(text, ids)
    assert ends == tokenizer.spelled_ends(text, ids)
    assert set(ends) == set(range(1, len(text) + 1))


@pytest.mark.parametrize(
    ("text", "spelled", "ends"),
    [
        ("abc", [b"a", b"bc"], [1, 3]),
        ("abc", [b" a", b"bc"], [1, 3]),  # a space put in front
        ("é!", [b"\xc3", b"\xa9", b"!"], [1, 1, 2]),
        ("a\U00020000b", [b"a", b"b"], [1, 3]),  # a mark in between
        ("e\u0301x yz", [b"\xc3\xa9", b"x", b" yz"], [0, 3, 6]),  # composed by a normaliser
        ("ab", [b"a", b"?", b"b"], [1, 1, 2]),
        ("", [b"a"], [0]),
    ],
)
def test_bytes_are_found_again(text, spelled, ends):
    assert ends_by_bytes(text, spelled) == ends
