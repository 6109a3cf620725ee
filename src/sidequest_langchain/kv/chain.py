"""One storage under several closed segments that follow one another on a path.

A path of many short segments costs attention one call each; in one storage they are one block.
Every segment keeps its own rows, tokens and claims. It must not know who needs which.

    storage    0 ........ a ........ b ........ capacity
    segments   |  first   |  second  |  third   |
"""

from __future__ import annotations

from collections.abc import Sequence

from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage

MOST_BLOCKS = 3
"""Storages that a path is read from before some are joined, its tip not counted."""


def join(segments: Sequence[Segment]) -> None:
    """Move closed segments, each the next one's parent, into one storage; exact.

    No segment needs more or fewer bytes than it did. For the moment of the copy the rows are
    there twice, as when a segment grows.
    """
    _lay(segments, Storage.joined([s.storage for s in segments], [s.place for s in segments]))


def to_join(path: Sequence[Segment], most_rows: int | None = None) -> list[list[Segment]]:
    """Which neighbours on a path should move together, so that it has few storages again.

    The smallest go first, so that a long trunk is seldom copied. Those that share a storage
    with a segment beside the path stay, and so do managed ones.

    Args:
        path: Closed segments, each the next one's parent.
        most_rows: Rows that a joined storage may have; `None` is any number.
    """
    on_path = set(path)
    groups: list[list[Segment]] = []
    for segment in path:
        if groups and segment.storage is groups[-1][-1].storage:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    as_they_are = {id(group) for group in groups}
    kept = list(groups)  # so that no identity is given twice
    while len(groups) > MOST_BLOCKS:
        can_move = [all(_can_move(s, on_path) for s in group) for group in groups]
        n_rows = [sum(s.n_rows for s in group) for group in groups]
        pairs = [i for i in range(len(groups) - 1) if can_move[i] and can_move[i + 1]]
        if most_rows is not None:
            pairs = [i for i in pairs if n_rows[i] + n_rows[i + 1] <= most_rows]
        if not pairs:
            break
        least = min(pairs, key=lambda i: n_rows[i] + n_rows[i + 1])
        groups[least : least + 2] = [groups[least] + groups[least + 1]]
    del kept
    return [group for group in groups if id(group) not in as_they_are]


def split(segment: Segment, head: Segment, n_head: int) -> None:
    """Let `head` have the first tokens of a segment that shares its storage, where they are."""
    first, _ = segment.place
    n_rows = segment.n_rows_before(n_head)
    of_head, of_rest = segment.split_residency(n_head)
    fellows = segment.fellows
    fellows.insert(fellows.index(segment), head)
    head.take_head(segment, n_head, of_head)
    head.move_to(segment.storage, first, fellows)
    segment.forget_head(n_head, of_rest)
    segment.start += n_head
    segment.move_to(segment.storage, first + n_rows, fellows)


def leave(segment: Segment, storage: Storage, residency: Residency | None) -> None:
    """Give a segment a storage of its own; those before and after it in the old one get theirs.

    All or nothing: where there is no memory for both, nothing has happened.

    Args:
        segment: Closed; its old storage goes if it was its own.
        storage: Holds its rows, and no others.
        residency: What the storage's rows are.
    """
    at = segment.fellows.index(segment) if segment.fellows else 0
    sides = [side for side in (segment.fellows[:at], segment.fellows[at + 1 :]) if side]
    made = [Storage.joined([s.storage for s in side], [s.place for s in side]) for side in sides]
    for side, storage_of_side in zip(sides, made, strict=True):
        _lay(side, storage_of_side)
    segment.move_to(storage, 0, [])
    segment.residency = residency


def is_next(segment: Segment, follower: Segment) -> bool:
    """Whether the rows of a segment lie right before those of another in a storage they share."""
    is_shared = bool(segment.fellows) and segment.storage is follower.storage
    return is_shared and segment.place[1] == follower.place[0]


def settle(storage: Storage, fellows: list[Segment]) -> int:
    """Give back the rows of those that left a shared storage. Returns the change in bytes.

    A view must not keep a large buffer alive, so the others move to a smaller one. Where there
    is no memory for that, it stays as it is and counts in full.
    """
    n_rows = sum(s.n_rows for s in fellows)
    if n_rows == storage.capacity:
        return 0
    if not fellows:
        return -storage.n_bytes
    try:
        smaller = Storage.joined([storage] * len(fellows), [s.place for s in fellows])
    except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
        return 0
    _lay(fellows, smaller)
    return smaller.n_bytes - storage.n_bytes


def _can_move(segment: Segment, on_path: set[Segment]) -> bool:
    return segment.residency is None and on_path.issuperset(segment.fellows)


def _lay(segments: Sequence[Segment], storage: Storage) -> None:
    """Let segments own the rows of a storage, one after another."""
    fellows = list(segments) if len(segments) > 1 else []
    first = 0
    for segment in segments:
        segment.move_to(storage, first, fellows)
        first += segment.n_rows
