"""The part every contestant plays: load once, then answer the calls of a step.

It must import nothing but the standard library: see `work`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .work import Answer, Asked, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The model that all contestants run, on this machine."""

    name: str
    """As it was asked for."""
    folder: str
    """A directory that transformers can load."""
    gguf: str | None
    """The `.gguf` file it was made from; `None`: not kept."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a contestant held and computed in one round."""

    kv_bytes: int | None
    """Most bytes of keys and values at once."""
    kv_how: str | None
    """`"measured"`, or how it was computed."""
    n_prefilled_tokens: int | None
    """Tokens of prompts that had to be computed; `None`: not to be known."""
    facts: dict[str, Any]
    """Anything else."""


class Contestant(ABC):
    """One way of serving a model."""

    weights: str = ""
    """In which form the weights are kept."""
    row_bytes: int = 0
    """Bytes of keys and values of one token."""

    def __init__(self, source: Source, n_threads: int) -> None:
        self.source = source
        self.n_threads = n_threads

    def prepare(self, work: Work) -> None:
        """Make ready for a workload; not timed."""

    def forget(self) -> None:
        """Be as new before a round, but for the weights; not timed."""

    @abstractmethod
    def answer(self, calls: Sequence[Asked], *, is_streamed: bool) -> list[Answer]:
        """Answer the calls of one step, as this contestant's documentation would have it."""

    def release(self, branches: Sequence[str]) -> None:
        """Give branches up; whoever knows no branches does nothing."""

    @abstractmethod
    def held(self) -> Held:
        """What was held and computed since `forget`; not timed."""

    def close_round(self) -> None:
        """End what would run on in the background, while others are measured; not timed."""

    def close(self) -> None:
        """Let go of everything."""
