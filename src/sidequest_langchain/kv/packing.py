"""Keeping rows of a closed segment at lower precision. It must not know why."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from sidequest_langchain.kv.acts import ActingTree
from sidequest_langchain.kv.merged_rows import MergedRows, is_finer
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.parts import Part, StoredRows
from sidequest_langchain.kv.quantise import BITS
from sidequest_langchain.kv.residency import rows_at
from sidequest_langchain.kv.segment import Segment


class PackingTree(ActingTree):
    """A tree that can pack rows."""

    def compress(
        self, segment: Segment, offsets: Iterable[int], bits: int, exempt: Collection[int] = ()
    ) -> int:
        """Make one packed block of the rows of some tokens; lossy.

        Rows at full precision are packed from the original. Rows that are packed to more bits are
        packed again, from what they are. Others, and those that are away, are passed over.

        Args:
            segment: Closed, and pinned by nobody.
            offsets: Which of its tokens.
            bits: 8 or 4.
            exempt: Layers that stay at full precision.

        Returns:
            Bytes freed; negative where few rows make a block larger than they were.

        Raises:
            ValueError: The segment is open, pinned or keeps rows by head, or has no such offset;
                other bits; or rows that are not finite.

        Paper: KIVI, arXiv:2402.02750, §3.2.
        """
        wanted = self._checked(segment, offsets)
        if bits not in BITS:
            msg = f"rows are packed to 8 or 4 bits, not to {bits}"
            raise ValueError(msg)
        managed = self._residency_of(segment)
        first, last = segment.place
        parts: list[Part] = [StoredRows(segment.storage, first, last - first, managed.kept)]
        parts += [block for block in managed.packed if is_finer(block, bits)]
        rows = MergedRows(parts, wanted)
        if not rows.n_rows:
            return 0
        loaded = [rows.load(layer, 0, rows.n_rows) for layer in range(len(self.layout))]
        keys, values = [k for k, _ in loaded], [v for _, v in loaded]
        block = PackedBlock.pack(keys, values, rows.offsets, bits=bits, exempt=exempt)
        left = [
            rest
            for old in managed.packed
            if (rest := old.without(rows_at(old.offsets, wanted)) if is_finer(old, bits) else old)
            is not None
        ]
        residency = replace(
            managed,
            kept=tuple(at for at in managed.dense if at not in wanted),
            packed=(*left, block),
        )
        views = keys[0].untyped_storage().data_ptr() == segment.keys[0].untyped_storage().data_ptr()
        n_copied = 0 if views else rows.n_rows * self.bytes_per_token
        return self._replace(segment, residency, n_copied)
