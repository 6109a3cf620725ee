"""Calls of the chat model, each one noted; it knows no trip.

Any LangChain chat model serves. What was reused and prefilled is read from `usage_metadata`,
the standard place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig

CallKind = Literal["read", "calibrate", "propose", "evaluate", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One sample of one model call."""

    n_call: int
    """Number of the call; samples of one call share it."""
    n_round: int
    """Superstep of the graph: calls of one round may run at the same time."""
    kind: CallKind
    thought: str
    parent: str | None
    messages: tuple[BaseMessage, ...] = field(repr=False)
    reply: AIMessage = field(repr=False)
    settings: dict[str, Any]
    """What the call set: `max_tokens`, `temperature`, `seed` ..."""
    n_prompt_tokens: int
    n_reused_tokens: int
    n_generated_tokens: int
    wall_s: float
    """Of the whole call."""

    @property
    def n_prefilled_tokens(self) -> int:
        """Tokens of the prompt that had to be computed."""
        return self.n_prompt_tokens - self.n_reused_tokens

    @property
    def is_cut(self) -> bool:
        """Whether the reply ended because it was long enough, not because it was finished."""
        return self.reply.response_metadata.get("finish_reason") == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked on behalf of a thought."""

    kind: CallKind
    thought: str
    parent: str | None
    prompts: Sequence[Sequence[BaseMessage]]
    """Asked at the same time."""
    settings: dict[str, Any]
    n_samples: int = 1


class Asker:
    """Asks one chat model and keeps the record. Nodes of a graph may use it at the same time."""

    def __init__(
        self, model: BaseChatModel, on_call: Callable[[CallRecord], None] = lambda _: None
    ) -> None:
        self.model = model
        self._on_call = on_call
        self._records: list[CallRecord] = []
        self._n_calls = 0
        self._lock = threading.Lock()

    @property
    def n_calls(self) -> int:
        """Calls made so far; one with several samples counts once."""
        return self._n_calls

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """Every sample of every call, in the order in which they ended."""
        return tuple(self._records)

    def ask(
        self, question: Question, config: RunnableConfig | None = None
    ) -> list[list[AIMessage]]:
        """The replies: for each prompt, its samples."""
        began_s = time.perf_counter()
        settings = dict(question.settings)
        if question.n_samples > 1:
            settings["n"] = question.n_samples
        result = self.model.generate(
            [list(prompt) for prompt in question.prompts],
            callbacks=(config or {}).get("callbacks"),
            **settings,
        )
        wall_s = time.perf_counter() - began_s
        replies = [[_reply(one) for one in samples] for samples in result.generations]
        n_round = int(((config or {}).get("metadata") or {}).get("langgraph_step", 0))
        for prompt, samples in zip(question.prompts, replies, strict=True):
            self._note(question, tuple(prompt), samples, n_round=n_round, wall_s=wall_s)
        return replies

    def _note(
        self,
        question: Question,
        prompt: tuple[BaseMessage, ...],
        samples: list[AIMessage],
        *,
        n_round: int,
        wall_s: float,
    ) -> None:
        with self._lock:
            n_call, self._n_calls = self._n_calls, self._n_calls + 1
        for reply in samples:
            usage: Mapping[str, Any] = reply.usage_metadata or {}
            record = CallRecord(
                n_call=n_call,
                n_round=n_round,
                kind=question.kind,
                thought=question.thought,
                parent=question.parent,
                messages=prompt,
                reply=reply,
                settings=question.settings,
                n_prompt_tokens=usage.get("input_tokens", 0),
                n_reused_tokens=(usage.get("input_token_details") or {}).get("cache_read", 0),
                n_generated_tokens=usage.get("output_tokens", 0),
                wall_s=wall_s,
            )
            with self._lock:
                self._records.append(record)
            self._on_call(record)


def _reply(generation: object) -> AIMessage:
    message = getattr(generation, "message", None)
    if not isinstance(message, AIMessage):
        msg = f"a chat model must reply with an AIMessage, found {type(message).__name__}"
        raise TypeError(msg)
    return message
