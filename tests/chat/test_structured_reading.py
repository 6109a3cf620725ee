"""Reading a value out of an answer: whole, cut off, broken, and while it grows."""

from __future__ import annotations

import itertools
import json
import pickle

import pydantic
import pydantic.v1
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration

from sidequest_langchain.chat.structured_reading import AnswerParser


class Leg(pydantic.BaseModel):
    city: str
    days: int = 1


class LegV1(pydantic.v1.BaseModel):
    city: str
    days: int = 1


PLAIN = AnswerParser()
VALUE = {"city": 'Åre 城市 "x"\n', "days": 3}
TEXT = json.dumps(VALUE, ensure_ascii=False)


def answer(text="", *, ended="stop", n_out=7, **more):
    usage = {"input_tokens": 1, "output_tokens": n_out, "total_tokens": n_out + 1}
    metadata = {"finish_reason": ended}
    return AIMessage(text, response_metadata=metadata, usage_metadata=usage, **more)


def call(args, name="Leg", id="c1"):
    return {"name": name, "args": args, "id": id, "type": "tool_call"}


@pytest.mark.parametrize("kind", [Leg, LegV1])
def test_a_whole_answer_becomes_an_object_of_its_class(kind):
    assert AnswerParser(kind=kind).invoke(answer(TEXT)) == kind(**VALUE)
    assert AnswerParser(kind=kind, call="Leg").invoke(answer(tool_calls=[call(VALUE)])) == kind(
        **VALUE
    )


def test_without_a_class_it_stays_what_it_is():
    assert PLAIN.invoke(answer(TEXT)) == PLAIN.invoke(TEXT) == PLAIN.parse(TEXT) == VALUE
    assert AnswerParser(call="Leg").invoke(answer(tool_calls=[call(VALUE)])) == VALUE


def test_text_in_blocks_is_read_without_the_reasoning():
    blocks = [{"type": "reasoning", "reasoning": "{"}, {"type": "text", "text": TEXT}]
    assert PLAIN.invoke(AIMessage(blocks)) == VALUE


@pytest.mark.parametrize("n_chars", range(len(TEXT)))
def test_no_part_of_an_answer_passes_for_the_whole(n_chars):
    with pytest.raises(OutputParserException, match=r"cut off after 7 tokens.*max_tokens") as error:
        PLAIN.invoke(answer(TEXT[:n_chars], ended="length"))
    assert error.value.llm_output == TEXT[:n_chars]


def test_an_answer_that_ended_with_the_last_allowed_token_is_whole():
    assert PLAIN.invoke(answer(TEXT, ended="length")) == VALUE
    assert PLAIN.invoke(answer("12")) == 12
    with pytest.raises(OutputParserException, match="cut off"):
        PLAIN.invoke(answer("12", ended="length"))  # 123 was perhaps to come


def test_an_answer_that_is_no_json_is_quoted():
    with pytest.raises(OutputParserException, match=r"cannot be read as JSON.*'Paris'"):
        PLAIN.invoke(answer("Paris"))


def test_a_value_of_the_wrong_kind_says_what_is_wrong():
    with pytest.raises(OutputParserException, match=r"(?s)no Leg:.*days.*\"many\"") as error:
        AnswerParser(kind=Leg).invoke(answer('{"city": "Oslo", "days": "many"}'))
    assert json.loads(error.value.llm_output) == {"city": "Oslo", "days": "many"}


# -- calls -------------------------------------------------------------------------------


def test_a_call_that_was_cut_off_or_broken_says_so():
    reader = AnswerParser(call="Leg")
    broken = {"name": "Leg", "args": '{"city": "O', "id": "c", "error": "no JSON"}
    broken["type"] = "invalid_tool_call"
    with pytest.raises(OutputParserException, match=r"cut off after 7 tokens"):
        reader.invoke(answer(ended="length", invalid_tool_calls=[broken]))
    with pytest.raises(OutputParserException, match=r"no JSON.*city"):
        reader.invoke(answer(invalid_tool_calls=[broken]))
    with pytest.raises(OutputParserException, match=r"no call of 'Leg'.*'Oslo'"):
        reader.invoke(answer("Oslo", tool_calls=[call({}, name="other")]))


def test_an_answer_may_be_calls_instead_if_tools_were_given():
    message = answer(tool_calls=[call({}, name="look_up")])
    assert AnswerParser(may_call=True).invoke(message) is None
    with pytest.raises(OutputParserException):
        PLAIN.invoke(message)


# -- streams -----------------------------------------------------------------------------


def chunks(text, cuts, ended="stop"):
    edges = [0, *sorted(cuts), len(text)]
    made = [AIMessageChunk(content=text[a:b]) for a, b in itertools.pairwise(edges)]
    metadata = {"finish_reason": ended}
    return [*made, AIMessageChunk(content="", response_metadata=metadata, chunk_position="last")]


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_a_stream_in_any_pieces_grows_to_the_whole_value(cuts):
    seen = list(PLAIN.transform(iter(chunks(TEXT, cuts))))
    assert seen[-1] == VALUE
    assert all(isinstance(value, dict) for value in seen)
    assert all(a != b for a, b in itertools.pairwise(seen))
    for value in seen:
        assert value.get("city", "") in VALUE["city"]


@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_a_class_is_yielded_once_and_whole(cuts):
    assert list(AnswerParser(kind=Leg).transform(iter(chunks(TEXT, cuts)))) == [Leg(**VALUE)]


async def test_async_is_the_same():
    async def pieces():
        for chunk in chunks(TEXT, range(len(TEXT))):
            yield chunk

    seen = [value async for value in PLAIN.atransform(pieces())]
    assert seen == list(PLAIN.transform(iter(chunks(TEXT, range(len(TEXT))))))
    assert len(seen) > 5
    reader = AnswerParser(kind=Leg)
    assert [value async for value in reader.atransform(pieces())] == [Leg(**VALUE)]
    assert await PLAIN.ainvoke(answer(TEXT)) == VALUE


def test_a_stream_that_was_cut_off_ends_in_an_error():
    values = PLAIN.transform(iter(chunks(TEXT[:-4], [12], "length")))
    assert set(next(values)) == {"city"}
    with pytest.raises(OutputParserException, match="cut off"):
        list(values)


def test_the_arguments_of_a_call_grow_too():
    def piece(args, name=None, id=None):
        chunk = {"name": name, "args": args, "id": id, "index": 0, "type": "tool_call_chunk"}
        return AIMessageChunk(content="", tool_call_chunks=[chunk])

    text = json.dumps(VALUE)
    stream = [piece("", "Leg", "c1"), *(piece(text[i : i + 5]) for i in range(0, len(text), 5))]
    stream.append(AIMessageChunk(content="", chunk_position="last"))
    seen = list(AnswerParser(call="Leg").transform(iter(stream)))
    assert seen[-1] == VALUE
    assert len(seen) > 3
    assert list(AnswerParser(kind=Leg, call="Leg").transform(iter(stream))) == [Leg(**VALUE)]


def test_an_answer_that_does_not_stream_is_read_at_once():
    assert list(PLAIN.transform(iter([answer(TEXT)]))) == [VALUE]
    assert list(PLAIN.transform(iter(["{", "}"]))) == [{}]
    with pytest.raises(OutputParserException):
        list(PLAIN.transform(iter([])))


def test_parsers_are_pickled():
    back = pickle.loads(pickle.dumps(AnswerParser(kind=Leg)))
    assert back.parse_result([ChatGeneration(message=answer(TEXT))]) == Leg(**VALUE)
