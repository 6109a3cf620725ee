"""A thread's paths as plain records: taken from a tree, written to a file.

A snapshot copies no rows: it borrows the storages, whose rows stay as they are for it. What lies by
layer is copied when its turn comes to be written, a segment at a time. It must not know which
thread, nor what a label means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv.archive import Archive, Ticket
from sidequest_langchain.kv.clearing import ClearedId
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.sealed_form import Shape
from sidequest_langchain.kv.segment import Path, Segment
from sidequest_langchain.kv.storage import Storage
from sidequest_langchain.kv.thread_file import Item
from sidequest_langchain.labels import StepLabel


@dataclass(slots=True, kw_only=True)
class TakenSegment:
    """One segment as it was when the snapshot was taken."""

    parent: int
    """Its parent's place among those taken; -1 for one that starts a path."""
    segment: Segment
    ids: list[int]
    kinds: bytes
    residency: Residency | None
    storage: Storage | None
    """`None` once it was written."""
    place: tuple[int, int]
    is_idle: bool
    """Whether its rows left while nobody read them: without them it must not be used."""

    @property
    def n_orphaned_bytes(self) -> int:
        """Bytes that only the snapshot keeps: the tree let go of them meanwhile."""
        if self.storage is None or self.segment.storage.is_of(self.storage):
            return 0
        return self.storage.n_bytes


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """Some paths of a tree at one moment."""

    segments: list[TakenSegment]
    """Parents first."""
    paths: list[tuple[StepLabel, int]]
    """Label and tip of each, oldest first."""
    call_ids: frozenset[str]
    """Whose calls ended in these segments, of whatever thread."""
    tickets: list[Ticket] = field(default_factory=list)
    """Copies in the archive, held until `let_go`."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the segments."""
        return sum(len(s.ids) for s in self.segments)

    def n_orphaned_bytes(self) -> int:
        """Bytes that only the snapshot keeps; storages that segments share count once."""
        found = {id(s.storage): s.n_orphaned_bytes for s in self.segments}
        return sum(found.values())

    def let_go(self, archive: Archive | None) -> None:
        """Let the archive drop what was held."""
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            if archive is not None:
                archive.drop(ticket)


def take(
    paths: Iterable[Path], archive: Archive | None, is_idle: Callable[[Segment], bool]
) -> Snapshot:
    """Take down some paths that do not run; copies no rows, changes nothing.

    Args:
        paths: Of one tree, oldest first.
        archive: Where the tree's copies are; those of these segments are held.
        is_idle: Whether a segment's rows left while nobody read them.
    """
    places: dict[Segment, int] = {}
    taken: list[TakenSegment] = []
    tips: list[tuple[StepLabel, int]] = []
    lent: dict[int, Storage] = {}
    tickets: dict[str, Ticket] = {}
    for path in paths:
        up = -1
        for segment in path.tip.path():
            if segment not in places:
                places[segment] = len(taken)
                if id(segment.storage) not in lent:
                    lent[id(segment.storage)] = segment.storage.lent()
                taken.append(
                    TakenSegment(
                        parent=up,
                        segment=segment,
                        ids=list(segment.token_ids),
                        kinds=bytes(segment.kinds),
                        residency=segment.residency,
                        storage=lent[id(segment.storage)],
                        place=segment.place,
                        is_idle=bool(segment.archived) and is_idle(segment),
                    )
                )
                tickets.update((a.ticket.key, a.ticket) for a in segment.archived)
            up = places[segment]
        tips.append((path.label, up))
    held = []
    for ticket in tickets.values():
        if archive is not None and archive.has(ticket):
            archive.hold(ticket)
            held.append(ticket)
    calls = frozenset(p.label.call_id for segment in places for p in segment.paths)
    return Snapshot(segments=taken, paths=tips, call_ids=calls, tickets=held)


