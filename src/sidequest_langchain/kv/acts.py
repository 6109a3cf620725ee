"""What may be done to the rows of a closed segment: evict, hide. Its tokens and positions stay.

Every act is all or nothing: what it needs is made before anything is let go. It must not know why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from sidequest_langchain.kv import by_head, chain
from sidequest_langchain.kv.radix import RadixTree
from sidequest_langchain.kv.residency import Residency, rows_at
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage


class ActingTree(RadixTree):
    """A radix tree whose closed segments can lose rows."""

    def evict(self, segment: Segment, offsets: Iterable[int]) -> int:
        """Drop the rows of some tokens; lossy. Later queries do not see them.

        Equal to a mask over those rows at their true positions. Rows that are away are passed
        over; copies in the archive stay.

        Args:
            segment: Closed, and pinned by nobody.
            offsets: Which of its tokens, in any order.

        Returns:
            Bytes freed.

        Raises:
            ValueError: The segment is open, pinned or keeps rows by head, or has no such offset.
        """
        gone = self._checked(segment, offsets)
        managed = self._residency_of(segment)
        packed = tuple(
            left
            for block in managed.packed
            if (left := block.without(rows_at(block.offsets, gone))) is not None
        )
        kept = tuple(at for at in managed.dense if at not in gone)
        return self._replace(segment, replace(managed, kept=kept, packed=packed))

    def evict_by_head(self, segment: Segment, keep: Tensor) -> int:
        """Let every KV head of every layer keep rows of its own; lossy.

        Args:
            segment: Closed, pinned by nobody, and nothing of it packed.
            keep: Ascending offsets of what stays, long `[L, H, n]`, on the CPU.

        Returns:
            Bytes freed.

        Raises:
            ValueError: The segment is open, pinned or has packed rows; a row is not resident, or
                layers differ in heads.
        """
        self._refuse_unless_closed(segment)
        if segment.packed:
            msg = f"segment {segment.segment_id} has packed rows: they cannot be kept by head"
            raise ValueError(msg)
        by_head.check_keep(segment, keep, self.layout)
        rows = by_head.rows_of_offsets(segment, keep)
        storage = segment.storage.gathered_by_head(rows)
        managed = self._residency_of(segment)
        return self._install(
            segment, replace(managed, kept=None, kept_by_head=keep.clone()), storage
        )

    def hide(self, segment: Segment, offsets: Iterable[int]) -> None:
        """Let attention pass over the rows of some tokens, which stay; lossy until `unhide`.

        Raises:
            ValueError: The segment is open or pinned, or has no such offset.
        """
        self._refuse_unless_closed(segment)
        hidden = _known(segment, offsets)
        managed = self._residency_of(segment)
        segment.residency = replace(managed, hidden=managed.hidden | hidden).or_none()
        self.n_changes += 1

    def unhide(self, segment: Segment) -> None:
        """Let attention see all rows again that are resident."""
        if segment.residency is not None:
            segment.residency = replace(segment.residency, hidden=frozenset()).or_none()
            self.n_changes += 1

    # -- inside --------------------------------------------------------------------------

    @staticmethod
    def _residency_of(segment: Segment) -> Residency:
        return segment.residency or Residency(n_tokens=segment.n_tokens)

    def _known_closed(self, segment: Segment, offsets: Iterable[int] | None) -> frozenset[int]:
        """The offsets, all of them by default, of a closed segment, pinned or not."""
        self._refuse_unless_closed(segment, may_be_pinned=True)
        return _known(segment, range(segment.n_tokens) if offsets is None else offsets)

    def _checked(
        self, segment: Segment, offsets: Iterable[int], *, may_be_pinned: bool = False
    ) -> frozenset[int]:
        """The offsets, if they may be acted on."""
        self._refuse_unless_closed(segment, may_be_pinned=may_be_pinned)
        if segment.kept_by_head is not None:
            msg = (
                f"the heads of segment {segment.segment_id} keep rows of their own: what they "
                "have in common cannot be evicted, compressed or archived"
            )
            raise ValueError(msg)
        return _known(segment, offsets)

    def _refuse_unless_closed(self, segment: Segment, *, may_be_pinned: bool = False) -> None:
        name = f"segment {segment.segment_id}"
        if segment.is_open or segment.parent is None:
            msg = f"{name} is open or not of this tree; seal it before its rows are managed"
            raise ValueError(msg)
        if not may_be_pinned and _is_pinned(segment):
            msg = f"{name} is pinned, itself or by what stands on it; unpin it first"
            raise ValueError(msg)

    def _replace(self, segment: Segment, residency: Residency, n_copied: int = 0) -> int:
        """Give a segment the residency; dense rows that it no longer names go.

        Args:
            segment: Which.
            residency: Of its dense rows, some of those that are there.
            n_copied: Bytes of copies that are there for the moment.

        Returns:
            Bytes freed.
        """
        managed = self._residency_of(segment)
        kept = residency.dense
        if len(kept) == managed.n_dense:
            return self._install(segment, residency, None, n_copied)
        wanted = set(kept)
        first, _ = segment.place
        rows = [first + row for row in rows_at(managed.dense, wanted)]
        may_stay = rows and not (residency.packed and segment.fellows)
        if may_stay and segment.storage.changes_by_layer:
            return self._install(segment, residency, None, n_copied, rows=rows)
        return self._install(segment, residency, segment.storage.gathered(rows), n_copied)

    def _install(
        self,
        segment: Segment,
        residency: Residency,
        storage: Storage | None,
        n_copied: int = 0,
        *,
        rows: Sequence[int] | None = None,
    ) -> int:
        """Put in what was made for a segment. Returns the bytes freed.

        Args:
            segment: Whose it is.
            residency: All of it.
            storage: The dense rows; `None` leaves them where they are.
            n_copied: Bytes of copies that are there for the moment.
            rows: Of the storage, those of the segment that stay, if some do not.
        """
        if storage is None and rows is None and residency.packed and segment.fellows:
            storage = segment.storage.copy(*segment.place)  # who has packed rows lies alone
        fellows = list(segment.fellows) or [segment]
        n_bytes, n_rows = sum(s.n_bytes for s in fellows), segment.n_resident
        old = {id(block) for block in segment.packed}
        n_copied += sum(block.n_bytes for block in residency.packed if id(block) not in old)
        if storage is not None:
            n_copied += storage.n_bytes + chain.leave(segment, storage, residency.or_none())
        elif rows is not None:
            n_copied += chain.thin(segment, rows, residency.or_none())
        else:
            segment.residency = residency.or_none()
        freed = n_bytes - sum(s.n_bytes for s in fellows)
        self.n_tokens += segment.n_resident - n_rows
        self._account(-freed, n_copied)
        self.n_changes += 1
        return freed


def _known(segment: Segment, offsets: Iterable[int]) -> frozenset[int]:
    """The offsets as a set.

    Raises:
        ValueError: The segment has no such token.
    """
    found = frozenset(offsets)
    strange = [at for at in found if not 0 <= at < segment.n_tokens]
    if strange:
        msg = (
            f"segment {segment.segment_id} has offsets 0 to {segment.n_tokens - 1}, found "
            f"{min(strange)}"
        )
        raise ValueError(msg)
    return found


def _is_pinned(segment: Segment) -> bool:
    stack = [segment]
    while stack:
        at = stack.pop()
        if at.n_pins:
            return True
        stack.extend(at.children)
    return False
