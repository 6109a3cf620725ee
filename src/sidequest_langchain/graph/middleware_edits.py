"""Which results of tools an agent's middleware clears from a conversation, by age and by size.

The state is never changed: every call sees the conversation whole and repeats the edit. It must
not know a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from sidequest_langchain.chat.clearing import is_cleared

PLACEHOLDER = "[cleared]"
"""What stands in place of a result; LangChain's own word."""
STRATEGY = "sidequest"
"""Told in the message's metadata, where LangChain's middleware tells its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearingRule:
    """When a result is cleared."""

    keep: int
    """The newest results, which age does not clear."""
    trigger_tokens: int | None
    """Tokens of the whole conversation above which all but the newest results are cleared."""
    max_result_tokens: int | None
    """Tokens of a result above which it is cleared once it was read, whatever its age."""
    exclude_tools: frozenset[str]

    @property
    def is_on(self) -> bool:
        """Whether it clears anything ever."""
        return self.trigger_tokens is not None or self.max_result_tokens is not None

    def apply(
        self,
        messages: Sequence[BaseMessage],
        *,
        n_tokens: Callable[[Sequence[BaseMessage]], int],
        n_tokens_of: Callable[[ToolMessage], int],
    ) -> list[BaseMessage]:
        """The conversation as it is sent; `messages` is not changed.

        A result that no answer follows was never read, and stays.

        Args:
            messages: The conversation, as others edited it.
            n_tokens: Counts all of it.
            n_tokens_of: Counts a result.
        """
        found = list(messages)
        n_read = max((i for i, m in enumerate(found) if isinstance(m, AIMessage)), default=0)
        names = _names_of_calls(found)
        results = [(i, m) for i, m in enumerate(found) if isinstance(m, ToolMessage)]
        n_old = 0
        if self.trigger_tokens is not None and n_tokens(found) > self.trigger_tokens:
            n_old = max(0, len(results) - self.keep)
        for place, (at, message) in enumerate(results):
            name = message.name or names.get(message.tool_call_id)
            if at > n_read or is_cleared(message) or name in self.exclude_tools:
                continue
            is_large = (
                self.max_result_tokens is not None and n_tokens_of(message) > self.max_result_tokens
            )
            if place < n_old or is_large:
                found[at] = cleared(message)
        return found


def cleared(message: ToolMessage) -> ToolMessage:
    """A tool's message without its result, in LangChain's form."""
    entry = {"context_editing": {"cleared": True, "strategy": STRATEGY}}
    return message.model_copy(
        update={
            "artifact": None,
            "content": PLACEHOLDER,
            "response_metadata": {**message.response_metadata, **entry},
        }
    )


def as_text_only(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The conversation, in which what is cleared already is replaced in the text, come what may."""
    return [
        message.model_copy(
            update={
                "response_metadata": {
                    **message.response_metadata,
                    "sidequest": {"on_edit": "recompute"},
                }
            }
        )
        if is_cleared(message)
        else message
        for message in messages
    ]


def _names_of_calls(messages: Sequence[BaseMessage]) -> dict[str | None, str]:
    calls = (call for m in messages if isinstance(m, AIMessage) for call in m.tool_calls)
    return {call["id"]: call["name"] for call in calls}
