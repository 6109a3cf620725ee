"""Making one segment of several in a row that nobody tells apart. Exact.

A running path is closed piece by piece; once rows have left, its segments are short, and each is a
call of attention's kernel in every layer. It must not know why they are short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from sidequest_langchain.kv import chain
from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.sharing import SharingTree
from sidequest_langchain.kv.storage import Storage


class FusingTree(SharingTree):
    """A tree in which closed segments can become one."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.on_fuse: Callable[[Segment, Segment], None] | None = None
        """Told of a segment and its only child, which is about to take in its tokens. Tokens and
        positions of both are as they were; rows are not to be looked at."""

    def fuse(self, path_tip: Segment, most_rows: int) -> int:
        """Let closed segments of a path take in their parents, as far as nobody can tell. Exact.

        Stays as it is: what is open, pinned or kept by head; and as a parent, where a path, a
        scratch or several children stand. Segments that share a storage with one that stays
        become one only if they lie there side by side, which copies nothing; all others are copied
        once. A child stays the same object, with its paths and children; the parent's is freed.
        Packed rows may take four bytes more each, see `PackedBlock.joined`.

        Args:
            path_tip: Where the path ends.
            most_rows: Rows that may be resident of what becomes one segment, and so be copied.

        Returns:
            How many parents were taken in. Where there is no memory for a copy, all that it was
            for stay as they are.
        """
        n = sum(
            self._fuse(run, None, self._joined_residency(run))
            for run in self._runs(path_tip, most_rows, chain.is_next)
        )
        for run in self._runs(path_tip, most_rows, _own_their_storages):
            try:
                storage = Storage.joined([s.storage for s in run], [s.place for s in run])
                residency = self._joined_residency(run)
            except (MemoryError, RuntimeError):  # only slower without; torch's is a RuntimeError
                break
            n += self._fuse(run, storage, residency)
        return n

    def unite(self, path_tip: Segment, *, most_of_piece: int, most_of_layer: int) -> None:
        """Let closed segments of a path lie in one storage, side by side. Exact.

        Attention reads them as one block, and they lose rows where they lie. Stays as it is: what
        is open, packed or kept by head, what shares a storage with a segment beside the path, and
        what a snapshot borrows.

        Args:
            path_tip: Where the path ends.
            most_of_piece: Rows of a piece that may be there twice for a moment.
            most_of_layer: Rows of which one layer's share of the storage may be there twice.
        """
        path = path_tip.path()
        on_path = set(path)
        segments = [s for s in path if (s.n_rows or s.fellows) and _can_lie_with_others(s, on_path)]
        storages = {s.storage for s in segments}
        if len(storages) < 2 and all(storage.changes_by_layer for storage in storages):
            return
        before = {id(s.storage): s.storage.n_bytes for s in segments}
        try:
            n_copied = chain.unite(
                segments, most_of_piece=most_of_piece, most_of_layer=most_of_layer
            )
        except (MemoryError, RuntimeError):  # only slower without; torch's is a RuntimeError
            n_copied = 0
        after = {id(s.storage): s.storage.n_bytes for s in segments}
        change = sum(after.values()) - sum(before.values())
        self._account(change, n_copied)

    # -- inside --------------------------------------------------------------------------

    def _runs(
        self, path_tip: Segment, most_rows: int, may_share: Callable[[Segment, Segment], bool]
    ) -> list[list[Segment]]:
        """Segments of a path that become one each, from the root on as many as may."""
        scratched = {scratch.parent for scratch in self.scratches}
        runs: list[list[Segment]] = []
        n_rows = 0
        for segment in path_tip.path():
            if runs:
                before = runs[-1][-1]
                is_free = before not in scratched and _can_fuse(before, segment)
                n_rows += segment.n_resident
                if is_free and n_rows <= most_rows and may_share(before, segment):
                    runs[-1].append(segment)
                    continue
            runs.append([segment])
            n_rows = segment.n_resident
        return [run for run in runs if len(run) > 1]

    def _joined_residency(self, run: Sequence[Segment]) -> Residency | None:
        return Residency.joined([self._residency_of(segment) for segment in run])

    def _fuse(
        self, run: Sequence[Segment], storage: Storage | None, residency: Residency | None
    ) -> int:
        """Make one segment of several.

        Args:
            run: Each the next one's parent.
            storage: Their dense rows; `None` if they lie side by side already.
            residency: Of all of them.

        Returns:
            How many are gone.
        """
        last = run[-1]
        n_bytes = sum(segment.n_bytes for segment in run)
        kinds = Counter(block.kind for segment in run for block in segment.packed)
        blocks = () if residency is None else residency.packed
        n_copied = sum(block.n_bytes for block in blocks if kinds[block.kind] > 1)
        n_copied += 0 if storage is None else storage.n_bytes
        old_storage, (first, _), fellows = last.storage, run[0].place, last.fellows
        owners = Counter(t for s in run for t in {copy.ticket for copy in s.archived})
        errors = [error for pair in pairwise(run) if (error := self._take_in(*pair)) is not None]
        last.residency = residency
        if storage is not None:
            last.move_to(storage, 0, [])
        else:
            is_own = len(fellows) == 1 and old_storage.capacity == last.n_rows
            last.move_to(old_storage, first, [] if is_own else fellows)
        self._account(last.n_bytes - n_bytes, n_copied)
        if self.archive is not None:
            for ticket, n in owners.items():
                for _ in range(n - 1):  # one owner instead of several
                    self.archive.drop(ticket)
        if errors:
            raise errors[0]
        return len(run) - 1

    def _take_in(self, parent: Segment, child: Segment) -> BaseException | None:
        """Give a child its parent's tokens and place in the tree.

        Returns:
            What the listener raised: by then it is too late to undo the run, so the rest follows.
        """
        error: BaseException | None = None
        if self.on_fuse is not None:
            try:
                self.on_fuse(parent, child)
            except BaseException as raised:
                error = raised
        above = parent.parent
        assert above is not None
        child.take_before(parent)
        child.start, child.parent = parent.start, above
        above.children[above.children.index(parent)] = child
        parent.children = []
        self.idle.forget(parent)
        parent.free()
        return error


def _can_fuse(parent: Segment, child: Segment) -> bool:
    is_only = parent.children == [child] and not parent.paths
    return is_only and all(
        not (s.is_open or s.n_pins or s.kept_by_head is not None) for s in (parent, child)
    )


def _can_lie_with_others(segment: Segment, on_path: set[Segment]) -> bool:
    is_closed = not segment.is_open and segment.kept_by_head is None and not segment.packed
    is_of_path = on_path.issuperset(segment.fellows)
    return is_closed and is_of_path and not segment.storage.is_borrowed


def _own_their_storages(parent: Segment, child: Segment) -> bool:
    return not (parent.fellows or child.fellows)
