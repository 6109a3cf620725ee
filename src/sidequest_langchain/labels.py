"""Whose tokens these are: the step of a graph that a path belongs to.

Plain facts without torch; it must not know where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabel:
    """The graph step that made one model call, and the call itself.

    Every field but `call_id` may be absent: a call outside of a graph is *unattributed*,
    and is told apart by its `call_id` alone.
    """

    call_id: str
    """One model call (one sample of it). It is also the id of the message returned."""
    thread_id: str | None = None
    """LangGraph's `configurable.thread_id`."""
    checkpoint_ns: str | None = None
    """`langgraph_checkpoint_ns`: unique per visit of a node; its tail is `node:task_id`."""
    node: str | None = None
    """Name of the graph node."""
    step: int | None = None
    """LangGraph's superstep."""
    branch: str | None = None
    """The branch id the application gave with `branch(...)`."""
    parent_branch: str | None = None
    """The branch that `branch` continues, if the application said so."""

    @property
    def task_id(self) -> str | None:
        """Tail of the namespace after `node:`; LangGraph's task id."""
        if self.checkpoint_ns is None:
            return None
        return self.checkpoint_ns.rsplit("|", 1)[-1].rsplit(":", 1)[-1]

    @property
    def path_id(self) -> str:
        """The name a user releases this path by: branch, else task, else call."""
        return self.branch or self.task_id or self.call_id

    def answers_to(self, path_id: str) -> bool:
        """Whether `path_id` names this label: a branch, a task, a namespace or a call.

        A namespace also names everything nested below it; `plan` never names `planner`,
        since namespaces are compared part by part.
        """
        if path_id in (self.branch, self.task_id, self.call_id):
            return True
        return self.is_under(path_id)

    def is_under(self, checkpoint_ns: str) -> bool:
        """Whether this step ran in `checkpoint_ns` or in a subgraph below it."""
        if self.checkpoint_ns is None:
            return False
        mine, theirs = self.checkpoint_ns.split("|"), checkpoint_ns.split("|")
        return mine[: len(theirs)] == theirs

    def is_under_any(self, namespaces: frozenset[str]) -> bool:
        """Whether this step ran in one of `namespaces` or in a subgraph below one."""
        if self.checkpoint_ns is None:
            return False
        parts = self.checkpoint_ns.split("|")
        return any("|".join(parts[: n + 1]) in namespaces for n in range(len(parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSelector:
    """Which labelled paths an act is about; every field that is given must match."""

    path_id: str | None = None
    """See `StepLabel.answers_to`."""
    thread_id: str | None = None
    checkpoint_ns: str | None = None
    """Matches the namespace itself and everything nested below it."""
    under_ns: frozenset[str] | None = None
    """Matches any of these namespaces and everything nested below them."""
    at_ns: str | None = None
    """Matches this namespace only, nothing that is nested below it."""
    n_serial_from: int | None = None
    """Only paths begun since the counter stood here (see `KVSegments.serial`)."""
    n_serial_below: int | None = None
    """Only paths begun before the counter stood here (see `KVSegments.serial`)."""

    def selects(self, label: StepLabel, serial: int) -> bool:
        """Whether a path with this label and serial number is meant."""
        if self.path_id is not None and not label.answers_to(self.path_id):
            return False
        if self.thread_id is not None and label.thread_id != self.thread_id:
            return False
        if self.checkpoint_ns is not None and not label.is_under(self.checkpoint_ns):
            return False
        if self.under_ns is not None and not label.is_under_any(self.under_ns):
            return False
        if self.at_ns is not None and label.checkpoint_ns != self.at_ns:
            return False
        if self.n_serial_from is not None and serial < self.n_serial_from:
            return False
        return self.n_serial_below is None or serial < self.n_serial_below
