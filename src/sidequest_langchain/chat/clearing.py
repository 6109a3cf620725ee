"""Cleared results of tools: which texts stood in their place, and the prompt that still has them.

LangChain's `ContextEditingMiddleware`, or ours, replaces the text of a tool message and marks it.
With `on_edit="reuse"` the prompt keeps the original text's ids, so that what was computed stays
valid, and the engine is asked to let their rows leave. It must not know how that is done.

    state      user  call  result: 900 tokens   answer  ...
    messages   user  call  result: [cleared]    answer  ...     marked as cleared
    reuse      user  call  result: 900 tokens   answer  ...     fed as it was; the 900 rows leave
    recompute  user  call  result: [cleared]    answer  ...     computed again behind the result
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from sidequest_langchain.chat.messages import reply_id
from sidequest_langchain.chat.prompt import Prompt
from sidequest_langchain.engine.request import Clearing, GenerationRequest, ToolResultSpan
from sidequest_langchain.kinds import TokenKind

MOST_CHARS = 8_000_000
"""Of the texts remembered; the least recently fed are forgotten."""
LEAST_ROOM = 512
"""Tokens that an answer without a limit of its own must have room for."""

NOT_KNOWN = "their texts were not fed to this model as they were, or were forgotten"
NOT_FOUND = "the chat template does not show where results stand"
NO_ROOM = "with their texts the prompt leaves too little of the context window for an answer"

Key: TypeAlias = tuple[str, str | None, str]
"""Of a result: the scope, the message's id, the id of the tool call."""


def is_cleared(message: BaseMessage) -> bool:
    """Whether a message is the result of a tool that was cleared, in LangChain's form."""
    if not isinstance(message, ToolMessage):
        return False
    entry = message.response_metadata.get("context_editing")
    return isinstance(entry, Mapping) and bool(entry.get("cleared"))