def items_of(snapshot: Snapshot, archive: Archive | None) -> tuple[list[Item], dict[str, Any]]:
    """The tensors to write, and the facts to go with them.

    Rows are let go of as they are written. A segment that must not be used without copies that
    are lost is left out, with all that stands on it.
    """
    copies = _copies(snapshot, archive)
    numbers: dict[int, int] = {}
    items: list[Item] = []
    segments: list[dict[str, Any]] = []
    for at, one in enumerate(snapshot.segments):
        is_rooted = one.parent == -1 or one.parent in numbers
        archived = () if one.residency is None else one.residency.archived
        found = [(copies[a.ticket.key], a) for a in archived if a.ticket.key in copies]
        if not is_rooted or (one.is_idle and len(found) < len(archived)):
            one.storage = one.residency = None
            continue
        number = numbers[at] = len(segments)
        facts: dict[str, Any] = {"up": numbers.get(one.parent, -1), "scope": one.segment.scope}
        items += _numbers(f"{number}.", one)
        items += _rows(f"{number}.", one)
        if one.residency is not None:
            facts["bits"] = [block.bits for block in one.residency.packed]
            facts["copies"] = [[place, copy.bits] for place, copy in found]
        for n, (_, copy) in enumerate(found):
            items.append(small(f"{number}.copy.{n}", [*copy.offsets, *copy.rows]))
        if one.is_idle:
            facts["idle"] = True
        segments.append(facts)
    paths = []
    for label, tip in snapshot.paths:
        up = tip
        while up not in numbers and up != -1:
            up = snapshot.segments[up].parent
        if up != -1:
            paths.append({"label": asdict(label), "tip": numbers[up]})
    facts_of_copies = []
    for ticket in snapshot.tickets:
        if ticket.key in copies and archive is not None:
            number = copies[ticket.key]
            tensors, meta = archive.get(ticket)
            facts_of_copies.append(meta)
            items += [
                Item(Shape.of(f"copy.{number}.{name}", t), _reader(archive, ticket, name))
                for name, t in tensors.items()
            ]
    return items, {"segments": segments, "paths": paths, "copies": facts_of_copies}


def _copies(snapshot: Snapshot, archive: Archive | None) -> dict[str, int]:
    """Numbers of the copies that can be read, by the keys of their tickets."""
    found: dict[str, int] = {}
    for ticket in snapshot.tickets:
        try:
            if archive is not None:
                archive.get(ticket)
                found[ticket.key] = len(found)
        except ArchiveError:
            continue
    return found


def _reader(archive: Archive, ticket: Ticket, name: str) -> Callable[[], Tensor]:
    return lambda: archive.get(ticket)[0][name]


def _numbers(start: str, one: TakenSegment) -> list[Item]:
    """Ids, kinds, and which rows there are."""
    kinds = torch.frombuffer(bytearray(one.kinds), dtype=torch.uint8)
    ids = [-1 - token if isinstance(token, ClearedId) else token for token in one.ids]
    found = [small(start + "ids", ids), _given(start + "kinds", kinds)]
    managed = one.residency
    if managed is not None:
        if managed.kept is not None:
            found.append(small(start + "kept", managed.kept))
        if managed.hidden:
            found.append(small(start + "hidden", sorted(managed.hidden)))
        if managed.kept_by_head is not None:
            found.append(_given(start + "by_head", managed.kept_by_head.to(torch.int32)))
        for n, block in enumerate(managed.packed):
            found.append(small(f"{start}packed.{n}", block.offsets))
    return found


def _rows(start: str, one: TakenSegment) -> list[Item]:
    """The rows that are resident; the last of them that is written lets all go."""
    assert one.storage is not None
    likes = {f"rows.{name}": like for name, like in one.storage.likes(*one.place).items()}
    blocks: dict[str, Tensor] = {}
    for n, block in enumerate(() if one.residency is None else one.residency.packed):
        blocks |= {f"block.{n}.{name}": t for name, t in block.tensors().items()}
    left = {*likes, *blocks}

    def loader(name: str) -> Callable[[], Tensor]:
        def load() -> Tensor:
            if name in likes:
                assert one.storage is not None
                tensor = one.storage.tensors(*one.place)[name.removeprefix("rows.")]
            else:
                tensor = blocks.pop(name)
            left.discard(name)
            if not left:
                one.storage = one.residency = None
            return tensor

        return load

    return [
        Item(Shape.of(start + name, tensor), loader(name))
        for name, tensor in (likes | blocks).items()
    ]


def small(name: str, numbers: Sequence[int]) -> Item:
    """Numbers that a reader wants before the rows."""
    return _given(name, torch.tensor(numbers, dtype=torch.int32))


def _given(name: str, tensor: Tensor) -> Item:
    return Item(Shape.of(name, tensor), lambda: tensor, is_small=True)
