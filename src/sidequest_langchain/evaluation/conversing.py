"""A sample held as a conversation with a chat model: answers, scores, and what the cache held.

It must not know policies or budgets: the model comes with its cache.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from torch import Tensor

from sidequest_langchain.chat.model import SideQuestChatModel
from sidequest_langchain.evaluation.forcing import Divergence, Recording, divergence
from sidequest_langchain.evaluation.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one sample."""

    scores: tuple[float, ...] = ()
    """One for each scored answer, from 0 to 1."""
    answers: tuple[str, ...] = ()
    n_tokens: int = 0
    """Tokens of the last call, prompt and answer."""
    n_rows: int = 0
    """Rows resident at the end."""
    n_bytes: int = 0
    """Their bytes, at the storages."""
    peak_bytes: int = 0
    seconds: float = 0.0
    divergence: Divergence | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the full cache answered: every answer's tokens, and the log-probabilities at them."""

    outcome: Outcome
    answers: tuple[tuple[int, ...], ...]
    """Of each call, the end-of-turn token included."""
    log_probs: Tensor = field(repr=False)
    """Of all of them in a row, `[n, V]`."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens in a row."""
        return tuple(token_id for answer in self.answers for token_id in answer)


def converse(model: SideQuestChatModel, sample: Sample) -> Outcome:
    """Hold a conversation on a thread of its own; the model's own answers stand in it.

    Greedy. What it stored is released at the end.
    """
    return _held(model, sample, [None] * len(sample.asks))


def record(model: SideQuestChatModel, sample: Sample) -> Record:
    """Hold a conversation, and keep the log-probabilities at every token that was answered."""
    recordings = [Recording() for _ in sample.asks]
    outcome = _held(model, sample, recordings)
    return Record(
        outcome=outcome,
        answers=tuple(tuple(one.token_ids) for one in recordings),
        log_probs=torch.cat([one.log_probs() for one in recordings]),
    )


def replay(model: SideQuestChatModel, sample: Sample, full: Record) -> Outcome:
    """Hold the recorded conversation with another cache, its answers forced; compare logits."""
    recordings = [Recording(answer) for answer in full.answers]
    outcome = _held(model, sample, recordings)
    managed = torch.cat([one.log_probs() for one in recordings])
    found = divergence(full.log_probs, managed, full.token_ids)
    return dataclasses.replace(outcome, divergence=found)


def _held(
    model: SideQuestChatModel, sample: Sample, recordings: Sequence[Recording | None]
) -> Outcome:
    thread_id = f"eval-{uuid.uuid4().hex}"
    config: RunnableConfig = {"configurable": {"thread_id": thread_id}}
    messages: list[BaseMessage] = []
    answers, scores, n_tokens = [], [], 0
    model.kv.reset_peak()
    began_s = time.perf_counter()
    for ask, recording in zip(sample.asks, recordings, strict=True):
        messages += ask.messages
        given: dict[str, Any] = {} if recording is None else {"constraint": recording}
        reply = model.invoke(messages, config, max_tokens=ask.max_tokens, **given)
        messages.append(reply)
        answers.append(str(reply.text))
        if ask.score is not None:
            scores.append(ask.score(answers[-1]))
        n_tokens = reply.usage_metadata["total_tokens"] if reply.usage_metadata else 0
    seconds = time.perf_counter() - began_s
    usage = model.kv.usage()
    model.kv.clear(thread_id)
    return Outcome(
        scores=tuple(scores),
        answers=tuple(answers),
        n_tokens=n_tokens,
        n_rows=usage.n_tokens,
        n_bytes=usage.n_bytes,
        peak_bytes=usage.peak_resident_bytes,
        seconds=seconds,
    )