def replies_after_cleared(messages: Sequence[BaseMessage]) -> tuple[str, ...]:
    """Call ids of the replies behind the first cleared result.

    What was computed for them began with the result's own text: it does not come back.
    """
    first = next((at for at, message in enumerate(messages) if is_cleared(message)), len(messages))
    return _replies(messages[first:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reusing:
    """A prompt that still has the texts of cleared results, or why there is none."""

    prompt: Prompt | None = None
    runs: tuple[ToolResultSpan, ...] = ()
    history: frozenset[str] = frozenset()
    forget: Callable[[], None] = lambda: None
    """Have these results replaced in the text from now on."""
    why_not: str = ""

    def request(
        self, instead: GenerationRequest, on_instead: Callable[[], None] = lambda: None
    ) -> GenerationRequest:
        """The request that clears in the cache.

        Args:
            instead: The one with the results replaced.
            on_instead: Called, from any thread, if that one is served after all.
        """
        if self.prompt is None:
            return replace(instead, why_not_cleared=self.why_not)

        def fell_back() -> None:
            self.forget()
            on_instead()

        return replace(
            instead,
            prompt_ids=self.prompt.ids,
            kinds=self.prompt.kinds if instead.kinds else b"",
            spans=self.prompt.tool_results if instead.kinds else (),
            superseded=self.prompt.superseded,
            clearing=Clearing(
                runs=self.runs, instead=instead, history=self.history, on_instead=fell_back
            ),
        )


class FedResults:
    """The texts of results of tools that one engine was fed. Safe to use from many threads."""

    def __init__(self, *, n_most_chars: int = MOST_CHARS) -> None:
        self._n_most_chars = n_most_chars
        self._n_chars = 0
        self._texts: OrderedDict[Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, scope: str, messages: Sequence[BaseMessage]) -> None:
        """Remember the results that these messages hold whole."""
        with self._lock:
            for message in messages:
                if isinstance(message, ToolMessage) and not is_cleared(message):
                    key = _key(scope, message)
                    self._drop(key)
                    self._texts[key] = message.content
                    self._n_chars += _n_chars(message.content)
            while self._n_chars > self._n_most_chars and self._texts:
                self._drop(next(iter(self._texts)))

    def forget(self, keys: Sequence[Key]) -> None:
        """Have these results replaced in the text from now on."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def reusing(
        self,
        scope: str,
        messages: Sequence[BaseMessage],
        assemble: Callable[[Sequence[BaseMessage]], Prompt],
        *,
        n_most_tokens: int,
    ) -> Reusing | None:
        """The prompt in which cleared results are still whole.

        A result of which the text is not known stays replaced.

        Args:
            scope: Of the call.
            messages: The conversation, edited.
            assemble: Makes a prompt that tells kinds.
            n_most_tokens: That the prompt may have.

        Returns:
            `None` if no result is cleared that may be reused.
        """
        whole, keys = self._whole(scope, messages)
        if not keys:
            is_any = any(map(_may_reuse, messages))
            return Reusing(why_not=NOT_KNOWN) if is_any else None
        prompt = assemble(whole)
        runs = _runs(prompt, {key[2] for key in keys})
        if not runs or len(prompt.ids) > n_most_tokens:
            self.forget(keys)
            return Reusing(why_not=NO_ROOM if runs else NOT_FOUND)
        return Reusing(
            prompt=prompt,
            runs=runs,
            history=frozenset(_replies(messages)),
            forget=lambda: self.forget(keys),
        )

    def _whole(
        self, scope: str, messages: Sequence[BaseMessage]
    ) -> tuple[list[BaseMessage], list[Key]]:
        found: list[BaseMessage] = []
        keys: list[Key] = []
        with self._lock:
            for message in messages:
                if _may_reuse(message) and (key := _key(scope, message)) in self._texts:
                    self._texts.move_to_end(key)
                    message = message.model_copy(update={"content": self._texts[key]})
                    keys.append(key)
                found.append(message)
        return found, keys

    def _drop(self, key: Key) -> None:
        self._n_chars -= _n_chars(self._texts.pop(key, ""))


def n_most_prompt_tokens(context_length: int, max_tokens: int | None, n_instead_tokens: int) -> int:
    """Tokens that a prompt with whole results may have.

    It must leave an answer the room it would have with the results replaced, as far as it asks.

    Args:
        context_length: Tokens that the model can hold.
        max_tokens: Of the answer.
        n_instead_tokens: Of the prompt with the results replaced.
    """
    room = max(1, context_length - n_instead_tokens)
    return context_length - min(LEAST_ROOM if max_tokens is None else max_tokens, room)


def _may_reuse(message: BaseMessage) -> bool:
    ours = message.response_metadata.get("sidequest")
    is_text_only = isinstance(ours, Mapping) and ours.get("on_edit") == "recompute"
    return is_cleared(message) and not is_text_only


def _key(scope: str, message: BaseMessage) -> Key:
    return scope, message.id, str(getattr(message, "tool_call_id", ""))


def _n_chars(content: Any) -> int:
    return len(content) if isinstance(content, str) else len(str(content))


def _replies(messages: Sequence[BaseMessage]) -> tuple[str, ...]:
    found = (reply_id(message) for message in messages if isinstance(message, AIMessage))
    return tuple(call_id for call_id in found if call_id)


def _runs(prompt: Prompt, tool_call_ids: set[str]) -> tuple[ToolResultSpan, ...]:
    """The tokens of these results, and nothing else: no delimiter, and no text marked by the user.

    The last token of a prompt is fed again for its logits, so it stays.
    """
    runs: list[ToolResultSpan] = []
    for span in prompt.tool_results:
        if span.tool_call_id not in tool_call_ids:
            continue
        last = min(span.last, len(prompt.ids) - 1)
        is_result = [k == TokenKind.TOOL_RESULT for k in prompt.kinds[span.first : last]]
        first: int | None = None
        for at, is_in in enumerate([*is_result, False], span.first):
            if is_in and first is None:
                first = at
            elif not is_in and first is not None:
                runs.append(replace(span, first=first, last=at))
                first = None
    return tuple(runs)
