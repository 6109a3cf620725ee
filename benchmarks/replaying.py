"""A planner's recorded calls, given again to any chat model; it must not know which one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

_ROLES: dict[str, Callable[..., BaseMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AIMessage,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call: what was asked, and what the recording model answered."""

    n_round: int
    """Superstep: calls of one round did not depend on each other."""
    messages: tuple[BaseMessage, ...]
    max_tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one way of serving the calls took."""

    wall_s: float
    texts: tuple[str, ...]


def read_calls(path: Path) -> list[Call]:
    """The calls of the first run in a record that `sidequest demo --record FILE` wrote."""
    run = json.loads(path.read_text(encoding="utf-8"))["runs"][0]
    seen: set[int] = set()
    calls = []
    for call in sorted(run["calls"], key=lambda one: (one["n_round"], one["n_call"])):
        if call["n_call"] in seen:  # further samples of a call whose first one is here
            continue
        seen.add(call["n_call"])
        calls.append(
            Call(
                n_round=call["n_round"],
                messages=tuple(_message(m) for m in call["messages"]),
                max_tokens=call["settings"].get("max_tokens", 16),
                text=call["reply"]["text"],
            )
        )
    return calls


def _message(message: dict[str, Any]) -> BaseMessage:
    return _ROLES[message["role"]](message["content"])


def replay(calls: Sequence[Call], ask: Callable[[Sequence[Call]], list[str]]) -> Replay:
    """Give the calls again, round by round.

    Args:
        calls: In the order of their rounds.
        ask: Answers the calls of one round; how is up to it.
    """
    texts: list[str] = []
    begun = time.perf_counter()
    for _, group in groupby(calls, key=lambda call: call.n_round):
        texts += ask(list(group))
    return Replay(wall_s=time.perf_counter() - begun, texts=tuple(texts))
