"""Segments by token ids: find, cut, move and free them, with the bytes they hold.

It must not know whose the segments are; `tree` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv import by_head, chain
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.idle import IdleLeaves
from sidequest_langchain.kv.layout import KVLayout, bytes_per_token
from sidequest_langchain.kv.residency import Archived
from sidequest_langchain.kv.segment import Segment, n_common
from sidequest_langchain.kv.storage import Storage


class RadixTree:
    """One radix tree of segments for each scope, and the books over their storage."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.bytes_per_token = bytes_per_token(layout)
        self.n_bytes = 0
        """Bytes resident now: the sum of all live storages, kept up by every change."""
        self.peak_bytes = 0
        """Most bytes there at once, the copies of a moment included: what the allocator gave."""
        self.peak_resident_bytes = 0
        """The most that `n_bytes` ever was, copies of a moment left out."""
        self.n_tokens = 0
        self.n_changes = 0
        """How often what attention sees of some tokens changed: rows left, came or were hidden."""
        self.idle = IdleLeaves()
        self.archive: Archive | None = None
        """Where copies of rows go; set by the owner."""
        self.most_joined_rows: int | None = None
        """Rows that segments are joined to at most; `None` is any number."""
        self.scratches: list[Segment] = []
        """Segments beside the tree, which `segments` leaves out."""
        self._roots: dict[str, Segment] = {}
        self._clock = 0
        self._n_segments_made = 0

    def segments(self) -> Iterator[Segment]:
        """Every resident segment, parents first; the roots, which hold nothing, are left out."""
        stack = list(self._roots.values())
        while stack:
            segment = stack.pop()
            if segment.parent is not None:
                yield segment
            stack.extend(segment.children)

    def match(self, scope: str, ids: Sequence[int]) -> tuple[Segment | None, int]:
        """Find the longest resident head of `ids`; changes nothing.

        Returns:
            The segment in which it ends (`None`: nothing matched) and its length in tokens.
            Equality of ids decides, never a hash.
        """
        segment, n = self._roots.get(scope), 0
        found: Segment | None = None
        longest = 0
        ids = tuple(ids)
        while segment is not None:
            step: Segment | None = None
            next_id = ids[n] if n < len(ids) else None
            for child in segment.children:
                if not child.token_ids or child.token_ids[0] != next_id:
                    continue  # most of a thousand dead branches
                n_same = n_common(child.token_ids, ids, n)
                # Running tips may repeat a sibling's rows; where both match, the closed one
                # needs no cut, and it alone leads on.
                if n + n_same > longest or (n_same and n + n_same == longest and not child.is_open):
                    found, longest = child, n + n_same
                if n_same and n_same == child.n_tokens and not child.is_open:
                    step = child
            segment, n = step, n + (step.n_tokens if step is not None else 0)
        return found, longest

    def _root(self, scope: str) -> Segment:
        if scope not in self._roots:
            self._roots[scope] = Segment(0, scope, None, ())
        return self._roots[scope]

    def _new_segment(self, scope: str, parent: Segment) -> Segment:
        self._n_segments_made += 1
        segment = Segment(self._n_segments_made, scope, parent, self.layout)
        parent.children.append(segment)
        self._touch(segment)
        return segment

    def _touch(self, segment: Segment) -> None:
        self._clock += 1
        at: Segment | None = segment
        while at is not None:
            at.last_used = self._clock
            at = at.parent

    def _account(self, change: int, n_copied: int = 0) -> None:
        """Book a change of the resident bytes.

        Args:
            change: Bytes more, or fewer.
            n_copied: Bytes of new storages that were there together with what they replace.
        """
        before = self.n_bytes
        self.n_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.n_bytes, before + n_copied)
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.n_bytes)

    def scratch(self, path_tip: Segment, position: int, n_rows: int = 0) -> Segment:
        """An open segment beside the tree, for rows that are not to stay.

        It stands on the path to `path_tip`, and nothing stands on it. Its bytes count until
        `discard_scratch`.

        Args:
            path_tip: Where the path ends whose rows are seen.
            position: Of its first token, anywhere on the path or at its end.
            n_rows: Room for so many rows.
        """
        segment = Segment(0, path_tip.scope, path_tip, self.layout)
        segment.start = position
        segment.is_open = True
        self._account(segment.reserve(n_rows, n_rows) if n_rows else 0)
        self.scratches.append(segment)
        return segment

    def discard_scratch(self, segment: Segment) -> None:
        """Free what `scratch` gave."""
        self.scratches.remove(segment)
        self._account(-segment.free())

    def _cut(self, segment: Segment, n_head: int) -> Segment:
        """Make a segment end after `n_head` tokens and return what ends there.

        The tail keeps its identity, so that a running request's tip stays its tip; an open
        segment is cut even at its very end, since it will grow there. A managed segment stays
        so in both parts: rows that left stay away.
        """
        if n_head == segment.n_tokens and not segment.is_open:
            return segment
        parent = segment.parent
        assert parent is not None
        head = self._new_segment(segment.scope, parent)
        n_bytes, n_rows, n_copied = segment.n_bytes, segment.n_resident, 0
        try:
            if segment.fellows:
                chain.split(segment, head, n_head)
            elif segment.kept_by_head is not None:
                n_copied = by_head.split(segment, head, n_head)
            else:
                of_head, of_rest = segment.split_residency(n_head)
                head.copy_head(segment, n_head, of_head)
                segment.drop_head(n_head, of_rest)
                n_copied = head.n_bytes + segment.n_bytes
        except BaseException:  # no memory for the copies: as if nothing had been asked
            parent.children.remove(head)
            raise
        self._hold_twice(head, segment)
        parent.children.remove(segment)
        segment.parent = head
        head.children.append(segment)
        head.last_used = segment.last_used
        self._account(head.n_bytes + segment.n_bytes - n_bytes, n_copied)
        # Heads that keep rows of their own may need padding on both sides of the cut.
        self.n_tokens += head.n_resident + segment.n_resident - n_rows
        return head

    def _hold_twice(self, head: Segment, rest: Segment) -> None:
        """Copies in the archive that two segments have now need two to drop them."""
        if self.archive is not None:
            for ticket in {a.ticket for a in head.archived} & {a.ticket for a in rest.archived}:
                with contextlib.suppress(ArchiveError):  # the copy is lost already
                    self.archive.hold(ticket)

    def _drop_copies(self, gone: Iterable[Archived], left: Iterable[Archived] = ()) -> None:
        """Let the archive forget copies of which a segment has no row left."""
        if self.archive is not None:
            for ticket in {a.ticket for a in gone} - {a.ticket for a in left}:
                self.archive.drop(ticket)

    def _move_under(self, segment: Segment, parent: Segment) -> None:
        old = segment.parent
        assert old is not None
        old.children.remove(segment)
        parent.children.append(segment)
        segment.parent = parent
        self.idle.note(old)

    def _drop_head(self, segment: Segment, n_head: int) -> None:
        self.n_changes += 1  # what holds the head now may have lost rows of it
        storage, fellows, n_rows = segment.storage, segment.fellows, segment.n_resident
        archived = segment.archived
        if segment.kept_by_head is not None:
            change = by_head.drop_head(segment, n_head)
        else:
            change = segment.drop_head(n_head, segment.split_residency(n_head)[1])
        self._account(change, segment.n_bytes)
        if fellows:
            self._settle(storage, fellows)
        self.n_tokens -= n_rows - segment.n_resident
        self._drop_copies(archived, segment.archived)

    def _settle(self, storage: Storage, fellows: list[Segment]) -> int:
        """Give back what left a shared storage. Returns the change in bytes."""
        change, n_copied = chain.settle(storage, fellows)
        self._account(change, n_copied)
        return change

    def _join(self, segment: Segment) -> None:
        """Let the path to a closed segment be read from few storages; exact."""
        path = [s for s in segment.path() if s.n_tokens]
        for segments in chain.to_join(path, self.most_joined_rows):
            n_bytes = sum(s.n_bytes for s in segments)
            try:
                chain.join(segments)
            except (MemoryError, RuntimeError):  # only slower without; torch's is a RuntimeError
                return
            joined = segments[0].storage.n_bytes
            self._account(joined - n_bytes, joined)  # room to grow of sealed ones goes

    def _free_unneeded(self, segment: Segment, gone: list[Segment]) -> int:
        """Free a segment and then its ancestors, as far up as nobody needs them."""
        freed = 0
        at = segment
        shared: dict[int, tuple[Storage, list[Segment]]] = {}
        while at.parent is not None and not at.is_needed:
            parent = at.parent
            if at.fellows:
                shared[id(at.storage)] = at.storage, at.fellows
            freed += self._remove(at)
            gone.append(at)
            at = parent
        for storage, fellows in shared.values():
            freed -= self._settle(storage, fellows)
        if at.parent is None and not at.children:
            self._roots.pop(at.scope, None)
        return freed

    def _remove(self, segment: Segment) -> int:
        parent = segment.parent
        assert parent is not None
        parent.children.remove(segment)
        self.idle.forget(segment)
        self.idle.note(parent)
        self.n_tokens -= segment.n_resident
        self._drop_copies(segment.archived)
        freed = segment.free()
        self.n_bytes -= freed
        return freed
