"""Threads come back from files; it must not know messages.

What is read is given room first, inside of the budget, and checked to its last byte before any of
it is in the tree. The engine's thread is asked twice, between two steps: what there is room for,
and to take in what was read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.lasting import LastingFingerprint
from sidequest_langchain.engine.replies import Reply
from sidequest_langchain.engine.room import Room
from sidequest_langchain.engine.tokenizer import Template
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.kv.archive import Ticket
from sidequest_langchain.kv.grafting import Grafted, Planted
from sidequest_langchain.kv.loaded_thread import LoadedSegment, LoadedThread, loaded_thread
from sidequest_langchain.kv.receipts import LoadReceipt
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.sealed_form import Shape
from sidequest_langchain.kv.storage import Storage
from sidequest_langchain.kv.thread_file import ThreadFile

ACTS = "acts"
"""Name of the field that says what may have been done to the rows."""
EXACT_ROWS, MANAGED_ROWS = "exact", "managed"


@dataclass(slots=True, kw_only=True)
class _Plan:
    """Which segments of a file are to be read, and what came of it."""

    resident: set[int]
    """Numbers of those that the tree has."""
    chosen: set[int] = field(default_factory=set)
    n_bytes: int = 0
    n_tokens: int = 0
    """Promised for those chosen."""
    storages: dict[int, Storage] = field(default_factory=dict)
    residencies: dict[int, Residency | None] = field(default_factory=dict)
    copies: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors of archived copies, by their numbers."""


