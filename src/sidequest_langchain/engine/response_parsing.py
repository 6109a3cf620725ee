"""Replies read by the tokenizer's own word: transformers' parser of a declared response template.

Such a template says where thoughts, text and calls begin and end. It must not know LangChain, nor
how a model is told of its tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from sidequest_langchain.engine.tokenizer import ChatTokenizer


def response_template_of(tokenizer: ChatTokenizer) -> Any:
    """What the tokenizer declares; `None` if it declares nothing."""
    return getattr(tokenizer._tokenizer, "response_template", None)


def special_ids_of(tokenizer: ChatTokenizer) -> frozenset[int]:
    """All tokens that decoding skips: such templates speak of them."""
    return tokenizer._special_ids


class ResponseStream:
    """Reads one reply, letter by letter."""

    def __init__(self, template: Any, opened: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """Begin to read.

        Args:
            template: The response template.
            opened: What the prompt has of the assistant's turn already.
            tools: Descriptions of the tools there are: arguments get their types.
        """
        self._parser = ResponseParser(template, prefix=opened, tools=[dict(t) for t in tools])

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The events that more text makes: `region_open`, `region_chunk`, `region_close`.

        Raises:
            ValueError: A region is not what the template says; nothing more can be read.
        """
        return list(self._parser.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        """The events of the end.

        Raises:
            ValueError: As for `feed`, or something that must be there is not.
        """
        return list(self._parser.finalize()[1])
