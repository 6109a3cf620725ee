"""How much may stay, in bytes and in rows, and how much there is: the numbers of a budget."""

from __future__ import annotations

from dataclasses import dataclass

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.facts import Unit
from sidequest_langchain.policy.gathering import running_tips
from sidequest_langchain.policy.schedule import budget_in_bytes, limit_in_bytes, to_free

GROWTH_ROWS = 32
"""By which a tip grows at least, about."""
LONG_ROWS = 4096
"""Rows that attention reads where they lie, and of which more would gain little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Rows that may be there twice for a moment, in two ways of making a path quick to read."""

    of_segment: int
    """While a segment is copied: when it becomes part of a longer one, or loses rows."""
    by_layer: int
    """While a storage changes layer by layer; 0 where segments have storages of their own."""
    staged: int | None = None
    """On the way to the archive; `None` is a segment at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit. Rows count as the bytes that they take at full precision."""

    unit: Unit
    hard: int | None
    """The budget, in bytes: a promise. `None` where only the schedule limits."""
    soft: int | None
    """The budget, or less by the schedule: what cycles aim at."""


class Limits:
    """The limits of one tree."""

    def __init__(self, tree: SegmentTree, config: CacheConfig, *, device_bytes: int | None) -> None:
        self._tree, self._config = tree, config
        self.budget_bytes = budget_in_bytes(config, device_bytes=device_bytes)
        """What may stay, in bytes at the allocator."""
        self.budget_rows = config.budget_tokens
        """What may stay, in rows of whatever precision."""
        self._imagined: dict[tuple[Unit, int], int] = {}
        self._settled = 0
        """Bytes that were left after the last cycle."""

    def limits(self) -> list[Limit]:
        """The limits of this moment: rows first, since fewer rows are fewer bytes."""
        found = []
        if self.budget_rows is not None:
            rows = self.budget_rows * self._tree.bytes_per_token
            found.append(Limit(unit="rows", hard=rows, soft=rows))
        soft = self.budget_bytes
        if self._config.schedule is not None:
            soft = limit_in_bytes(
                soft,
                self._config.schedule,
                n_seen=max((tip.end for tip in running_tips(self._tree)), default=0),
                n_tokens=sum(s.n_tokens for s in self._tree.segments()),
                bytes_per_row=self._tree.bytes_per_token,
            )
        if soft is not None:
            found.append(Limit(unit="bytes", hard=self.budget_bytes, soft=soft))
        return found

    def amount(self, unit: Unit, n_coming: int = 0) -> int:
        """What counts now: what observe mode imagines gone, and hidden rows, do not.

        Args:
            unit: Of the limit.
            n_coming: Bytes that are about to be added.
        """
        tree = self._tree
        n_hidden = 0
        if self._config.mask_only:
            n_hidden = sum(len(s.hidden) for s in tree.segments())
        held = tree.n_bytes if unit == "bytes" else tree.n_tokens * tree.bytes_per_token
        imagined = sum(n for (of, _), n in self._imagined.items() if of == unit)
        return held + n_coming - imagined - n_hidden * tree.bytes_per_token

    def wanted(self, limit: Limit, n_coming: int = 0) -> int:
        """Bytes that a cycle would give back."""
        config = self._config
        return to_free(
            self.amount(limit.unit, n_coming),
            limit.soft,
            trigger=config.trigger,
            target=config.target,
        )

    def to_evict(self, limit: Limit, n_coming: int = 0, *, must_fit: bool = False) -> int:
        """Bytes of those wanted for which rows may be lost.

        In bytes, packing gives room in good time, and rows go only for what does not fit packed:
        with a fifth of the budget always free they would go for nothing. In rows, packing frees
        nothing, and few cycles that free much are better than many.

        Args:
            limit: Which.
            n_coming: Bytes that are about to be added.
            must_fit: They may not exceed the budget, as a step's own rows may for that step.
        """
        if limit.unit == "rows" or limit.soft is None:
            return self.wanted(limit, n_coming)
        coming = n_coming if must_fit else 0
        beyond = self.amount("bytes", coming) - limit.soft
        return max(self.excess(limit), beyond, beyond - coming + self._slack(limit.soft))

    def are_due(self, n_coming: int = 0) -> bool:
        """Whether a cycle would have something to give back.

        Between trigger and budget, not before there is more than the last cycle had to leave.
        """
        amount = self.amount("bytes")
        self._settled = min(self._settled, amount)
        for limit in self.limits():
            if not self.wanted(limit, n_coming):
                continue
            if limit.unit == "rows" or limit.soft is None:
                return True
            bearable = min(limit.soft, self._settled + self._slack(limit.soft))
            if amount + n_coming > bearable:
                return True
        return False

    def settle(self) -> None:
        """A cycle is over: what is left now could not go, or need not."""
        self._settled = self.amount("bytes")

    def _slack(self, n_bytes: int) -> int:
        """Of a limit, what stays free where rows are lost: room for copies, and until the next."""
        return round((1 - self._config.trigger) / 4 * n_bytes)

    def excess(self, limit: Limit) -> int:
        """Bytes above the budget. Rows of the step to come may exceed it for that step."""
        if limit.hard is None or self._config.observe:
            return 0
        return max(0, self.amount(limit.unit) - limit.hard)

    def is_tight(self, n_coming: int) -> bool:
        """Whether a budget would be exceeded."""
        return any(
            limit.hard is not None and self.amount(limit.unit, n_coming) > limit.hard
            for limit in self.limits()
        )

    def copies(self, block_rows: int) -> Copies:
        """Rows that may be copied at once, so that copies are few next to the budget.

        They must fit between where cycles begin and the budget, beside a step's own rows and room
        to grow. A budget in rows bounds time, which many short segments cost: there they take all
        of that, and what a prefill's chunk may take, which comes when they are gone.

        Args:
            block_rows: Rows of a chunk.
        """
        of_unit = {limit.unit: limit.hard for limit in self.limits() if limit.hard is not None}
        if "bytes" in of_unit or self.budget_rows is None:
            spare = self._slack(of_unit.get("bytes", 2**62)) // self._tree.bytes_per_token
            return Copies(of_segment=max(block_rows, spare), by_layer=0)
        between = round((1 - self._config.trigger) * self.budget_rows)
        spare = min(LONG_ROWS, between + block_rows - GROWTH_ROWS)
        by_layer = max(0, min(spare // 4, -(-self.budget_rows // len(self._tree.layout))))
        # Where nothing may leave there may be more than that already: then the budget decides.
        held = -(-self._tree.n_bytes // self._tree.bytes_per_token)
        room = max(0, self.budget_rows + block_rows - held)
        return Copies(
            of_segment=min(room, max(block_rows, spare - by_layer)),
            by_layer=min(room, by_layer),
            # Of a step's rows, those to grow are free while a chunk is read, and only those.
            staged=GROWTH_ROWS,
        )

    def headroom(self) -> float:
        """Bytes up to where cycles begin to give back, of the limit that is nearest."""
        trigger = self._config.trigger
        rooms = [
            trigger * limit.soft - self.amount(limit.unit)
            for limit in self.limits()
            if limit.soft is not None
        ]
        return min(rooms, default=1e18)

    def imagine(self, unit: Unit, segment_id: int, n_bytes: int) -> None:
        """Count bytes as gone that observe mode leaves where they are."""
        alive = {s.segment_id for s in self._tree.segments()}
        self._imagined = {key: n for key, n in self._imagined.items() if key[1] in alive}
        before = self._imagined.get((unit, segment_id), 0)
        self._imagined[unit, segment_id] = before + n_bytes
