"""Tokens that a conversation has cleared: their rows leave, and only whoever agreed builds on them.

A cleared token keeps its place and its position under another id, which equals no other. So a
prompt that still has the token whole does not match what was computed since without its rows, and
is computed again; a prompt that names it as cleared does. It must not know why tokens are cleared.

    resident   a b c d e f g h        after clearing c..e      a b C D E f g h
    asks with                a b c d e f ...  -> reuses  a b
    asks with                a b C D E f ...  -> reuses  a b C D E f g h
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sidequest_langchain.kv.releasing import ReleasingTree
from sidequest_langchain.kv.segment import Path, Segment, n_common


class ClearedId(int):
    """A token's id once its rows were cleared; equals only another one of the same token.

    In every other respect it is the token's id: it can be decoded, and counted with.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClearedId) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((ClearedId, int(self)))


@dataclass(frozen=True, slots=True)
class Line:
    """Where a prompt of which some tokens may be cleared is resident."""

    segments: tuple[Segment, ...]
    """From the first one to the one in which it ends."""
    n_tokens: int
    """Of the prompt's head."""

    def ids(self) -> tuple[int, ...]:
        """The ids of the head as they are resident, the cleared ones as such."""
        found = [token for segment in self.segments for token in segment.token_ids]
        return tuple(found[: self.n_tokens])

    def within(self, first: int, last: int) -> list[tuple[Segment, range]]:
        """The segments that hold tokens `first` to `last`, without `last`, and which of theirs."""
        found = []
        for segment in self.segments:
            a, b = max(first, segment.start), min(last, segment.end)
            if a < b:
                found.append((segment, range(a - segment.start, b - segment.start)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearedRows:
    """What clearing tokens of one segment did."""

    n_rows: int
    """That were there, and seen."""
    freed_bytes: int
    is_copied: bool
    """Whether copies lie in the archive."""


class ClearingTree(ReleasingTree):
    """A tree in which tokens can be cleared."""

    def match_cleared(
        self, scope: str, ids: Sequence[int], runs: Sequence[tuple[int, int]]
    ) -> Line:
        """Find a resident head of `ids`, of which some tokens may be cleared; changes nothing.

        Among those that hold all of what may be cleared: where most of it is, and then the longest.
        If there are none, the longest.

        Args:
            scope: Where to look.
            ids: A prompt's, none of them cleared.
            runs: First tokens, and those after the last ones, of what may be cleared; ascending.
        """
        best, best_key = Line((), 0), (0, 0, 0)
        ids = tuple(ids)
        end = runs[-1][1] if runs else 0
        stack: list[tuple[tuple[Segment, ...], int, int]] = []
        root = self._roots.get(scope)
        if root is not None:
            stack.append(((root,), 0, 0))
        while stack:
            line, n, n_cleared = stack.pop()
            for child in line[-1].children:
                if not child.n_tokens or n >= len(ids) or int(child.token_ids[0]) != ids[n]:
                    continue
                n_same = _n_same(child.token_ids, ids, n, runs)
                if not n_same:
                    continue
                here = (*line, child)
                cleared = n_cleared + sum(
                    isinstance(token, ClearedId) for token in child.token_ids[:n_same]
                )
                key = (min(n + n_same, end), cleared, n + n_same)
                if key > best_key:
                    best, best_key = Line(here[1:], n + n_same), key
                if n_same == child.n_tokens and not child.is_open:
                    stack.append((here, n + n_same, cleared))
        return best

    def readers_from(self, segment: Segment, position: int) -> tuple[list[Path], bool]:
        """Who reads tokens of a segment, or of what stands on it, from a position on.

        Returns:
            The paths that end behind it, and whether any of what ends behind it is pinned.
        """
        paths: list[Path] = []
        is_pinned = False
        stack = [segment]
        while stack:
            at = stack.pop()
            # A running path's tip may hold nothing yet: it stands where it will begin.
            if at.end > position:
                paths.extend(at.paths)
                is_pinned = is_pinned or at.n_pins > 0
            stack.extend(at.children)
        return paths, is_pinned

    def has_cleared_twin(self, segment: Segment, offsets: Iterable[int]) -> bool:
        """Whether a sibling begins with what the first of a segment's tokens would become.

        No two closed siblings may begin with the same token: such a segment cannot be cleared.
        """
        if 0 not in set(offsets) or segment.parent is None:
            return False
        first = ClearedId(segment.token_ids[0])
        others = (s for s in segment.parent.children if s is not segment and s.n_tokens)
        return any(other.token_ids[0] == first for other in others)

    def clear(
        self, segment: Segment, offsets: Iterable[int], *, is_hidden: bool = False
    ) -> ClearedRows:
        """Let the rows of some tokens leave, and give the tokens the ids of cleared ones; lossy.

        Equal to a mask over those rows, at their true positions, for every later query. Copies go
        to the archive first, if there is one with room. All or nothing. Tokens that are cleared
        already lose the rows that came back.

        Args:
            segment: Closed, and pinned by nobody.
            offsets: Which of its tokens, in any order.
            is_hidden: Whether attention shall only pass over the rows, which stay.

        Raises:
            ValueError: The segment is open, pinned or keeps rows by head, or has no such offset;
                or it has a cleared twin.
            MemoryError: There is no room for the smaller copy; `torch` says `RuntimeError`.
        """
        gone = sorted(self._checked(segment, offsets))
        if self.has_cleared_twin(segment, gone):
            msg = f"segment {segment.segment_id} has a sibling of which these tokens are cleared"
            raise ValueError(msg)
        seen = segment.n_resident - len(segment.hidden)
        freed, is_copied = 0, False
        if is_hidden:
            self.hide(segment, gone)
        else:
            is_copied = self.archive is not None and self.archive_rows(segment, gone)
            freed = self.evict(segment, gone)
        for at in gone:
            segment.token_ids[at] = ClearedId(segment.token_ids[at])
        n_rows = seen - (segment.n_resident - len(segment.hidden))
        return ClearedRows(n_rows=n_rows, freed_bytes=freed, is_copied=is_copied)


def seen_offsets(segment: Segment) -> set[int]:
    """The tokens of a segment of which every head has a row that attention sees."""
    managed = segment.residency
    if managed is None:
        return set(range(segment.n_tokens))
    found = {at for block in managed.packed for at in block.offsets}
    if managed.kept_by_head is None:
        found |= set(managed.dense)
    return found - managed.hidden


def without_marks(ids: Iterable[int]) -> tuple[int, ...]:
    """The ids of tokens, whether they are cleared or not."""
    return tuple(int(token) for token in ids)


def has_cleared(ids: Iterable[int]) -> bool:
    """Whether any of these tokens is cleared."""
    return any(isinstance(token, ClearedId) for token in ids)


def _n_same(mine: list[int], ids: tuple[int, ...], n: int, runs: Sequence[tuple[int, int]]) -> int:
    """Length of the common head of `mine` and `ids[n:]`; a run is all cleared here, or not."""
    most = min(len(mine), len(ids) - n)
    at = 0
    for first, last in [*runs, (len(ids), len(ids))]:
        for a, b, may_be in ((at, first - n, False), (first - n, last - n, True)):
            a, b = max(a, at), min(b, most)
            if a >= b:
                continue
            if may_be and isinstance(mine[a], ClearedId):
                theirs: tuple[int, ...] = tuple(ClearedId(token) for token in ids[n + a : n + b])
            else:
                theirs = ids[n + a : n + b]
            n_same = n_common(mine[a:b], theirs)
            at = a + n_same
            if n_same < b - a:
                return at
    return at
