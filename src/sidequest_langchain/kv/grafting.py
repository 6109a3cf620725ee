"""Segments that were read from a file become part of the tree. It must not know the file.

promise     room for what is about to be read counts as taken
graft       what was read joins the tree, all of it or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.releasing import ReleasingTree
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.segment import Path, Segment
from sidequest_langchain.kv.storage import Storage
from sidequest_langchain.labels import StepLabel


@dataclass(slots=True, kw_only=True, eq=False)
class Planted:
    """One segment to be."""

    parent: int
    """Its parent's place among those given; -1 for one that starts a path."""
    scope: str
    ids: Sequence[int]
    kinds: bytes
    storage: Storage | None
    """Its rows at full precision; `None` where the tree has had the whole segment."""
    residency: Residency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grafted:
    """What joined the tree."""

    ends: dict[int, Segment]
    """Where each of those given ends now; those are absent whose parent is gone."""
    n_paths: int
    n_tokens: int
    """Tokens whose rows came from what was given, not from what the tree had."""
    n_bytes: int
    """By which the tree grew."""


class GraftingTree(ReleasingTree):
    """A tree that takes in segments from elsewhere."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.n_promised_bytes = 0
        """Of `n_bytes`, what is being read and not there yet."""
        self.n_promised_tokens = 0
        """Of `n_tokens`, likewise."""

    def promise(self, n_bytes: int, n_tokens: int) -> None:
        """Count room as taken by what is about to be read; negative numbers give it back."""
        self.n_promised_bytes += n_bytes
        self.n_promised_tokens += n_tokens
        self.n_tokens += n_tokens
        self._account(n_bytes)

    def n_known(self, scope: str, ids: Sequence[int]) -> int:
        """How many of the first `ids` are resident; what holds them counts as used now."""
        found, n = self.match(scope, ids)
        if found is not None:
            self._touch(found)
        return n

    def graft(
        self,
        segments: Sequence[Planted],
        paths: Iterable[tuple[StepLabel, int]],
        next_serial: Callable[[], int],
    ) -> Grafted:
        """Take in segments, and paths that end in them. Exact; all or nothing.

        What the tree has already is shared: copies of the rows go in favour of those there. A
        segment that stands on one which is not there any more is left out. A path whose label
        the tree knows moves on to the new end, if that is further on the same line.

        Args:
            segments: Parents first.
            paths: Label, and the place of the segment it ends in; oldest first.
            next_serial: Gives numbers for paths.
        """
        n_bytes, n_tokens = self.n_bytes, self.n_tokens
        ends: dict[int, Segment] = {}
        made: list[Segment] = []
        known = {path.label: path for path in self.paths.values()}
        n_paths = n_done = 0
        try:
            while n_done < len(segments):
                n_done += 1
                end = self._end_of(segments[n_done - 1], ends, segments, made)
                if end is not None:
                    ends[n_done - 1] = end
            for label, tip in paths:
                while tip != -1 and tip not in ends:
                    tip = segments[tip].parent
                if tip != -1 and ends[tip].parent is not None:
                    n_paths += self._set_path(label, ends[tip], known.get(label), next_serial)
        finally:
            for one in segments[n_done:]:  # something failed
                self._drop_copies(() if one.residency is None else one.residency.archived)
            for segment in reversed(made):
                if segment.parent is not None and segment in segment.parent.children:
                    self._free_unneeded(segment, [])
            for scope in {one.scope for one in segments}:
                root = self._roots.get(scope)
                if root is not None and not root.children:
                    self._roots.pop(scope)
        return Grafted(
            ends=ends,
            n_paths=n_paths,
            n_tokens=self.n_tokens - n_tokens,
            n_bytes=self.n_bytes - n_bytes,
        )

    def _end_of(
        self,
        one: Planted,
        ends: dict[int, Segment],
        segments: Sequence[Planted],
        made: list[Segment],
    ) -> Segment | None:
        parent = self._root(one.scope) if one.parent == -1 else ends.get(one.parent)
        if parent is None:
            self._drop_copies(() if one.residency is None else one.residency.archived)
            return None
        if one.storage is not None:
            return self._plant(one, one.storage, parent, made)
        ids = [*one.ids]
        up = one.parent
        while up != -1:
            ids[:0] = segments[up].ids
            up = segments[up].parent
        found, n = self.match(one.scope, ids)
        if found is None or n < len(ids):
            return None
        return self._share(self._cut(found, n - found.start))

    def _plant(
        self, one: Planted, storage: Storage, parent: Segment, made: list[Segment]
    ) -> Segment:
        segment = self._new_segment(one.scope, parent)
        segment.extend(one.ids, one.kinds)
        segment.residency = one.residency
        segment.move_to(storage, 0, [])
        made.append(segment)
        self._account(segment.n_bytes)
        self.n_tokens += segment.n_resident
        end = self._share(segment)
        self.idle.note(end)
        return end

    def _set_path(
        self, label: StepLabel, tip: Segment, known: Path | None, next_serial: Callable[[], int]
    ) -> int:
        """Let a path end in a segment. Returns how many paths are new there."""
        old = None if known is None else known.tip
        if known is not None and old is not None:
            is_held = known.is_running or old.n_pins > 0
            if is_held or old is tip or old not in tip.path():
                return 0
            old.paths.discard(known)
            known.tip = tip
            tip.paths.add(known)
        else:
            path = Path(label, next_serial(), tip, 0)
            path.is_running = False
            self.paths[path.serial] = path
            tip.paths.add(path)
        self._touch(tip)
        self.idle.note(tip)
        return 1
