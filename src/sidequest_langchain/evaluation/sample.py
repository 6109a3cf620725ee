"""What a task asks: a conversation with questions whose right answers are known.

It must not know which cache answers, nor how a conversation is held.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from langchain_core.messages import BaseMessage

Scorer: TypeAlias = Callable[[str], float]
"""From an answer's text to a score from 0 to 1."""
Count: TypeAlias = Callable[[str], int]
"""Tokens of a text."""
Maker: TypeAlias = Callable[[random.Random, int, Count], "Sample"]
"""Makes a sample from a source of chance and the tokens its context shall have, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call of the model: what is said before it, and what its answer is worth."""

    messages: tuple[BaseMessage, ...]
    """Follow on the answer before; the last one opens the model's turn."""
    max_tokens: int
    score: Scorer | None = None
    """`None`: the answer is not scored; the call lets turns pass."""
    expected: str = ""
    """The right answer, for readers of the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation. The model's own answers stand in it, as they would for an agent."""

    asks: tuple[Ask, ...]

    @property
    def n_scored(self) -> int:
        """Answers that are scored."""
        return sum(ask.score is not None for ask in self.asks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of sample."""

    name: str
    about: str
    """What it asks, for readers of the figures."""
    make: Maker = lambda chance, n_tokens, count: Sample(asks=())
    """Nothing to say, for a task that runs an application."""
    is_agent: bool = False
    """Whether its context is an agent's: tool calls and their results."""
    is_forced: bool = False
    """Whether the full cache's own answers are forced upon the managed one and its logits are
    compared, instead of scoring texts."""


def sample_of(task: Task, *, seed: int, number: int, n_tokens: int, count: Count) -> Sample:
    """Sample `number` of a task; the same arguments give the same sample, on any machine."""
    # Seeding with a string does not depend on the process, as `hash` would.
    chance = random.Random(f"{task.name} {seed} {number}")
    return task.make(chance, n_tokens, count)


def filled(lines: Iterable[str], n_tokens: int, count: Count) -> list[str]:
    """The first of `lines` that have about `n_tokens` together; one at least."""
    found: list[str] = []
    n = 0
    for line in lines:
        found.append(line)
        n += count(line + "\n")
        if n >= n_tokens:
            break
    return found


def spread(needles: Sequence[str], lines: Sequence[str], chance: random.Random) -> list[str]:
    """`lines` with the needles among them, in order, one in each of as many equal stretches."""
    found = list(lines)
    length = len(lines) / max(1, len(needles))
    for i in reversed(range(len(needles))):
        at = int(length * (i + 0.1 + 0.8 * chance.random()))
        found.insert(at, needles[i])
    return found
