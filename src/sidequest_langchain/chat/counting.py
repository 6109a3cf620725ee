"""Counting tokens by the model's own tokenizer and template, without the Hub.

It must not know how an answer is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage

from sidequest_langchain.chat.serving import ServedModel
from sidequest_langchain.errors import RequestError


class CountingModel(ServedModel):
    """A chat model that tells how many tokens texts and conversations are."""

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` alone, by the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.engine.tokenizer.encode(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens that a call with `messages` feeds.

        Any part of a conversation is counted (`trim_messages` asks for such): what the template
        refuses is counted message by message.
        """
        if not messages:
            return 0
        try:
            return len(self.prompt_ids(messages, tools=tools or ()))
        except RequestError:
            return sum(self._count_alone(message) for message in messages)

    def _count_alone(self, message: BaseMessage) -> int:
        """Tokens of one message, rather too many than too few."""
        calls = getattr(message, "tool_calls", None) or ""
        try:
            n_turn = len(self.prompt_ids([HumanMessage("")]))
        except RequestError:  # a base model
            n_turn = 0
        return n_turn + len(self.get_token_ids(f"{message.text}{calls}"))
