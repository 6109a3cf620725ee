"""A segment, the K/V it owns, and a path, one call's claim on the segments up to its tip.

They know their neighbours in the tree but decide nothing; `tree` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.storage import Storage
from sidequest_langchain.kv.tokens import Tokens
from sidequest_langchain.labels import StepLabel

GROWTH_ROWS = 32
"""An open segment grows by at least this many rows, so that decoding seldom copies."""


class Segment(Tokens):
    """Tokens with their K/V, as a node of the tree.

    The storage is the segment's own, or one that closed segments in a row have together and
    that shrinks when one of them goes: freeing a segment frees its bytes.
    Every token has a row in it, unless the segment is managed: then `residency` says where the
    rows are. Its tokens and positions stay as they were.

        rows      0 ........ n_rows ........ capacity
                  |  K/V     |  room to grow |
        position  start      end = start + n_tokens
    """

    __slots__ = (
        "__weakref__",
        "_first",
        "_storage",
        "children",
        "fellows",
        "is_open",
        "last_used",
        "n_pins",
        "parent",
        "paths",
        "scope",
        "segment_id",
        "start",
    )

    def __init__(
        self, segment_id: int, scope: str, parent: Segment | None, layout: KVLayout
    ) -> None:
        super().__init__()
        self.segment_id = segment_id
        self.scope = scope
        self.parent = parent
        self.children: list[Segment] = []
        self.start = 0 if parent is None else parent.end
        self.is_open = False
        self.n_pins = 0
        self.last_used = 0
        self.paths: set[Path] = set()
        self.fellows: list[Segment] = []
        """All segments of its storage, itself included; empty where it has its own."""
        self._storage = Storage.of(layout, 0)
        self._first = 0

    @property
    def keys(self) -> list[Tensor]:
        """K of every layer, `[H, capacity, D]`."""
        return list(self.rows(0, self.n_rows)[0]) if self.fellows else self._storage.keys

    @property
    def values(self) -> list[Tensor]:
        """V of every layer, `[H, capacity, Dv]`."""
        return list(self.rows(0, self.n_rows)[1]) if self.fellows else self._storage.values

    @property
    def storage(self) -> Storage:
        """Where its rows lie."""
        return self._storage

    @property
    def place(self) -> tuple[int, int]:
        """Its rows in the storage, `first..last`."""
        return self._first, self._first + self.n_rows

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self.n_rows if self.fellows else self._storage.capacity

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids)

    @property
    def n_bytes(self) -> int:
        """Bytes of its storage, room to grow included, and of its packed rows."""
        packed = self.n_packed_bytes
        if self.fellows:
            return self._storage.n_bytes // max(1, self._storage.capacity) * self.n_rows + packed
        return self._storage.n_bytes + packed

    @property
    def is_needed(self) -> bool:
        """Whether anything stands on it: a child, a path's tip, a pin or a running request."""
        return bool(self.children or self.paths or self.n_pins or self.is_open)

    @property
    def is_idle_leaf(self) -> bool:
        """Whether it may be let go without anybody noticing but by the time it takes."""
        is_held = self.children or self.is_open or self.n_pins or self.parent is None
        return not is_held

    def path(self) -> list[Segment]:
        """The segments with tokens from the first to this one; the root holds none."""
        segments = []
        segment: Segment | None = self
        while segment is not None:
            if segment.token_ids or segment is self:
                segments.append(segment)
            segment = segment.parent
        segments.reverse()
        return segments

    def reserve(self, n_more: int, n_guesses: int = 0) -> int:
        """Make room for `n_more` rows; existing rows are copied when the storage must grow.

        Args:
            n_more: Rows to come.
            n_guesses: Those of them, the last ones, that may be of no use.

        Returns:
            Bytes by which the storage grew.
        """
        capacity = self.capacity_for(n_more, n_guesses)
        return self._resize(capacity) if capacity > self.capacity else 0

    def capacity_for(self, n_more: int, n_guesses: int = 0) -> int:
        """Rows that the storage will hold once `n_more` rows are reserved, guesses among them."""
        needed = self.n_rows + n_more
        if needed <= self.capacity:
            return self.capacity
        # Room for decoding comes with decoded rows; a prefill chunk takes what it needs.
        is_decoding = n_more - n_guesses == 1
        room = max(GROWTH_ROWS, needed // 8, n_more) if is_decoding else n_more
        return self.n_rows + room

    def fit(self) -> int:
        """Give back the room to grow. Returns the (negative or zero) change in bytes."""
        if self.capacity == self.n_rows:
            return 0
        return self._resize(self.n_rows)

    def crop(self, n_rows: int) -> int:
        """Keep the first `n_rows` tokens of an open segment; exact. Returns the change in bytes."""
        del self.token_ids[n_rows:], self.kinds[n_rows:]
        return self.fit()

    def rows(self, first: int, last: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """K and V of rows `first..last` of every layer, `[H, last - first, D]`, as views.

        For the step at hand: a change of the storage leaves them behind.
        """
        return self._storage.views(self._first + first, self._first + last)

    def move_to(self, storage: Storage, first: int, fellows: list[Segment]) -> None:
        """Have its rows, which are there already, at `first` of a storage shared with others."""
        self._storage, self._first, self.fellows = storage, first, fellows

    def drop_head(self, n_head: int, residency: Residency | None = None) -> int:
        """Forget the first `n_head` tokens, which another segment holds now; exact.

        Args:
            n_head: How many.
            residency: Where the rows of the others are, once it is cut.

        Returns:
            The change in bytes; what was shared with others goes with `chain.settle`.
        """
        first, last = self.place
        before = self.n_bytes if not self.fellows else 0
        storage = self._storage.copy(first + self.n_rows_before(n_head), last)
        if self.fellows:
            self.fellows.remove(self)
        self.move_to(storage, 0, [])
        self.forget_head(n_head, residency)
        self.start += n_head
        return self.n_bytes - before

    def give_all(self, other: Segment, layout: KVLayout) -> None:
        """Let another segment have the tokens and rows, and be empty after them; no copy."""
        other.start, other.residency = self.start, self.residency
        other.token_ids, other.kinds = self.token_ids, self.kinds
        other.move_to(self._storage, self._first, [])
        self.token_ids, self.kinds, self.residency = [], bytearray(), None
        self.start = other.end
        self.move_to(Storage.of(layout, 0), 0, [])

    def copy_head(self, source: Segment, n_head: int, residency: Residency | None = None) -> int:
        """Take copies of the rows of the first `n_head` tokens of `source`, which is no fellow.

        Args:
            source: What to copy from.
            n_head: How many.
            residency: Where their rows are, once it is cut.

        Returns:
            The bytes taken.
        """
        self._storage = source._storage.copy(0, source.n_rows_before(n_head))
        self.take_head(source, n_head, residency)
        return self.n_bytes

    def free(self) -> int:
        """Let go of the storage, whoever may still hold this object. Returns the bytes freed.

        None as long as others share the storage: see `chain.settle`.
        """
        packed = self.n_packed_bytes
        n_bytes = packed if self.fellows else self.n_bytes
        if self.fellows:
            self.fellows.remove(self)
        self.move_to(Storage.empty(), 0, [])
        if self.residency is not None:  # nothing of it is resident, and no copy is its any more
            self.residency = Residency(n_tokens=self.n_tokens, kept=())
        return n_bytes

    def _resize(self, capacity: int) -> int:
        before = self.n_bytes
        self._storage = self._storage.resized(self.n_rows, capacity)
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
