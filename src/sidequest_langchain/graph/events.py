"""What happened to a graph's segments, as one event: a name and JSON-ready values.

It must not know who listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

EventName = Literal[
    "sidequest.step_start", "sidequest.step_end", "sidequest.prune", "sidequest.release"
]
Outcome = Literal["ok", "error", "interrupted", "parent_command", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvent:
    """One event of a graph run.

    Events of one step come in order: `step_start`, then what was pruned, `step_end`, and a
    `release` for each path once the engine has freed it. `n_event` counts the events of one
    root run from 0, without gaps.
    """

    name: EventName
    data: dict[str, Any] = field(default_factory=dict)
    """JSON-ready: who (`run_id`, `thread_id`, `checkpoint_ns`, `task_id`, `node`, `step`,
    `attempt`, `n_event`) and what (see docs/langgraph.md)."""


Observer: TypeAlias = Callable[[KVEvent], None]
"""Called where the event happens: a graph's thread, its event loop, or the engine's thread.
Must not block."""
