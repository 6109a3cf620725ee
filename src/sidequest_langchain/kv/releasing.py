"""Letting go of what paths hold: release, supersede, sweep, pin. Exact.

Text is the truth: what is released and comes back is computed again. It must not know who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sidequest_langchain.kv.allocator import return_to_system
from sidequest_langchain.kv.fusing import FusingTree
from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.receipts import ReleaseReceipt
from sidequest_langchain.kv.segment import Path, Segment
from sidequest_langchain.labels import PathSelector


class ReleasingTree(FusingTree):
    """A tree with labelled paths that can be let go."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.n_released_bytes = 0
        self.paths: dict[int, Path] = {}
        self.on_release: Callable[[ReleaseReceipt], None] = lambda receipt: None
        """Told of every release, the deferred ones when they come to pass."""

    def select(self, selector: PathSelector) -> list[Path]:
        """The paths a selector means, oldest first."""
        return [p for p in self.paths.values() if selector.selects(p.label, p.serial)]

    def release(
        self, selector: PathSelector, *, reason: str, name: str | None = None, n_waiting: int = 0
    ) -> ReleaseReceipt:
        """Drop the claims of the selected paths and free what no other path, child or pin needs.

        Exact: a later use recomputes what is gone. Idempotent. A path that a running
        generation reads, or that is pinned, is only marked and goes when the reader leaves.

        Args:
            selector: Which paths.
            reason: For the receipt.
            name: What the receipt calls them; by default the selector's own words.
            n_waiting: Calls it means that have not begun: the caller sees to them.
        """
        chosen = self.select(selector)
        return self._let_go(
            chosen, _name_of(selector) if name is None else name, reason, n_waiting=n_waiting
        )

    def predict_release(self, selector: PathSelector, *, name: str | None = None) -> ReleaseReceipt:
        """The receipt that `release` would give; changes nothing."""
        chosen = self.select(selector)
        free = {p for p in chosen if not self._is_held(p)}
        gone: set[Segment] = set()
        for segment in sorted({p.tip for p in free}, key=lambda s: s.start, reverse=True):
            at: Segment | None = segment
            while at is not None and at.parent is not None and self._would_go(at, free, gone):
                gone.add(at)
                at = at.parent
        return ReleaseReceipt(
            path=_name_of(selector) if name is None else name,
            reason="prediction",
            freed_bytes=sum(s.n_bytes for s in gone),
            freed_tokens=sum(s.n_resident for s in gone),
            segments=tuple(sorted(s.segment_id for s in gone)),
            n_paths=len(chosen),
            is_known=bool(chosen),
            n_deferred=len(chosen) - len(free),
        )

    def supersede(self, path: Path, call_ids: Iterable[str]) -> None:
        """Free what earlier calls hold beyond their common prefix with `path`.

        For replies that the new prompt holds in another rendering (a think block stripped):
        the old rendering is not coming back. Branches of other calls stay.
        """
        wanted = set(call_ids)
        kept = set(path.tip.path()) | {path.tip}
        freed = 0
        for old in [p for p in self.paths.values() if p.label.call_id in wanted]:
            while old.serial in self.paths and old.tip not in kept and not self._is_held(old):
                freed += self._step_back(old)
        return_to_system(freed)

    def sweep(self, is_over: Callable[[], bool]) -> int:
        """Free the least recently used leaves while `is_over()`. Returns the bytes freed.

        Never one that a running request, a pin or a child stands on. Exact.
        """
        freed = 0
        while is_over():
            oldest = self.idle.pop()
            if oldest is None:
                break
            freed += self._drop_leaf(oldest)
        self.n_released_bytes += freed
        return_to_system(freed)
        return freed

    def release_leaf(self, segment: Segment) -> int:
        """Free one idle leaf; the paths that end in it end in its parent then. Exact.

        Returns:
            The bytes freed; 0 where something stands on it.
        """
        freed = self._drop_leaf(segment) if _is_leaf_of_tree(segment) else 0
        self.n_released_bytes += freed
        return_to_system(freed)
        return freed

    def release_subtree(self, segment: Segment) -> int:
        """Free a segment and what stands on it, but for what runs or is pinned. Exact.

        Returns:
            The bytes freed.
        """
        below = [segment]
        for at in below:  # parents first; the list grows as it is read
            below.extend(at.children)
        return sum(self.release_leaf(at) for at in reversed(below))

    def pin(self, path: Path) -> Segment:
        """Keep a path's segments, whatever is released, until `unpin` of what is returned."""
        path.tip.n_pins += 1
        return path.tip

    def unpin(self, segment: Segment) -> None:
        """Take one pin off; paths released meanwhile go now."""
        segment.n_pins -= 1
        if segment.n_pins:
            return
        late = [p for p in segment.paths if p.is_released and not p.is_running]
        at = segment if segment.is_open else self._retire_empty(segment)
        self.idle.note(at)
        for path in [p for p in at.paths if at.parent is None]:
            self._forget(path)
        if late:
            self._let_go(late, late[0].label.path_id, "released while pinned")
        else:
            return_to_system(self._free_unneeded(at, []))

    # -- inside --------------------------------------------------------------------------

    def _drop_leaf(self, leaf: Segment) -> int:
        """Free an idle leaf; its paths end at its parent then."""
        if not leaf.paths:
            return self._free_unneeded(leaf, [])
        return sum(self._step_back(path) for path in list(leaf.paths))

    def _is_held(self, path: Path) -> bool:
        return path.is_running or path.tip.n_pins > 0

    def _let_go(
        self, paths: Sequence[Path], name: str, reason: str, *, n_waiting: int = 0
    ) -> ReleaseReceipt:
        gone: list[Segment] = []
        n_tokens = self.n_tokens
        freed, n_deferred = 0, n_waiting
        for path in paths:
            if self._is_held(path):
                path.is_released = True
                n_deferred += 1
                continue
            self._forget(path)
            freed += self._free_unneeded(path.tip, gone)
        self.n_released_bytes += freed
        receipt = ReleaseReceipt(
            path=name,
            reason=reason,
            freed_bytes=freed,
            freed_tokens=n_tokens - self.n_tokens,
            segments=tuple(sorted(s.segment_id for s in gone)),
            n_paths=len(paths) + n_waiting,
            is_known=bool(paths) or n_waiting > 0,
            n_deferred=n_deferred,
        )
        return_to_system(freed)
        self.on_release(receipt)
        return receipt

    def _step_back(self, path: Path) -> int:
        """Move a path's tip to its parent; free the old tip if nobody else needs it."""
        tip = path.tip
        parent = tip.parent
        assert parent is not None
        tip.paths.discard(path)
        if parent.parent is None:
            self.paths.pop(path.serial, None)
        else:
            path.tip = parent
            parent.paths.add(path)
        return self._free_unneeded(tip, [])

    def _forget(self, path: Path) -> None:
        self.paths.pop(path.serial, None)
        path.tip.paths.discard(path)

    def _would_go(self, segment: Segment, free: set[Path], gone: set[Segment]) -> bool:
        held = segment.n_pins or segment.is_open or not segment.paths <= free
        return not held and all(child in gone for child in segment.children)


def _name_of(selector: PathSelector) -> str:
    """What a receipt calls the paths that `selector` means."""
    names = (selector.path_id, selector.checkpoint_ns, selector.thread_id)
    return next((name for name in names if name is not None), "*")


def _is_leaf_of_tree(segment: Segment) -> bool:
    """Whether a segment may be let go, and was not yet."""
    return (
        segment.is_idle_leaf and segment.parent is not None and segment in segment.parent.children
    )
