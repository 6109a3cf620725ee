"""Settings of the cache: one frozen object, checked when it is made.

It must not know torch, a model or a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidequest_langchain.errors import ConfigError

Isolation = Literal["thread", "tenant", "shared"]
Retain = Literal["run", "thread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What may stay resident, for how long, and who may share it. All of it is exact.

    Raises:
        ConfigError: A value is out of range.
    """

    budget_tokens: int | None = None
    """Rows that may stay resident; `None` is no limit in tokens."""
    budget_bytes: int | None = None
    """Bytes that may stay resident, counted at the storage; `None` is no limit in bytes.
    Above a budget the least recently used segments are released, never one that a running
    generation reads: the running requests themselves may exceed it."""
    retain: Retain | None = None
    """`"run"` releases a graph run's segments when it ends (unless it was interrupted),
    `"thread"` keeps them until they are released; `None` is `"thread"` where the run has a
    `thread_id`, and `"run"` where it has none."""
    isolation: Isolation = "thread"
    """Who may reuse whose prefix: calls of the same `thread_id`; of the same `tenant`
    (`configurable={"sidequest_tenant": ...}`); or everyone (`"shared"`)."""
    prefill_chunk: int | None = None
    """Tokens of one prompt fed per engine step; `None` chooses by device."""
    prompt_lookup: int | None = None
    """Most tokens of an answer guessed ahead in a step, from where its last words occurred
    before. Exact: the model checks every guess in the same pass. 0 never guesses; `None` guesses
    where a pass over a few tokens costs about as much as one over one: with int8 weights on a
    CPU, and on accelerators."""
    max_running: int = 64
    """Requests that may decode at the same time; others wait in order."""

    def __post_init__(self) -> None:
        names = ("budget_tokens", "budget_bytes", "prefill_chunk", "prompt_lookup", "max_running")
        for name in names:
            value = getattr(self, name)
            if value is None and name != "max_running":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                msg = f"{name} must be a whole number, found {value!r}"
                raise ConfigError(msg)
            least = 0 if name == "prompt_lookup" else 1
            if value < least:
                msg = f"{name} must be at least {least}, found {value}"
                raise ConfigError(msg)
        if self.isolation not in ("thread", "tenant", "shared"):
            msg = f"isolation is 'thread', 'tenant' or 'shared', found {self.isolation!r}"
            raise ConfigError(msg)
        if self.retain not in (None, "run", "thread"):
            msg = f"retain is 'run', 'thread' or None, found {self.retain!r}"
            raise ConfigError(msg)
