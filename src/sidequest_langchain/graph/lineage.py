"""Which steps led to a checkpoint: read from the checkpoints themselves.

A checkpoint names its parent, and the writes stored with it name the tasks that ran from it; so
there is nothing to keep beside the saver, and nothing that another process could make stale. It
must not know a cache.

      C1 ──(tasks of C1)──> C2 ──(tasks of C2)──> C3      "loop": the tasks' writes made the child
       └──────────────────> F                             "fork", "update", "input": they did not
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import CheckpointTuple

from sidequest_langchain.labels import StepLabel

MAX_DEPTH = 4
"""How deep messages are looked for in the values of a checkpoint."""

Key = tuple[str, str]
"""A checkpoint of a thread: its namespace and its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One checkpoint, as far as lineage goes."""

    key: Key
    parent: Key | None
    tasks: frozenset[str]
    """Tasks that ran from it, and wrote."""
    is_made_by_tasks: bool
    """Whether the writes of its parent's tasks made it."""
    messages: frozenset[str]
    """Ids of the messages in it: a reply's is that of the call that made it."""

    @property
    def is_outermost(self) -> bool:
        """Whether it is no subgraph's own, which belongs to the task that the subgraph ran in."""
        return ":" not in self.key[0]


class Lineage:
    """The checkpoints of one thread."""

    def __init__(self, tuples: Iterable[CheckpointTuple]) -> None:
        """Read the checkpoints of a thread, in any order; nothing of them is kept alive."""
        points = [_point(found) for found in tuples]
        self._points = {point.key: point for point in points}
        self._spent = {point.parent for point in points if point.is_made_by_tasks}
        """Checkpoints whose tasks made another one."""
        outermost = [point.tasks for point in points if point.is_outermost]
        self._tasks: frozenset[str] = frozenset().union(*outermost)

    @property
    def keys(self) -> frozenset[Key]:
        """All checkpoints."""
        return frozenset(self._points)

    def paths_at(self, key: Key, labels: Sequence[StepLabel]) -> list[StepLabel]:
        """Those of `labels` that led to a checkpoint, or wait in it for a resume."""
        point = self._points.get(key)
        if point is None:
            return []
        tasks: frozenset[str] = frozenset().union(*self._steps_at(point))
        return [lb for lb in labels if lb.call_id in point.messages or tasks & _tasks_of(lb).keys()]

    def wanted(self, living: Iterable[Key], labels: Sequence[StepLabel]) -> set[str]:
        """The calls whose paths a run from one of the `living` checkpoints would go on from.

        On the way to each that is the last visit of every node, since a node's next prompt
        continues its last one. Where a step was not saved (`durability="exit"`), it is the calls
        whose messages the checkpoint holds.
        """
        places: dict[str, list[tuple[str, str]]] = {}
        for label in labels:
            for task, node in _tasks_of(label).items():
                places.setdefault(task, []).append((node, label.call_id))
        unplaced = self.unplaced(labels)
        wanted: set[str] = set()
        for point in (self._points[key] for key in living if key in self._points):
            wanted |= unplaced & point.messages
            if point.is_outermost:
                wanted |= self._last_visits(point, places)
        return wanted

    def unplaced(self, labels: Sequence[StepLabel]) -> set[str]:
        """The calls of steps that no checkpoint knows: under way, or not saved."""
        return {lb.call_id for lb in labels if not self._tasks & _tasks_of(lb).keys()}

    # -- inside --------------------------------------------------------------------------

    def _steps_at(self, point: Point) -> Iterator[frozenset[str]]:
        """The tasks of each step up to a checkpoint, the latest first; those begun from it too."""
        if point.key not in self._spent:
            yield point.tasks
        seen: set[Key] = set()
        at: Point | None = point
        while at is not None and at.parent is not None and at.key not in seen:
            seen.add(at.key)
            parent = self._points.get(at.parent)
            if parent is not None and at.is_made_by_tasks:
                yield parent.tasks
            at = parent

    def _last_visits(
        self, point: Point, places: Mapping[str, Sequence[tuple[str, str]]]
    ) -> set[str]:
        """The calls of each node's last visit on the way to a checkpoint."""
        wanted: set[str] = set()
        nodes: set[str] = set()
        for tasks in self._steps_at(point):
            visits = [visit for task in tasks for visit in places.get(task, ())]
            wanted |= {call_id for node, call_id in visits if node not in nodes}
            nodes |= {node for node, _ in visits}
        return wanted


def _point(found: CheckpointTuple) -> Point:
    place = found.config["configurable"]
    namespace = place.get("checkpoint_ns", "")
    above = (found.parent_config or {}).get("configurable", {})
    parent = above.get("checkpoint_id")
    return Point(
        key=(namespace, found.checkpoint["id"]),
        parent=None if parent is None else (above.get("checkpoint_ns", namespace), parent),
        tasks=frozenset(task for task, _, _ in found.pending_writes or ()),
        is_made_by_tasks=found.metadata.get("source", "loop") == "loop",
        messages=frozenset(_message_ids(found.checkpoint["channel_values"], MAX_DEPTH)),
    )


def _tasks_of(label: StepLabel) -> dict[str, str]:
    """The tasks that a call was made in, outermost first, with the nodes they visit."""
    found: dict[str, str] = {}
    for part in (label.checkpoint_ns or "").split("|"):
        node, colon, task = part.rpartition(":")
        if colon:
            found[task] = node
    return found


def _message_ids(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, BaseMessage):
        if value.id:
            yield value.id
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _message_ids(part, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _message_ids(part, depth - 1)
