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

    Events of one attempt at one visit of a node come in order: `step_start`, `prune` for each
    prune that takes effect, `step_end`, and a `release` for each path once the engine has freed
    it. Steps that run at the same time mix; `n_event` counts all events of one root run from 0,
    without gaps.
    """

    name: EventName
    data: dict[str, Any] = field(default_factory=dict)
    """JSON-ready. Always `run_id` (the root run) and `n_event`; of a step, `thread_id`,
    `checkpoint_ns`, `task_id`, `node`, `step`, `attempt`; and

    * `step_end`: `outcome`, the `branches` opened, what our models' calls cost (`n_calls`,
      `n_reused_tokens`, `n_prefilled_tokens`, `n_generated_tokens`, `segments`), and
      `n_prunes_dropped`, prunes that came to nothing because the step did not end well;
    * `prune`: `paths` as asked, `descendants` that go with them, `reason`, `back_to`;
    * `release`: `path`, `reason`, and what it freed: `segments`, `tokens`, `bytes`, `n_paths`,
      `n_deferred` (paths still in use: they go when their last reader leaves), `exact`.
    """


Observer: TypeAlias = Callable[[KVEvent], None]
"""Called where the event happens: a graph's thread, its event loop, or the engine's thread.
Must not block."""
