"""Text while it is generated: byte-exact, never re-sent, cut at stop strings.

The oracle is plain `decode` of the whole id sequence by transformers.
"""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.engine.detokenizer import Detokenizer
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from tests.support.tok import VOCAB_SIZE, byte_tokenizer, metaspace_tokenizer

KINDS = {"byte-level": byte_tokenizer, "metaspace": metaspace_tokenizer}
FAMILY, FLAG = "👨‍👩‍👧‍👦", "🇨🇭"


@cache
def plain(kind: str):
    return KINDS[kind]()


@cache
def chat_tokenizer(kind: str) -> ChatTokenizer:
    return ChatTokenizer(plain(kind))


def run(kind: str, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(chat_tokenizer(kind), stop)
    chunks = []
    for token_id in ids:
        chunks.append(detokenizer.push(token_id))
        if detokenizer.is_stopped:
            return chunks, detokenizer
    return [*chunks, detokenizer.finish()], detokenizer


def spell(kind: str, *texts: str) -> list[int]:
    """Ids of each text, encoded on its own: `spell(kind, *"text")` is letter by letter."""
    tokenizer = chat_tokenizer(kind)
    return [token_id for text in texts for token_id in tokenizer.encode(text, follows_text=True)]


any_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24)
byte_ids = st.lists(st.integers(0, 255), max_size=12)
"""In both vocabularies the first ids are (nearly all) single bytes."""
any_text = st.text(
    st.sampled_from([*"ab \n.,", "é", "城", "市", "😀", "\u200d", "👩", "🇨", "🇭", "�", "\x00"]),
    max_size=12,
)


@pytest.mark.parametrize("kind", KINDS)
@given(ids=any_ids | byte_ids)
@settings(max_examples=300, deadline=None)
def test_chunks_join_to_the_decoded_ids_whatever_the_ids(kind, ids):
    chunks, detokenizer = run(kind, ids)
    expected = plain(kind).decode(ids, skip_special_tokens=True)
    assert "".join(chunks) == detokenizer.text == expected
    assert detokenizer.kept_ids() == tuple(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text)
