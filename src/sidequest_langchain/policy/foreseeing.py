"""Rows that idle in a slower tier come back before the path that will read them begins.

Only where the budget has room as it is: no cycle runs for a guess. Exact. It must not know who
foresees what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sidequest_langchain.kv.archive_entry import Ticket
from sidequest_langchain.kv.archive_file import Contents
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog
from sidequest_langchain.policy.returning import Returns

REASON = "its path is about to go on"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Foreseen:
    """Segments that are to come back; room for them is promised, and their copies are held."""

    segments: tuple[tuple[Segment, int, int], ...]
    """Each with the bytes and the rows that were promised for it."""
    tickets: tuple[Ticket, ...]
    made_of: Mapping[str, str]
    """What rows depended on when it was planned."""


class Foresight:
    """Brings idle rows back ahead of time; to be asked in the engine's thread."""

    def __init__(
        self,
        tree: SegmentTree,
        returns: Returns,
        log: ReceiptLog,
        *,
        is_due: Callable[[int], bool],
        refresh: Callable[[], None],
    ) -> None:
        """Make it.

        Args:
            tree: Changed.
            returns: Restores.
            log: Gets the receipts.
            is_due: Whether a cycle would begin if so many bytes came.
            refresh: Looks whether the model was changed, so that older copies are strange.
        """
        self._tree, self._returns, self._log = tree, returns, log
        self._is_due, self._refresh = is_due, refresh

    def plan(self, segments: Iterable[Segment]) -> Foreseen | None:
        """What is to come back of some segments, as far as there is room; `None` is nothing.

        Args:
            segments: Closed ones, parents first.
        """
        tree, archive = self._tree, self._tree.archive
        if archive is None:
            return None
        self._refresh()
        chosen: list[tuple[Segment, int, int]] = []
        tickets: dict[str, Ticket] = {}
        for segment in dict.fromkeys(segments):
            if segment.is_open or not self._returns.is_left_idle(segment):
                continue
            n_bytes = self._returns.bytes_away(segment)
            n_rows = segment.n_tokens - segment.n_resident
            if self._is_due(n_bytes) or not all(archive.has(a.ticket) for a in segment.archived):
                break
            tree.promise(n_bytes, n_rows)
            chosen.append((segment, n_bytes, n_rows))
            tickets.update((a.ticket.key, a.ticket) for a in segment.archived)
        for ticket in tickets.values():
            archive.hold(ticket)
        if not chosen:
            return None
        return Foreseen(
            segments=tuple(chosen), tickets=tuple(tickets.values()), made_of=archive.fingerprint
        )

    def finish(
        self, foreseen: Foreseen, read: Mapping[str, Contents] | None = None
    ) -> tuple[ActReceipt, ...]:
        """Bring back what was planned and is still wanted; the promise ends.

        Args:
            foreseen: From `plan`.
            read: Copies that were read meanwhile, by the keys of their tickets.
        """
        tree, archive = self._tree, self._tree.archive
        self._refresh()
        if read and archive is not None and archive.fingerprint == foreseen.made_of:
            tree.read_ahead.update(read)
        receipts: list[ActReceipt] = []
        try:
            for segment, n_bytes, n_rows in foreseen.segments:
                if archive is not None and self._is_wanted(segment, receipts):
                    receipts.append(self._returns.bring_back(segment, REASON))
                tree.promise(-n_bytes, -n_rows)
        finally:
            tree.read_ahead.clear()
            for ticket in foreseen.tickets:
                if archive is not None:
                    archive.drop(ticket)
            self._log.add(receipts)
        return tuple(receipts)

    def _is_wanted(self, segment: Segment, before: list[ActReceipt]) -> bool:
        """Whether it still idles there (what was freed does not), and all before it came back."""
        return self._returns.is_left_idle(segment) and all(r.outcome == "done" for r in before)
