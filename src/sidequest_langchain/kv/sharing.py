"""Closing what a running path holds, and sharing rows that siblings hold already.

It must not know who releases what.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidequest_langchain.kv.keeping import KeepingTree
from sidequest_langchain.kv.segment import Path, Segment, n_common

FIT_SHARE = 8
"""A sealed segment keeps its room to grow only if it has this many rows for one of them."""


class SharingTree(KeepingTree):
    """A tree in which no two closed siblings begin with the same token."""

    def seal(self, path: Path) -> Segment | None:
        """Close what the tip of a running path holds, and go on in a fresh, empty tip below it.

        Exact. The storage moves as it is; room to grow is given back where that copies little,
        the rest at `commit`. Rows that a closed sibling has already are dropped in favour of the
        sibling's, managed or not. The tip stays the same object.

        Returns:
            The closed segment that the tip stands on now; `None` if the tip held nothing.

        Raises:
            ValueError: The path has ended.
        """
        tip = path.tip
        if not path.is_running:
            msg = f"path {path.serial} has ended: its segments are closed"
            raise ValueError(msg)
        if not tip.n_tokens or tip.parent is None:
            return None
        sealed = self._new_segment(tip.scope, tip.parent)
        tip.parent.children.remove(tip)
        tip.give_all(sealed, self.layout)
        tip.parent = sealed
        sealed.children.append(tip)
        try:
            end = self._share(sealed)
        except BaseException:  # no memory to share: the tip has its rows again
            self._unseal(tip, sealed)
            raise
        if (end.capacity - end.n_rows) * FIT_SHARE > end.n_rows:
            self._fit(end)
        self._join(end)
        return end

    def _unseal(self, tip: Segment, sealed: Segment) -> None:
        parent = sealed.parent
        assert parent is not None
        sealed.give_all(tip, self.layout)
        parent.children.remove(sealed)
        parent.children.append(tip)
        tip.parent = parent
        self.idle.forget(sealed)

    def _fit_path(self, tip: Segment) -> None:
        """Give back the room to grow of what was sealed on a path that runs no longer."""
        for segment in tip.path():
            self._fit(segment)

    def _fit(self, segment: Segment) -> None:
        """Give back the room to grow of a sealed segment, if there is memory for the copy."""
        if segment.is_open or segment.fellows or segment.capacity == segment.n_rows:
            return
        try:
            change = segment.fit()
        except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
            return
        self._account(change, segment.storage.n_bytes)

    def _share(self, segment: Segment) -> Segment:
        """Let a closed segment stand on rows that siblings hold already; its own copies go.

        No two closed siblings begin with the same token. Returns where its rows end now.
        """
        while segment.n_tokens and segment.parent is not None:
            twin, n_same = self._twin(segment, segment.parent.children)
            if twin is None:
                return segment
            head = self._cut(twin, n_same)
            self._drop_head(segment, n_same)
            self._move_under(segment, head)
        return self._retire_empty(segment)

    def _twin(self, segment: Segment, siblings: Sequence[Segment]) -> tuple[Segment | None, int]:
        """The sibling to share with: the closed one if there is one, else the longest match."""
        twin, n_most = None, 0
        first = segment.token_ids[:1]  # most of a thousand dead branches begin otherwise
        for sibling in (s for s in siblings if s is not segment and s.token_ids[:1] == first):
            n = n_common(sibling.token_ids, segment.token_ids)
            if not sibling.is_open:
                return sibling, n
            if n > n_most:
                twin, n_most = sibling, n
        return twin, n_most

    def _retire_empty(self, segment: Segment) -> Segment:
        """A closed segment without tokens is none: what stands on it stands on its parent."""
        parent = segment.parent
        if segment.n_tokens or parent is None or segment.n_pins:
            return segment
        for child in list(segment.children):
            self._move_under(child, parent)
        for path in segment.paths:
            path.tip = parent
        parent.paths |= segment.paths
        segment.paths.clear()
        self._remove(segment)
        return parent
