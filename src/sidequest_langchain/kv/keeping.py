"""Copies of rows in an archive, and bringing them back. Exact. It must not know why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sidequest_langchain.kv import by_head
from sidequest_langchain.kv.archive_file import Contents, payload_bytes
from sidequest_langchain.kv.layer_rows import Views
from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.packing import PackingTree
from sidequest_langchain.kv.residency import Archived, Residency, is_in_all_heads, rows_at
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage


class KeepingTree(PackingTree):
    """A tree that can copy rows to its archive and bring them back."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.read_ahead: dict[str, Contents] = {}
        """Copies that somebody has read from the archive already, by the keys of their tickets."""
        self.most_staged_rows: int | None = None
        """Rows at full precision that are copied at once on their way to the archive, if not all
        of a segment's: each such copy is there beside the rows for a moment."""

    def archive_rows(self, segment: Segment, offsets: Iterable[int]) -> bool:
        """Copy the rows of some tokens to the archive; exact. They stay where they are.

        Packed rows are copied as they are. Rows of which there is a copy as good as they are, and
        those that are away, are passed over.

        Returns:
            Whether there is a copy now of every row asked for that is resident.

        Raises:
            ValueError: The segment is open or keeps rows by head, or has no such offset.
        """
        wanted = self._checked(segment, offsets, may_be_pinned=True)
        if self.archive is None:
            return False
        managed = self._residency_of(segment)
        to_copy = self._to_copy(managed, wanted)
        if self._bytes_of(to_copy) > max(self.archive.cpu_bytes, self.archive.disk_bytes):
            return False  # found out before anything is copied
        made: list[Archived] = []
        try:
            for bits, rows in to_copy:
                copy = self._copied(segment, bits, rows)
                if copy is None:
                    break
                made.append(copy)
        except BaseException:
            self._drop_copies(made)
            raise
        # The last ones may have driven out the first.
        if len(made) < len(to_copy) or not all(self.archive.has(copy.ticket) for copy in made):
            self._drop_copies(made)
            return False
        if made:
            segment.residency = replace(managed, archived=(*managed.archived, *made))
        return True

    def restore(self, segment: Segment, offsets: Iterable[int] | None = None) -> int:
        """Bring archived rows back as they were; exact.

        Packed rows of which the original is archived are replaced by it. What later tokens
        computed without the rows stays as it is. Their copies are given up.

        Args:
            segment: Closed.
            offsets: Of the tokens; by default all of which there are copies.

        Returns:
            Bytes taken.

        Raises:
            ValueError: The segment is open or has no such offset; or its heads keep rows of which
                there are no copies, and which would be lost.
            ArchiveError: A copy is lost or damaged. Nothing was changed.
        """
        wanted = self._known_closed(segment, offsets)
        if self.archive is None or not segment.archived:
            return 0
        managed = self._residency_of(segment)
        dense, packed = self._fetched(managed, wanted)
        back = {at for _, pairs in dense for at, _ in pairs}
        if not back and not packed:
            return 0
        old, held = self._dense_now(segment, managed)
        self._refuse_to_lose(segment, managed, {*held, *back})
        kept = tuple(sorted({*held, *back}))
        storage = None if not back else self._merged(kept, old, held, dense)
        del old  # views, which would keep the memory of rows that go
        n_copied = sum(len(pairs) for _, pairs in dense) * self.bytes_per_token
        blocks = [
            left
            for block in managed.packed
            if (left := block.without(rows_at(block.offsets, back))) is not None
        ]
        done = back | {at for block in packed for at in block.offsets}
        archived = tuple(
            rest for a in managed.archived if (rest := a.only(set(a.offsets) - done)) is not None
        )
        residency = replace(
            managed,
            kept=kept,
            kept_by_head=None,
            packed=(*blocks, *packed),
            archived=archived,
        )
        taken = -self._install(segment, residency, storage, n_copied)
        self._drop_copies(managed.archived, archived)
        return taken

    # -- inside --------------------------------------------------------------------------

    def _to_copy(
        self, managed: Residency, wanted: frozenset[int]
    ) -> list[tuple[int | None, PackedBlock | Sequence[int]]]:
        """What to copy: bits, and a packed block or the offsets of dense rows."""
        best = {at for a in managed.archived if a.bits is None for at in a.offsets}
        dense = [at for at in managed.dense if at in wanted and at not in best]
        found: list[tuple[int | None, PackedBlock | Sequence[int]]] = []
        step = self.most_staged_rows or max(1, len(dense))
        found += [(None, dense[at : at + step]) for at in range(0, len(dense), step)]
        for block in managed.packed:
            good = {
                at
                for a in managed.archived
                if a.bits is None or a.bits >= block.bits
                for at in a.offsets
            }
            others = [i for i, at in enumerate(block.offsets) if at not in wanted or at in good]
            part = block.without(others) if others else block
            if part is not None:
                found.append((block.bits, part))
        return found

    def _bytes_of(self, to_copy: Sequence[tuple[int | None, PackedBlock | Sequence[int]]]) -> int:
        """What the copies take in an archive, names and strings not counted."""
        return sum(
            payload_bytes(rows.tensors())
            if isinstance(rows, PackedBlock)
            else len(rows) * self.bytes_per_token
            for _, rows in to_copy
        )

    def _copied(
        self,
        segment: Segment,
        bits: int | None,
        rows: PackedBlock | Sequence[int],
    ) -> Archived | None:
        """Put rows into the archive; `None` if there is no room."""
        assert self.archive is not None
        if isinstance(rows, PackedBlock):
            offsets: Sequence[int] = rows.offsets
            tensors, n_bytes = rows.tensors(), rows.n_bytes
        else:
            offsets = rows
            first, _ = segment.place
            dense = self._residency_of(segment).dense
            wanted = [first + row for row in rows_at(dense, set(rows))]
            tensors = segment.storage.named(wanted)
            n_bytes = sum(t.nbytes for t in tensors.values())
        self._account(0, n_bytes)
        meta = {"bits": "full" if bits is None else str(bits), "rows": str(len(offsets))}
        ticket = self.archive.put(tensors, meta)
        if ticket is None:
            return None
        return Archived(
            ticket=ticket, offsets=tuple(offsets), rows=tuple(range(len(offsets))), bits=bits
        )

    def _fetched(
        self, managed: Residency, wanted: frozenset[int]
    ) -> tuple[list[tuple[Storage, list[tuple[int, int]]]], list[PackedBlock]]:
        """Read the copies of what is to come back.

        Returns:
            Rows at full precision, each storage with (offset, row) pairs; then packed blocks.
        """
        assert self.archive is not None
        held = set() if managed.kept_by_head is not None else set(managed.dense)
        coarse = {at for block in managed.packed for at in block.offsets}
        dense: list[tuple[Storage, list[tuple[int, int]]]] = []
        packed: list[PackedBlock] = []
        for a in sorted(managed.archived, key=lambda a: a.bits or 64, reverse=True):
            there = held if a.bits is None else held | coarse
            pairs = [
                (at, row)
                for at, row in zip(a.offsets, a.rows, strict=True)
                if at in wanted and at not in there
            ]
            if not pairs:
                continue
            tensors, meta = self.read_ahead.get(a.ticket.key) or self.archive.get(a.ticket)
            if a.bits is None:
                dense.append((Storage.from_tensors(tensors, self.layout), pairs))
                held |= {at for at, _ in pairs}
            else:
                packed.append(self._block(tensors, int(meta["rows"]), pairs))
                coarse |= {at for at, _ in pairs}
        return dense, packed

    def _block(
        self, tensors: dict[str, Tensor], n_rows: int, pairs: list[tuple[int, int]]
    ) -> PackedBlock:
        """Some rows of a packed copy, in storages of their own."""
        rows = {row for _, row in pairs}
        offsets = [at for at, _ in pairs]
        if len(rows) < n_rows:
            whole = PackedBlock.from_tensors(tensors, range(n_rows))
            part = whole.without([row for row in range(n_rows) if row not in rows])
            assert part is not None
            tensors = part.tensors()
        own = {name: t.clone() for name, t in tensors.items()}
        return PackedBlock.from_tensors(own, offsets, self.layout)

    def _dense_now(self, segment: Segment, managed: Residency) -> tuple[Views, Sequence[int]]:
        """The rows at full precision that stay, K and V by layer, and their offsets."""
        if managed.kept_by_head is None:
            return segment.storage.views(*segment.place), managed.dense
        keep = managed.kept_by_head
        common = [at for at in range(segment.n_tokens) if is_in_all_heads(keep, at)]
        index = torch.tensor(common, dtype=torch.long).expand(*keep.shape[:2], -1)
        rows = by_head.rows_of_offsets(segment, index)
        return segment.storage.gathered_by_head(rows).views(0, len(common)), common

    def _refuse_to_lose(self, segment: Segment, managed: Residency, left: set[int]) -> None:
        if managed.kept_by_head is None:
            return
        lost = set(managed.kept_by_head.flatten().tolist()) - left - {segment.n_tokens}
        if lost:
            msg = (
                f"heads of segment {segment.segment_id} keep rows of {len(lost)} tokens of which "
                "there are no copies; they would be lost"
            )
            raise ValueError(msg)

    def _merged(
        self,
        kept: Sequence[int],
        old: Views,
        held: Sequence[int],
        back: list[tuple[Storage, list[tuple[int, int]]]],
    ) -> Storage:
        """A new storage of what is there and what comes back, by offset."""
        place = {at: row for row, at in enumerate(kept)}
        new = Storage.of(self.layout, len(kept))
        new.write([place[at] for at in held], *old)
        for storage, pairs in back:
            rows = storage.gathered([row for _, row in pairs])
            new.write([place[at] for at, _ in pairs], rows.keys, rows.values)
        return new
