"""A segment, the K/V it owns, and a path, one call's claim on the segments up to its tip.

They know their neighbours in the tree but decide nothing; `tree` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.labels import StepLabel

GROWTH_ROWS = 32
"""An open segment grows by at least this many rows, so that decoding seldom copies."""


class Segment:
    """Tokens with their K/V, as a node of the tree.

    The storage is the segment's own: no tensor of another segment is a view of it, so that
    freeing it frees the bytes. `len(token_ids) == n_rows` at all times outside of a step.

        rows      0 ........ n_rows ........ capacity
                  |  K/V     |  room to grow |
        position  start      start + n_rows
    """

    __slots__ = (
        "__weakref__",
        "capacity",
        "children",
        "is_open",
        "keys",
        "last_used",
        "n_pins",
        "parent",
        "paths",
        "scope",
        "segment_id",
        "start",
        "token_ids",
        "values",
    )

    def __init__(
        self, segment_id: int, scope: str, parent: Segment | None, layout: KVLayout
    ) -> None:
        self.segment_id = segment_id
        self.scope = scope
        self.parent = parent
        self.children: list[Segment] = []
        self.start = 0 if parent is None else parent.end
        self.token_ids: list[int] = []
        self.capacity = 0
        self.is_open = False
        self.n_pins = 0
        self.last_used = 0
        self.paths: set[Path] = set()
        self.keys = [_rows(s.n_kv_heads, 0, s.key_dim, s.dtype, s.device) for s in layout]
        self.values = [_rows(s.n_kv_heads, 0, s.value_dim, s.dtype, s.device) for s in layout]

    @property
    def n_rows(self) -> int:
        """Rows of K/V that are valid."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids)

    @property
    def n_bytes(self) -> int:
        """Bytes of its storage, room to grow included."""
        tensors = (*self.keys, *self.values)
        return sum(t.untyped_storage().nbytes() for t in tensors)

    @property
    def is_needed(self) -> bool:
        """Whether anything stands on it: a child, a path's tip, a pin or a running request."""
        return bool(self.children or self.paths or self.n_pins or self.is_open)

    def path(self) -> list[Segment]:
        """The segments with rows from the first to this one; the root holds none."""
        segments = []
        segment: Segment | None = self
        while segment is not None:
            if segment.n_rows or segment is self:
                segments.append(segment)
            segment = segment.parent
        segments.reverse()
        return segments

    def reserve(self, n_more: int) -> int:
        """Make room for `n_more` rows; existing rows are copied when the storage must grow.

        Returns:
            Bytes by which the storage grew.
        """
        capacity = self.capacity_for(n_more)
        return self._resize(capacity) if capacity > self.capacity else 0

    def capacity_for(self, n_more: int) -> int:
        """Rows that the storage will hold once `n_more` rows are reserved."""
        needed = self.n_rows + n_more
        if needed <= self.capacity:
            return self.capacity
        # Room for decoding comes with a decoded row; a prefill chunk takes what it needs.
        room = max(GROWTH_ROWS, needed // 8) if n_more == 1 else n_more
        return self.n_rows + room

    def fit(self) -> int:
        """Give back the room to grow. Returns the (negative or zero) change in bytes."""
        if self.capacity == self.n_rows:
            return 0
        return self._resize(self.n_rows)

    def crop(self, n_rows: int) -> int:
        """Keep the first `n_rows` rows only; exact. Returns the change in bytes."""
        del self.token_ids[n_rows:]
        return self.fit()

    def drop_head(self, n_rows: int) -> int:
        """Forget the first `n_rows` rows, which another segment holds now; exact.

        Returns:
            The change in bytes.
        """
        before = self.n_bytes
        kept = slice(n_rows, self.n_rows)
        # All copies are made before anything changes: where memory ends, nothing has happened.
        keys, values = _copies(self.keys, kept), _copies(self.values, kept)
        self.keys, self.values = keys, values
        del self.token_ids[:n_rows]
        self.start += n_rows
        self.capacity = self.n_rows
        return self.n_bytes - before

    def copy_head(self, source: Segment, n_rows: int) -> int:
        """Take copies of the first `n_rows` rows of `source`. Returns the bytes taken."""
        head = slice(0, n_rows)
        keys, values = _copies(source.keys, head), _copies(source.values, head)
        self.keys, self.values = keys, values
        self.token_ids = source.token_ids[:n_rows]
        self.capacity = n_rows
        return self.n_bytes

    def free(self) -> int:
        """Let go of the storage, whoever may still hold this object. Returns the bytes freed."""
        n_bytes = self.n_bytes
        self.keys, self.values = [], []
        self.capacity = 0
        return n_bytes

    def _resize(self, capacity: int) -> int:
        before = self.n_bytes
        # As in `drop_head`: either every layer is resized or none.
        keys = [_resized(tensor, self.n_rows, capacity) for tensor in self.keys]
        values = [_resized(tensor, self.n_rows, capacity) for tensor in self.values]
        self.keys, self.values = keys, values
        self.capacity = capacity
        return self.n_bytes - before


class Path:
    """One model call's claim on the segments up to its tip. Identity, not value, compares."""

    __slots__ = ("is_released", "is_running", "label", "n_reused", "serial", "tip")

    def __init__(self, label: StepLabel, serial: int, tip: Segment, n_reused: int) -> None:
        self.label = label
        self.serial = serial
        """Counts the paths begun; never reused."""
        self.tip = tip
        self.n_reused = n_reused
        """Tokens that were resident when the call began."""
        self.is_running = True
        self.is_released = False
        """Released while a running generation or a pin still needed it."""


def _copies(tensors: list[Tensor], rows: slice) -> list[Tensor]:
    return [t[:, rows].clone(memory_format=torch.contiguous_format) for t in tensors]


def _resized(old: Tensor, n_rows: int, capacity: int) -> Tensor:
    new = _rows(old.shape[0], capacity, old.shape[2], old.dtype, old.device)
    new[:, :n_rows] = old[:, :n_rows]
    return new


def _rows(n_heads: int, n_rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((n_heads, n_rows, dim), dtype=dtype, device=device)


def n_common(mine: list[int], theirs: list[int] | tuple[int, ...], offset: int = 0) -> int:
    """Length of the common head of `mine` and `theirs[offset:]`."""
    most = min(len(mine), len(theirs) - offset)
    block = 512  # comparing slices runs in C; only the block that differs is walked
    for at in range(0, most, block):
        end = min(at + block, most)
        if list(theirs[offset + at : offset + end]) != mine[at:end]:
            for i in range(at, end):
                if mine[i] != theirs[offset + i]:
                    return i
    return max(most, 0)
