"""What of a segment's tokens is resident, at which precision, and where copies of the rest are.

Plain facts beside the storage; whoever changes one makes a new object. It must not know the tree.

    offsets    0 1 2 3 4 5 6 7      of the segment's tokens
    kept       0 1     4            rows of the storage, full precision
    packed           3   5          rows of quantised blocks
    away           2       6 7      not resident; `archived` says of which there are copies
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sidequest_langchain.kv.archive import Ticket
from sidequest_langchain.kv.packed import PackedBlock


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Archived:
    """Copies of some rows in an archive."""

    ticket: Ticket
    offsets: tuple[int, ...]
    """Ascending, within the segment."""
    rows: tuple[int, ...]
    """Where each of them is among the rows of the archived copy."""
    bits: int | None
    """Precision of the copy; `None` is the original."""

    def only(self, offsets: Collection[int], shift: int = 0) -> Archived | None:
        """The same copy, of fewer rows; offsets count from `shift`."""
        pairs = [p for p in zip(self.offsets, self.rows, strict=True) if p[0] in offsets]
        if not pairs:
            return None
        rows = tuple(row for _, row in pairs)
        return replace(self, offsets=tuple(at - shift for at, _ in pairs), rows=rows)

    def moved(self, shift: int) -> Archived:
        """The same copy, for a segment that starts `shift` tokens earlier."""
        return replace(self, offsets=tuple(at + shift for at in self.offsets))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residency:
    """Where the rows of a managed segment's tokens are.

    Every offset is in at most one of `kept` and the packed blocks; one that is in none is away.
    """

    n_tokens: int
    kept: tuple[int, ...] | None = None
    """Ascending offsets of the storage's rows; `None` is every token."""
    packed: tuple[PackedBlock, ...] = ()
    hidden: frozenset[int] = frozenset()
    """Offsets that attention does not see, though their rows stay."""
    archived: tuple[Archived, ...] = ()
    kept_by_head: Tensor | None = None
    """Offsets of the storage's rows by layer and KV head, ascending, long `[L, H, n]`; those equal
    to `n_tokens` are padding. Then `kept` is `None` and nothing is packed."""

    @property
    def n_dense(self) -> int:
        """Rows in the storage, padding of heads included."""
        if self.kept_by_head is not None:
            return int(self.kept_by_head.shape[2])
        return self.n_tokens if self.kept is None else len(self.kept)

    @property
    def n_packed(self) -> int:
        """Rows in packed blocks."""
        return sum(block.n_rows for block in self.packed)

    @property
    def n_packed_bytes(self) -> int:
        """Bytes of the packed blocks."""
        return sum(block.n_bytes for block in self.packed)

    @property
    def n_archived(self) -> int:
        """Tokens that are away and of which there are copies; 0 where heads keep rows by head."""
        if self.kept_by_head is not None or not self.archived:
            return 0
        held = {*self.dense, *(at for block in self.packed for at in block.offsets)}
        return len({at for copy in self.archived for at in copy.offsets} - held)

    @property
    def dense(self) -> Sequence[int]:
        """Ascending offsets of the storage's rows.

        Raises:
            ValueError: Every head keeps rows of its own.
        """
        if self.kept_by_head is not None:
            msg = "each head of this segment keeps rows of its own: it has no offsets in common"
            raise ValueError(msg)
        return range(self.n_tokens) if self.kept is None else self.kept

    @property
    def is_whole(self) -> bool:
        """Whether every token has a row in the storage and is seen; copies may be elsewhere."""
        is_dense = self.kept is None and self.kept_by_head is None
        return is_dense and not (self.packed or self.hidden)

    @property
    def is_plain(self) -> bool:
        """Whether every token has a row in the storage, is seen, and has no copy elsewhere."""
        return self.is_whole and not self.archived

    def or_none(self) -> Residency | None:
        """Itself, or `None` where a segment needs none."""
        if self.kept is not None and len(self.kept) == self.n_tokens:
            return replace(self, kept=None).or_none()
        return None if self.is_plain else self

    def n_dense_before(self, offset: int) -> int:
        """Rows of the storage that belong to tokens before `offset`."""
        dense = self.dense
        return offset if self.kept is None else bisect_left(dense, offset)

    def split(self, n_head: int) -> tuple[Residency | None, Residency | None]:
        """The residency of the first `n_head` tokens, and that of the others.

        Packed blocks get storages of their own. Those of `kept_by_head` are split by
        `by_head.split`, which moves rows as well.
        """
        n_dense = self.n_dense_before(n_head) if self.kept_by_head is None else 0
        kept = (None, None) if self.kept is None else self._split_kept(n_dense, n_head)
        packed = self._split_packed(n_head)
        sides = [range(n_head), range(n_head, self.n_tokens)]
        first, second = (
            Residency(
                n_tokens=len(side),
                kept=kept[i],
                packed=packed[i],
                hidden=frozenset(at - side.start for at in self.hidden if at in side),
                archived=tuple(
                    part for a in self.archived if (part := a.only(side, side.start)) is not None
                ),
            )
            for i, side in enumerate(sides)
        )
        return first.or_none(), second.or_none()

    @classmethod
    def joined(cls, parts: Sequence[Residency]) -> Residency | None:
        """The residency of segments in a row as one; none keeps rows by head. Exact.

        Packed blocks of one kind become one, in storages of its own.
        """
        shifts = [0, *accumulate(part.n_tokens for part in parts)]
        pairs = list(zip(parts, shifts, strict=False))
        packed: dict[object, list[tuple[PackedBlock, int]]] = {}
        copies: dict[Ticket, list[Archived]] = {}
        for part, shift in pairs:
            for block in part.packed:
                packed.setdefault(block.kind, []).append((block, shift))
            for copy in part.archived:
                copies.setdefault(copy.ticket, []).append(copy.moved(shift))
        kept = None
        if any(part.kept is not None for part in parts):
            kept = tuple(at + shift for part, shift in pairs for at in part.dense)
        return cls(
            n_tokens=shifts[-1],
            kept=kept,
            packed=tuple(
                PackedBlock.joined(*zip(*found, strict=True))
                if len(found) > 1
                else found[0][0].moved(found[0][1])
                for found in packed.values()
            ),
            hidden=frozenset(at + shift for part, shift in pairs for at in part.hidden),
            archived=tuple(_one_copy(found) for found in copies.values()),
        ).or_none()

    def _split_kept(self, n_dense: int, n_head: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        kept = self.kept or ()
        return kept[:n_dense], tuple(at - n_head for at in kept[n_dense:])

    def _split_packed(self, n_head: int) -> tuple[tuple[PackedBlock, ...], tuple[PackedBlock, ...]]:
        first: list[PackedBlock] = []
        second: list[PackedBlock] = []
        for block in self.packed:
            n_rows = bisect_left(block.offsets, n_head)
            if n_rows == block.n_rows:
                first.append(block)
            elif n_rows == 0:
                second.append(block.moved(-n_head))
            else:
                head, tail = block.split(n_rows)
                first.append(head)
                second.append(tail.moved(-n_head))
        return tuple(first), tuple(second)


def _one_copy(copies: Sequence[Archived]) -> Archived:
    """What is left of one archived copy here and there, as one."""
    pairs = sorted(p for c in copies for p in zip(c.offsets, c.rows, strict=True))
    offsets, rows = zip(*pairs, strict=True)
    return replace(copies[0], offsets=offsets, rows=rows)


def rows_at(offsets: Sequence[int], wanted: Collection[int]) -> list[int]:
    """Indices of those of `offsets` that are wanted."""
    return [i for i, at in enumerate(offsets) if at in wanted]


def is_in_all_heads(kept_by_head: Tensor, offset: int) -> bool:
    """Whether every head of every layer keeps the row at an offset."""
    return bool(torch.eq(kept_by_head, offset).any(-1).all())