class ThreadLoader:
    """Loads threads into one engine's tree."""

    def __init__(self, core: EngineCore, config: CacheConfig, made_of: LastingFingerprint) -> None:
        self._core, self._made_of = core, made_of
        self._room = Room(core, config)
        self.has_loaded_managed = False
        """Whether rows came in to which lossy acts may have been done."""

    def load(self, path: Path, thread_id: str | None, template: Template | None) -> LoadReceipt:
        """Take in what was saved, as far as the budget has room; exact.

        The newest paths come first. Idle segments of other threads make room, least recently used
        first, as for any request; no row is lost otherwise. What the tree has is shared.

        Args:
            path: The file.
            thread_id: Whose it must be; `None` is anybody's.
            template: The chat template in use, if it is not the tokenizer's own.

        Raises:
            SavedThreadError: The file is absent, damaged, another thread's, or was made by another
                model; nothing was loaded.
            BudgetExceeded: Nothing of it fits into the budget; nothing was lost.
            CacheError: The model's weights are offloaded.
        """
        begun = time.perf_counter()
        core = self._core
        with ThreadFile(path) as file:
            self._check(file, thread_id, template)
            thread = loaded_thread(file, core.adapter.layout, core.adapter.vocab_size)
            replies = _replies_of(file)
            plan = core.call(lambda: self._plan(thread)).result()
            is_read = False
            try:
                self._read(file, thread, plan)
                file.finish()
                self._keep_copies(thread, plan)
                is_read = True
            finally:
                if not is_read:
                    core.call(lambda: core.tree.promise(-plan.n_bytes, -plan.n_tokens)).result()
            done = core.call(lambda: self._graft(thread, plan)).result()
            if file.about.get(ACTS) == MANAGED_ROWS:
                self.has_loaded_managed = True
        for message_id, reply in replies.items():
            if core.replies.get(message_id) is None:
                core.replies.add(message_id, reply)
        n_shared = sum(len(thread.segments[n].ids) for n in plan.resident if n in done.ends)
        n_all = sum(len(s.ids) for s in thread.segments)
        new = [thread.segments[n] for n in plan.storages if n in done.ends]
        n_new = sum(len(segment.ids) for segment in new)
        return LoadReceipt(
            thread_id=str(file.facts.get("thread")),
            file=path,
            n_segments=len(new),
            n_paths=done.n_paths,
            n_tokens=n_new,
            n_shared_tokens=n_shared,
            n_left_out_tokens=n_all - n_shared - n_new,
            n_replies=len(replies),
            n_bytes=done.n_bytes,
            seconds=time.perf_counter() - begun,
        )

    def _check(self, file: ThreadFile, thread_id: str | None, template: Template | None) -> None:
        """Refuse a file of another model, or of another thread.

        Raises:
            SavedThreadError: It is one, or is damaged.
        """
        now = self._made_of.fields(template)
        if file.about.get(ACTS) == MANAGED_ROWS and self._core.manager is None:
            now[ACTS] = EXACT_ROWS
        other = [name for name in now if file.about.get(name) != now[name]]
        if other:
            file.finish()  # damage is to be called damage
            name = other[0]
            file.refuse(
                f"it was made with {name} {file.about.get(name)!r}, but it is {now[name]!r} now; "
                "the thread is computed anew when it goes on",
                field=name,
            )
        if thread_id is not None and file.facts.get("thread") != thread_id:
            file.finish()
            file.refuse(f"it is not of thread {thread_id!r}")

    def _read(self, file: ThreadFile, thread: LoadedThread, plan: _Plan) -> None:
        """Read the rows of the chosen segments, each to where its layers run."""
        layout = self._core.adapter.layout
        segments = thread.segments
        copies: set[int] = set()
        if self._core.tree.archive is not None:
            copies = {c[0] for n in plan.chosen for c in segments[n].copies}
        n_left = dict.fromkeys(plan.chosen, 0)

        def is_wanted(shape: Shape) -> bool:
            owner, name = shape.name.split(".", 1)
            if owner == "copy":
                return int(name.split(".", 1)[0]) in copies
            return int(owner) in plan.chosen

        for shape in filter(is_wanted, file.shapes):
            owner = shape.name.partition(".")[0]
            if owner != "copy":
                n_left[int(owner)] += 1
        for full_name, tensor in file.rows(is_wanted):
            owner, name = full_name.split(".", 1)
            if owner == "copy":
                number, name = name.split(".", 1)
                plan.copies.setdefault(int(number), {})[name] = tensor
                continue
            segment = segments[int(owner)]
            segment.tensors[name] = tensor
            n_left[segment.number] -= 1
            if not n_left[segment.number]:
                try:
                    plan.storages[segment.number] = segment.storage(layout)
                    plan.residencies[segment.number] = segment.residency(layout)
                except (ValueError, IndexError, TypeError) as error:
                    file.finish()
                    file.refuse(f"its rows are none ({error})", error)
                segment.tensors.clear()

    def _keep_copies(self, thread: LoadedThread, plan: _Plan) -> None:
        """Put archived copies into this process's archive; what it cannot take is left out."""
        archive = self._core.tree.archive
        tickets: dict[int, Ticket] = {}
        for number in list(plan.copies):
            tensors = plan.copies.pop(number)
            kept = None if archive is None else archive.put(tensors, thread.copies[number])
            if kept is not None:
                tickets[number] = kept
        n_owners = dict.fromkeys(tickets, 0)
        for number in sorted(plan.chosen):
            segment = thread.segments[number]
            wanted = {copy for copy, *_ in segment.copies}
            if segment.is_idle and not wanted <= tickets.keys():
                del plan.storages[number], plan.residencies[number]
                continue
            for copy in wanted & tickets.keys():
                segment.tickets[copy] = tickets[copy]
                n_owners[copy] += 1
                if n_owners[copy] > 1 and archive is not None:
                    archive.hold(tickets[copy])
            residency = plan.residencies[number]
            if residency is not None or segment.tickets:
                plan.residencies[number] = segment.archived_in(residency)
        for copy, ticket in tickets.items():
            if not n_owners[copy] and archive is not None:
                archive.drop(ticket)

    # -- in the engine's thread ------------------------------------------------------------

    def _plan(self, thread: LoadedThread) -> _Plan:
        """What is to be read; room for it is promised.

        Raises:
            BudgetExceeded: There is room for nothing of it.
        """
        tree, segments = self._core.tree, thread.segments
        plan = _Plan(resident=self._resident(thread))
        usable = self._usable(thread)
        missing = [s for s in segments if s.number in usable - plan.resident]
        n_bytes, n_tokens = _amount(missing)
        self._room.make(n_bytes, n_tokens)
        bytes_left, tokens_left = self._room.left()
        for _, tip in reversed(thread.paths):
            for segment in thread.line(tip):
                if segment.number in plan.resident or segment.number in plan.chosen:
                    continue
                is_over = segment.n_bytes > bytes_left or segment.n_resident > tokens_left
                if is_over or segment.number not in usable:
                    break
                plan.chosen.add(segment.number)
                bytes_left -= segment.n_bytes
                tokens_left -= segment.n_resident
        if missing and not plan.chosen and not plan.resident:
            msg = (
                f"nothing of the saved thread fits: {n_bytes:,} bytes in {n_tokens:,} rows are to "
                f"come back, and the cache's budget has room for {bytes_left:,.0f} bytes and "
                f"{tokens_left:,.0f} rows; give a larger budget, release what is not needed, or "
                "let the thread's next call compute its prompt"
            )
            raise BudgetExceeded(msg)
        plan.n_bytes, plan.n_tokens = _amount([segments[n] for n in plan.chosen])
        tree.promise(plan.n_bytes, plan.n_tokens)
        return plan

    def _resident(self, thread: LoadedThread) -> set[int]:
        found: set[int] = set()
        inner = {s.parent for s in thread.segments}
        for leaf in (s for s in thread.segments if s.number not in inner):
            n = self._core.tree.n_known(leaf.scope, thread.path_ids(leaf.number))
            found |= {s.number for s in thread.line(leaf.number) if s.end <= n}
        return found

    def _usable(self, thread: LoadedThread) -> set[int]:
        """Segments that have all they need: no idle ones without a tier for their copies."""
        found: set[int] = set()
        for segment in thread.segments:
            is_rooted = segment.parent == -1 or segment.parent in found
            if is_rooted and not (segment.is_idle and self._core.tree.archive is None):
                found.add(segment.number)
        return found

    def _graft(self, thread: LoadedThread, plan: _Plan) -> Grafted:
        tree, manager = self._core.tree, self._core.manager
        tree.promise(-plan.n_bytes, -plan.n_tokens)
        planted = [
            Planted(
                parent=s.parent,
                scope=s.scope,
                ids=s.ids,
                kinds=s.kinds,
                storage=plan.storages.get(s.number),
                residency=plan.residencies.get(s.number),
            )
            for s in thread.segments
        ]
        done = tree.graft(planted, thread.paths, tree.next_serial)
        for number, end in done.ends.items():
            if manager is not None and thread.segments[number].is_idle and end.archived:
                manager.monitor.notes_of(end).is_archived_idle = True
        return done


def _amount(segments: list[LoadedSegment]) -> tuple[int, int]:
    """Bytes and rows that segments take once they are resident."""
    return sum(s.n_bytes for s in segments), sum(s.n_resident for s in segments)


def _replies_of(file: ThreadFile) -> Mapping[str, Reply]:
    """The replies that were saved.

    Raises:
        SavedThreadError: They are none.
    """
    found: dict[str, Reply] = {}
    try:
        for number, (message_id, text, thread_id) in enumerate(file.facts["replies"]):
            ids = tuple(file.small[f"reply.{number}"].tolist())
            found[str(message_id)] = Reply(text=str(text), token_ids=ids, thread_id=thread_id)
    except (KeyError, TypeError, ValueError) as error:
        file.refuse("its index names no replies", error)
    return found
