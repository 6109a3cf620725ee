"""Lets running paths be read with few calls again, when they were sealed or lost rows. Exact."""

from __future__ import annotations

from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.gathering import running_tips
from sidequest_langchain.policy.limits import Limits
from sidequest_langchain.policy.monitor import Monitor


class Joiner:
    """Joins what lies in pieces on the running paths of one tree, inside its budget."""

    def __init__(
        self, tree: SegmentTree, monitor: Monitor, limits: Limits, *, block_rows: int
    ) -> None:
        self._tree, self._monitor, self._limits = tree, monitor, limits
        self._block_rows = block_rows
        self.is_due = False
        """Whether something was sealed since."""

    def join(self) -> None:
        """Make longer segments, and let them lie in one storage where the budget is in rows."""
        self.is_due = False
        copies = self._limits.copies(self._block_rows)
        self._monitor.read_masses()
        for tip in running_tips(self._tree):
            for segment in tip.path():
                self._monitor.notes_of(segment)
            self._tree.fuse(tip, copies.of_segment)
            if copies.by_layer:
                self._tree.unite(
                    tip, most_of_piece=copies.of_segment, most_of_layer=copies.by_layer
                )
