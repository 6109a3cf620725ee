"""What is read in one reply as parts of LangChain's messages: content, reasoning, calls of tools.

It must not know how a reply was generated, nor what is told about it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk

from sidequest_langchain.chat.dialect import Plan
from sidequest_langchain.chat.tool_events import CallBegun, CallText, ReplyEvent, Said, Thought
from sidequest_langchain.engine.detokenizer import decoded
from sidequest_langchain.engine.request import GenerationResult
from sidequest_langchain.engine.tokenizer import ChatTokenizer

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
FIRST_BESIDE_BLOCKS = 1_000
"""LangChain numbers blocks of text and reasoning from 0, and would join a call of that number."""
_N_ID_LETTERS = 9
"""As many as Mistral's templates want."""


class Answer:
    """One reply while it is read."""

    def __init__(self, plan: Plan, call_id: str, *, first_index: int = 0) -> None:
        """Begin to read.

        Args:
            plan: How to.
            call_id: Of the model call; the ids of its tool calls follow from it.
            first_index: Index of its first tool call, by which chunks are joined.
        """
        self._first_index = first_index
        self._plan = plan
        self._call_id = call_id
        self._reader = plan.reader()

    def feed(self, text: str) -> Iterator[AIMessageChunk]:
        """What became certain with more of the reply."""
        return self._chunks(self._reader.feed(text))

    def finish(self) -> Iterator[AIMessageChunk]:
        """What was held back when the reply ended."""
        return self._chunks(self._reader.finish())

    def whole(self, text: str) -> dict[str, Any]:
        """Fields of the message that a whole reply makes: what its chunks would join to."""
        if self._plan.is_plain:
            return {"content": text}
        chunks = [*self.feed(text), *self.finish()]
        joined = reduce(add, chunks, AIMessageChunk(content=""))
        return {
            "content": joined.content,
            "additional_kwargs": joined.additional_kwargs,
            "tool_calls": joined.tool_calls,
            "invalid_tool_calls": joined.invalid_tool_calls,
        }

    @property
    def has_calls(self) -> bool:
        """Whether it calls tools, soundly or not."""
        return self._reader.calls.n_begun > 0

    @property
    def problems(self) -> dict[str, str]:
        """Why calls of it are invalid, by their ids."""
        return {self._id(i): problem for i, problem in self._reader.calls.problems.items()}

    def n_thought_tokens(self, result: GenerationResult, tokenizer: ChatTokenizer) -> int:
        """Tokens of the finished reply that are thought, the tags included."""
        ids = result.token_ids

        def n_up_to(n_chars: int) -> int:
            heads = range(len(ids) + 1)
            return bisect_left(
                heads,
                n_chars,
                key=lambda n: len(decoded(tokenizer, ids[:n], self._plan.shown)),
            )

        thoughts = self._reader.thoughts
        return sum(min(n_up_to(end), len(ids)) - n_up_to(start) for start, end in thoughts)

    def _chunks(self, events: Iterable[ReplyEvent]) -> Iterator[AIMessageChunk]:
        for event in events:
            if isinstance(event, Said):
                yield AIMessageChunk(content=event.text)
            elif isinstance(event, Thought):
                kwargs = {"reasoning_content": event.text}
                yield AIMessageChunk(content="", additional_kwargs=kwargs)
            else:
                yield AIMessageChunk(content="", tool_call_chunks=[self._call(event)])

    def _call(self, event: CallBegun | CallText) -> Any:
        if isinstance(event, CallText):
            return tool_call_chunk(args=event.text, index=self._first_index + event.index)
        return tool_call_chunk(
            name=event.name,
            args="",
            id=self._id(event.index),
            index=self._first_index + event.index,
        )

    def _id(self, index: int) -> str:
        digest = hashlib.blake2b(f"{self._call_id}:{index}".encode(), digest_size=16).digest()
        number = int.from_bytes(digest)
        return "".join(_LETTERS[number // 62**i % 62] for i in range(_N_ID_LETTERS))