@settings(max_examples=200, deadline=None)
def test_every_chunk_extends_a_text_that_is_already_right(kind, text):
    ids = chat_tokenizer(kind).encode(text)
    final = plain(kind).decode(ids)
    sent = ""
    for chunk in run(kind, ids)[0]:
        sent += chunk
        assert final.startswith(sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", ["😀", FAMILY, FLAG, "你好 city 城市。", "naïve – „x“", "  "])
def test_characters_of_several_tokens_arrive_whole(kind, inner):
    text = f"A{inner}B"
    chunks, _ = run(kind, chat_tokenizer(kind).encode(text))
    assert "".join(chunks) == text
    assert not any("�" in chunk for chunk in chunks)
    assert sum(bool(chunk) for chunk in chunks) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_cut_by_the_end_is_flushed_once(kind):
    ids = chat_tokenizer(kind).encode("A😀")[:-1]
    chunks, _ = run(kind, ids)
    assert "".join(chunks) == plain(kind).decode(ids)
    assert not any("�" in chunk for chunk in chunks[:-1])
    assert "�" in chunks[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_replacement_character_does_not_stall_the_stream(kind):
    ids = chat_tokenizer(kind).encode("a�b" + "�" * 5 + " and more text")
    chunks, _ = run(kind, ids)
    assert "".join(chunks) == plain(kind).decode(ids)
    held = 0
    for chunk in chunks:
        held = 0 if chunk else held + 1
        assert held <= (3 if kind == "byte-level" else 15)


def test_a_literal_replacement_character_is_sent_with_its_last_byte():
    ids = chat_tokenizer("byte-level").encode("�")
    detokenizer = Detokenizer(chat_tokenizer("byte-level"))
    assert [detokenizer.push(i) for i in ids] == [""] * (len(ids) - 1) + ["�"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_text_even_inside_a_character(kind):
    end = plain(kind).convert_tokens_to_ids("<|im_end|>")
    ids = [end]
    for token_id in chat_tokenizer(kind).encode("A 😀 B"):
        ids += [token_id, end]
    chunks, detokenizer = run(kind, ids)
    assert "".join(chunks) == "A 😀 B" == plain(kind).decode(ids, skip_special_tokens=True)
    assert detokenizer.kept_ids() == tuple(ids)


def test_ids_outside_of_the_vocabulary_add_nothing():
    a, b = spell("byte-level", "a", "b")
    chunks, _ = run("byte-level", [a, VOCAB_SIZE + 7, b])
    assert "".join(chunks) == "ab"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("pieces", "stop", "kept"),
    [
        (["The plan", "\n", "Obs", "ervation", ":", " x"], "\nObservation:", "The plan"),
        (["a", "xEND.", "b"], "END", "ax"),
        (["The plan;", " then"], ";", "The plan"),
        (["你好", "。", "城市"], "。", "你好"),
        (["END", " more"], "END", ""),
        (["a", "a", "a", "b"], "aab", "a"),
        (["an 😀", "!"], "😀", "an "),
    ],
    ids=["over-tokens", "in-a-token", "one-char", "cjk", "first-output", "self-overlap", "emoji"],
)
def test_text_ends_right_before_the_stop_string(kind, pieces, stop, kept):
    ids = spell(kind, *pieces)
    chunks, detokenizer = run(kind, ids, (stop,))
    assert detokenizer.is_stopped
    assert "".join(chunks) == detokenizer.text == kept
    assert detokenizer.push(ids[0]) == detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_never_completes_is_flushed_at_the_end(kind):
    chunks, detokenizer = run(kind, spell(kind, "The plan", "\n", "Obs"), ("\nObservation:",))
    assert not detokenizer.is_stopped
    assert chunks[-1] == "\nObs"
    assert "".join(chunks) == "The plan\nObs"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_turns_out_otherwise_is_sent_on(kind):
    chunks, _ = run(kind, spell(kind, "a", "\n", "Obs", "tacle", " end"), ("\nObservation:",))
    assert "".join(chunks) == "a\nObstacle end"


def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_split():
    stops = ("abcd", "c")
    assert {
        run("byte-level", spell("byte-level", *pieces), stops)[1].text
        for pieces in (["abcd"], ["ab", "cd"], ["a", "b", "c", "d"])
    } == {"ab"}


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text, stops=st.lists(any_text.filter(bool), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_the_text_as_a_search_of_the_whole_text_would(kind, text, stops):
    ids = chat_tokenizer(kind).encode(text)
    final = plain(kind).decode(ids)
    cut = min(
        ((final.find(s) + len(s), final.find(s)) for s in stops if s in final),
        default=(0, len(final)),
    )[1]
    chunks, detokenizer = run(kind, ids, tuple(stops))
    assert "".join(chunks) == detokenizer.text == final[:cut]
    assert detokenizer.is_stopped == any(s in final for s in stops)


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text, stop=any_text.filter(bool), tail=any_text)
@settings(max_examples=300, deadline=None)
def test_kept_ids_are_the_longest_head_inside_of_the_text(kind, text, stop, tail):
    ids = chat_tokenizer(kind).encode(text + stop + tail)
    detokenizer = run(kind, ids, (stop,))[1]
    decode = plain(kind).decode
    n_kept = len(detokenizer.kept_ids())
    assert detokenizer.kept_ids() == tuple(ids[:n_kept])
    assert detokenizer.text.startswith(decode(ids[:n_kept]))
    heads = range(n_kept + 1, len(ids) + 1)
    assert not any(detokenizer.text.startswith(decode(ids[:n])) for n in heads)


def test_a_token_reaching_past_the_stop_is_not_kept():
    ids = spell("byte-level", "The plan", "END")
    (end,) = spell("byte-level", "END")
    detokenizer = run("byte-level", ids, ("ND",))[1]
    assert detokenizer.text == "The planE"
    assert detokenizer.kept_ids() == tuple(ids[: ids.index(end)])


@pytest.mark.benchmark
def test_the_cost_of_a_token_does_not_grow_with_the_text():
    ids = spell("byte-level", " plan", "你") * 4000
    detokenizer = Detokenizer(chat_tokenizer("byte-level"), ("\nObservation:",))

    def seconds(part: list[int]) -> float:
        start = time.perf_counter()
        for token_id in part:
            detokenizer.push(token_id)
        return time.perf_counter() - start

    first = min(seconds(ids[:1000]) for _ in range(3))
    for token_id in ids:
        detokenizer.push(token_id)
    assert min(seconds(ids[:1000]) for _ in range(3)) < 5 * first
