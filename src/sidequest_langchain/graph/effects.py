"""What is to be done about something that happened in a run, before it is done.

It must not do it: the lifecycle does, outside of its lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from sidequest_langchain.graph.events import EventName, KVEvent
from sidequest_langchain.graph.runs import (
    Listener,
    PrunePlan,
    Root,
    Serials,
    Step,
    heard,
)
from sidequest_langchain.labels import PathSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Tell an event to listeners; it waits on the bus of the run already."""

    event: KVEvent
    audience: tuple[Listener, ...]
    root: Root


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Ask the cache for a release, and report what it freed."""

    selector: PathSelector
    reason: str
    name: str
    """What the receipt calls it."""
    audience: tuple[Listener, ...]
    root: Root
    step: Step | None = None
    since: Serials | None = None
    """Only paths begun since the caches' counters stood here."""
    before: Serials | None = None
    """Only paths begun before the caches' counters stood here."""
    is_asked_for: bool = False
    """The application asked: reported even if there was nothing to release."""


Effect: TypeAlias = Emit | Post


def emit(
    root: Root,
    step: Step | None,
    name: EventName,
    data: dict[str, Any],
    audience: tuple[Listener, ...] | None = None,
) -> Emit:
    """An event of a step (or of its whole run), numbered where it happened."""
    who: dict[str, Any] = {"run_id": str(root.run_id), "n_event": root.n_events}
    root.n_events += 1
    if step is not None:
        ref = step.ref
        who |= {
            "thread_id": ref.thread_id,
            "checkpoint_ns": ref.checkpoint_ns,
            "task_id": ref.task_id,
            "node": ref.node,
            "step": ref.step,
            "attempt": ref.attempt,
        }
    event = KVEvent(name=name, data=who | data)
    # Queued where it is numbered, so that the bus keeps the order of the numbers.
    root.bus.put(event, root.origin if step is None else step.origin)
    if audience is None:
        audience = heard(root.audience if step is None else step.audience)
    return Emit(event=event, audience=audience, root=root)


def carry_out(plan: PrunePlan, root: Root, step: Step | None) -> list[Effect]:
    """The event and the releases of a prune that takes effect now."""
    thread_id = plan.thread_id
    # Without a thread, only this run's own steps can be meant by the name of a branch.
    places = frozenset(root.namespaces.get(None, ())) if thread_id is None else None
    event = emit(root, step, "sidequest.prune", plan.to_json())
    effects: list[Effect] = [event]
    for path in plan.targets:
        selector = PathSelector(path_id=path, thread_id=thread_id, under_ns=places)
        effects.append(
            Post(
                selector=selector,
                reason=plan.reason,
                name=path,
                audience=event.audience,
                root=root,
                step=step,
                is_asked_for=True,
            )
        )
    return effects
