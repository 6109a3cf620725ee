"""From a model's answer to the value it was asked for, whole or while it arrives.

It must not know who answered. Half an answer never passes for a whole one: LangChain's own
parsers complete cut-off JSON, this one says that it was cut off.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import pydantic
import pydantic.v1
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import BaseTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.json import parse_partial_json
from pydantic import SkipValidation

_NOTHING = object()


class AnswerParser(BaseTransformOutputParser[Any]):
    """Reads the JSON of an answer, or of the arguments of its call.

    While an answer streams, a JSON object is yielded as it grows; a pydantic object once, at
    the end.
    """

    kind: Annotated[type | None, SkipValidation()] = None
    """A pydantic class, v2 or v1, that the value becomes."""
    call: str | None = None
    """The tool whose arguments are the value; `None`: the text is."""
    may_call: bool = False
    """Whether an answer may be tool calls instead; it has no value then."""

    def parse(self, text: str) -> Any:
        """The value of an answer's text.

        Raises:
            OutputParserException: It is no whole JSON value, or not of the wanted kind.
        """
        return self._value(AIMessage(text))

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value of an answer; `None` if it is tool calls, or while nothing can be said.

        Raises:
            OutputParserException: It was cut off, is no JSON, or is not of the wanted kind.
        """
        first = result[0]
        message = first.message if isinstance(first, ChatGeneration) else AIMessage(first.text)
        return self._partial(message) if partial else self._value(message)

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        answer = _Growing(self)
        for piece in input:
            yield from answer.grown(piece)
        yield from answer.ended()

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        answer = _Growing(self)
        async for piece in input:
            for value in answer.grown(piece):
                yield value
        for value in answer.ended():
            yield value

    @property
    def _type(self) -> str:
        return "sidequest_answer"

    # -- reading -------------------------------------------------------------------------

    def _value(self, message: BaseMessage) -> Any:
        if self.call is not None:
            return self._typed(self._arguments(message, self.call))
        text = message.text
        if self.may_call and getattr(message, "tool_calls", None):
            return None
        try:
            value = json.loads(text)
        except ValueError as error:
            raise _unreadable(message, text, str(error)) from error
        if not isinstance(value, dict | list | str) and _is_cut(message):
            # More digits might have followed.
            raise _unreadable(message, text, "")
        return self._typed(value)

    def _arguments(self, message: BaseMessage, name: str) -> Any:
        for call in getattr(message, "tool_calls", ()):
            if call["name"] == name:
                return call["args"]
        broken = list(getattr(message, "invalid_tool_calls", ()))
        if broken:
            found, why = broken[0].get("args") or "", broken[0].get("error") or "it is no JSON"
            raise _unreadable(message, found, why)
        raise _unreadable(message, message.text, f"there is no call of {name!r}")

    def _typed(self, value: Any) -> Any:
        if self.kind is None:
            return value
        try:
            if issubclass(self.kind, pydantic.BaseModel):
                return self.kind.model_validate(value)
            assert issubclass(self.kind, pydantic.v1.BaseModel)
            return self.kind.parse_obj(value)
        except (pydantic.ValidationError, pydantic.v1.ValidationError) as error:
            text = json.dumps(value, ensure_ascii=False)
            msg = f"the answer is no {self.kind.__name__}: {error}; it was {text}"
            raise OutputParserException(msg, llm_output=text) from error

    def _partial(self, message: BaseMessage) -> Any:
        """What is there of a JSON value; `None` where it would be half a pydantic object."""
        if self.kind is not None:
            return None
        if self.call is not None:
            calls = getattr(message, "tool_calls", ())
            return next((call["args"] for call in calls if call["name"] == self.call), None)
        try:
            return parse_partial_json(message.text)
        except ValueError:
            return None


class _Growing:
    """An answer that arrives in pieces."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._whole: BaseMessage | None = None
        self._last: Any = _NOTHING

    def grown(self, piece: str | BaseMessage) -> Iterator[Any]:
        """What can be said of the answer after one more piece, if that is more than before."""
        chunk = AIMessageChunk(content=piece) if isinstance(piece, str) else piece
        self._whole = chunk if self._whole is None else _joined(self._whole, chunk)
        value = self._parser.parse_result([ChatGeneration(message=self._whole)], partial=True)
        if value is not None and value != self._last:
            self._last = value
            yield value

    def ended(self) -> Iterator[Any]:
        """The whole value, if that was not said yet."""
        whole = AIMessage("") if self._whole is None else self._whole
        value = self._parser.parse_result([ChatGeneration(message=whole)])
        if value != self._last and value is not None:
            yield value


def _joined(whole: BaseMessage, chunk: BaseMessage) -> BaseMessage:
    joined: Any = whole + chunk  # of two chunks: a chunk
    assert isinstance(joined, BaseMessage)
    return joined


def _is_cut(message: BaseMessage) -> bool:
    return message.response_metadata.get("finish_reason") == "length"


def _unreadable(message: BaseMessage, text: str, why: str) -> OutputParserException:
    usage = getattr(message, "usage_metadata", None)
    if _is_cut(message):
        n_tokens = f" after {usage['output_tokens']} tokens" if usage else ""
        msg = (
            f"the answer was cut off{n_tokens}, before its JSON was complete; allow more with "
            f"max_tokens=..., or ask for less. It was {text!r}"
        )
    else:
        msg = f"the answer cannot be read as JSON: {why}. It was {text!r}"
    return OutputParserException(msg, llm_output=text)
