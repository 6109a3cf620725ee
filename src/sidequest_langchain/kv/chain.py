"""One storage under several closed segments of a path.

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
    with a segment beside the path, or with one that is not next to them, stay, and so do managed
    ones.

    Args:
        path: Closed segments, each the next one's parent.
        most_rows: Rows that a joined storage may have; `None` is any number.
    """
    groups: list[list[Segment]] = []
    for segment in path:
        if groups and segment.storage is groups[-1][-1].storage:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    as_they_are = {id(group) for group in groups}
    kept = list(groups)  # so that no identity is given twice
    while len(groups) > MOST_BLOCKS:
        can_move = [all(_can_move(s, group) for s in group) for group in groups]
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


def leave(segment: Segment, storage: Storage, residency: Residency | None) -> int:
    """Give a segment a storage of its own; those before and after it in the old one get theirs.

    All or nothing: where there is no memory for that, nothing has happened.

    Args:
        segment: Closed; its old storage goes if it was its own.
        storage: Holds its rows, and no others.
        residency: What the storage's rows are.

    Returns:
        Bytes of copies that were there for the moment.
    """
    n_copied = 0
    if segment.fellows and segment.storage.changes_by_layer:
        others = [s for s in segment.fellows if s is not segment]
        n_copied = _keep(segment.storage, others)
    elif segment.fellows:
        at = segment.fellows.index(segment)
        sides = [side for side in (segment.fellows[:at], segment.fellows[at + 1 :]) if side]
        made = [Storage.joined([s.storage for s in of], [s.place for s in of]) for of in sides]
        for side, storage_of_side in zip(sides, made, strict=True):
            _lay(side, storage_of_side)
            n_copied += storage_of_side.n_bytes
    segment.move_to(storage, 0, [])
    segment.residency = residency
    return n_copied


def thin(segment: Segment, rows: Sequence[int], residency: Residency | None) -> int:
    """Let a segment lose rows where it lies, in a storage that changes by layer.

    All or nothing: where there is no memory for one layer, nothing has happened.

    Args:
        segment: Closed, alone or with fellows.
        rows: Of the storage, ascending, those of the segment that stay.
        residency: What these rows are.

    Returns:
        Bytes of copies that were there for the moment.
    """
    storage = segment.storage
    first, last = segment.place
    storage.keep([*range(first), *rows, *range(last, storage.capacity)])
    segment.residency = residency
    n_gone = last - first - len(rows)
    for s in segment.fellows:
        if s is not segment and s.place[0] >= last:
            s.move_to(storage, s.place[0] - n_gone, s.fellows)
    return storage.n_part_bytes


def unite(segments: Sequence[Segment], *, most_of_piece: int, most_of_layer: int) -> int:
    """Let closed segments of a path lie in one storage by layer, side by side; exact.

    Pieces are made to be by layer first, one after another; then all are copied layer by layer.

    Args:
        segments: All that lie in some storages, in the order of the path. None is packed.
        most_of_piece: Rows of a piece, which is there twice while it is made to be by layer.
        most_of_layer: Rows, of all layers, that are as many bytes as one layer of the storage may
            have, which is there twice while it is copied.

    Returns:
        Bytes that were there twice, at most.

    Raises:
        RuntimeError: There was no memory (torch's own error). Some stay where they are.
    """
    of_storage: dict[Storage, list[Segment]] = {}
    for segment in segments:
        of_storage.setdefault(segment.storage, []).append(segment)
    n_twice = 0
    run: list[list[Segment]] = []
    for group in of_storage.values():
        storage, n_rows = group[0].storage, sum(s.n_rows for s in group)
        if not _is_compact(group):
            continue  # there was no memory to give rows back that nobody has
        if storage.is_in_one and n_rows <= most_of_piece:
            storage = storage.by_layer(n_rows)
            n_twice = max(n_twice, storage.n_bytes)
            for s in group:
                s.move_to(storage, s.place[0], s.fellows)
        if not storage.changes_by_layer:
            continue
        n_rows += sum(of[0].storage.capacity for of in run)
        if n_rows > most_of_layer * storage.n_parts:
            n_twice = max(n_twice, _unite(run))
            run = []
        run.append(group)
    return max(n_twice, _unite(run))


def _unite(groups: Sequence[list[Segment]]) -> int:
    """Put groups of segments, each all of a storage by layer, into one storage.

    Returns:
        Bytes of copies that were there for the moment.
    """
    if len(groups) < 2:
        return 0
    sizes = [of[0].storage.capacity for of in groups]
    united = Storage.united([of[0].storage for of in groups])
    # A path need not run through a storage from its first row to its last: places tell.
    fellows = [s for of in groups for s in sorted(of, key=lambda s: s.place)]
    first = 0
    for group, n_rows in zip(groups, sizes, strict=True):
        for s in group:
            s.move_to(united, first + s.place[0], fellows)
        first += n_rows
    return united.n_part_bytes


def _is_compact(segments: Sequence[Segment]) -> bool:
    """Whether the rows of segments are all of a storage, but for room to grow at its end."""
    at = 0
    for first, last in sorted(s.place for s in segments):
        if first != at:
            return False
        at = last
    storage = segments[0].storage
    return at == storage.capacity or storage.is_in_one


def is_next(segment: Segment, follower: Segment) -> bool:
    """Whether the rows of a segment lie right before those of another in a storage they share."""
    is_shared = bool(segment.fellows) and segment.storage is follower.storage
    return is_shared and segment.place[1] == follower.place[0]


def settle(storage: Storage, fellows: list[Segment]) -> tuple[int, int]:
    """Give back the rows of those that left a shared storage.

    A view must not keep a large buffer alive, so the others move to a smaller one. Where there
    is no memory for that, it stays as it is and counts in full.

    Returns:
        The change in bytes, and bytes of copies that were there for the moment.
    """
    n_rows = sum(s.n_rows for s in fellows)
    if n_rows == storage.capacity:
        return 0, 0
    before = storage.n_bytes
    if not fellows:
        return -before, 0
    try:
        if storage.changes_by_layer:
            n_copied = _keep(storage, fellows)
            return storage.n_bytes - before, n_copied
        smaller = Storage.joined([storage] * len(fellows), [s.place for s in fellows])
    except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
        return 0, 0
    _lay(fellows, smaller)
    return smaller.n_bytes - before, smaller.n_bytes


def _keep(storage: Storage, segments: Sequence[Segment]) -> int:
    """Let all rows of a storage that changes by layer go, but for those of some segments.

    Returns:
        Bytes of copies that were there for the moment.
    """
    storage.keep([row for s in segments for row in range(*s.place)])
    _lay(segments, storage)
    return storage.n_part_bytes


def _can_move(segment: Segment, group: Sequence[Segment]) -> bool:
    return segment.residency is None and set(group).issuperset(segment.fellows)


def _lay(segments: Sequence[Segment], storage: Storage) -> None:
    """Let segments own the rows of a storage, one after another."""
    fellows = list(segments) if len(segments) > 1 else []
    first = 0
    for segment in segments:
        segment.move_to(storage, first, fellows)
        first += segment.n_rows
