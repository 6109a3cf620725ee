"""The tree of segments: the life of a path, from `begin` to `commit` or `discard`.

Finding and cutting are in `radix`, acts on rows in `acts`, `packing` and `keeping`, equal rows in
`sharing`, segments in a row in `fusing`, letting go in `releasing`, cleared tokens in `clearing`,
segments from a file in `grafting`.

One radix tree by token ids for each scope. It must not know a model, a graph or a thread:
one owner calls it, from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidequest_langchain.kv.allocator import return_to_system
from sidequest_langchain.kv.clearing import ClearingTree
from sidequest_langchain.kv.grafting import GraftingTree
from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.segment import Path, Segment
from sidequest_langchain.labels import StepLabel


class SegmentTree(ClearingTree, GraftingTree):
    """Every resident segment and every labelled path, with the bytes they hold."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.serial = 0
        """Paths begun so far."""

    # -- the life of a path --------------------------------------------------------------

    def next_serial(self) -> int:
        """A number for a path to come: those asked for earlier have lower ones."""
        self.serial += 1
        return self.serial - 1

    def begin(
        self, scope: str, ids: Sequence[int], label: StepLabel, *, serial: int | None = None
    ) -> Path:
        """Start a path at the longest resident head of `ids`.

        A segment is split where `ids` leaves it. The path gets an open tip of its own, empty,
        which pins all that it stands on until `commit` or `discard`. Exact.
        """
        found, n_reused = self.match(scope, ids)
        if found is None:
            parent = self._root(scope)
        else:
            # A head cut off a running tip is closed: it may repeat what a closed sibling holds.
            parent = self._share(self._cut(found, n_reused - found.start))
            self._join(parent)
        tip = self._new_segment(scope, parent)
        tip.is_open = True
        path = Path(label, self.next_serial() if serial is None else serial, tip, n_reused)
        self.paths[path.serial] = path
        tip.paths.add(path)
        return path

    def reserve(self, path: Path, n_more: int, n_guesses: int = 0) -> None:
        """Make room for `n_more` rows in the tip, guesses among them."""
        change = path.tip.reserve(n_more, n_guesses)
        self._account(change, path.tip.n_bytes if change else 0)

    def extend(self, path: Path, ids: Sequence[int], kinds: Sequence[int] | None = None) -> None:
        """Count rows that a forward pass has written into the tip of every layer.

        Args:
            path: Running.
            ids: Their tokens.
            kinds: The `TokenKind` of each; all are `OTHER` unless given.
        """
        path.tip.extend(ids, kinds)
        self.n_tokens += len(ids)

    def crop(self, path: Path, n_rows: int) -> None:
        """Keep the first `n_rows` rows of a running path's tip; exact."""
        self.n_tokens -= path.tip.n_rows - n_rows
        change = path.tip.crop(n_rows)
        self._account(change, path.tip.n_bytes if change else 0)

    def commit(self, path: Path) -> None:
        """Close the tip of a path that ended well.

        Room to grow is given back; rows that a sibling holds already are dropped in favour of
        the sibling's. A path that was released meanwhile goes at once.
        """
        tip = path.tip
        tip.is_open = False
        path.is_running = False
        try:
            if self._share(tip) is tip:
                change = tip.fit()
                self._account(change, tip.n_bytes if change else 0)
        except BaseException:  # no memory to close it: the path still runs, and can be discarded
            tip.is_open = path.is_running = True
            raise
        self._fit_path(path.tip)
        _forget_views(path.tip)
        self._touch(path.tip)
        self.idle.note(path.tip)
        if path.is_released:
            self._let_go([path], path.label.path_id, "released while running")
        elif path.tip.parent is None:
            self._forget(path)
            self._free_unneeded(path.tip, [])

    def discard(self, path: Path) -> None:
        """Undo a path that failed or was cancelled: what it stored is gone, exactly."""
        self.crop(path, 0)  # a pin keeps what the path stands on, not what it stored
        path.is_running = False
        path.tip.is_open = False
        _forget_views(path.tip)
        self._forget(path)
        if path.tip.n_pins:
            self._fit_path(path.tip)
        return_to_system(self._free_unneeded(path.tip, []))


def _forget_views(tip: Segment) -> None:
    """A path stopped running; others over the same segments make their views again."""
    for segment in tip.path():
        segment.storage.forget_views()
