"""Choosing rows by score until enough bytes are found. Plain arrays; it must not know acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.facts import Bools, SegmentFacts

GROUP_ROWS = 64
"""Rows that share their keys' scales when they are packed."""
LEAST_ROWS = 24
"""Fewer rows are not worth a block: the scales would cost more than is counted for them."""

Taken = dict[int, npt.NDArray[np.intp]]
"""Ascending offsets by segment id."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What may be taken: for each segment a mask, scores and bytes gained, each `[n_tokens]`."""

    segments: Sequence[SegmentFacts]
    rows: Sequence[Bools]
    scores: Sequence[npt.NDArray[Any]]
    gains: Sequence[npt.NDArray[np.float64]]
    costs: Sequence[npt.NDArray[np.float64]] | None = None
    """Bytes that a row takes where it goes to, if there is little room."""


@dataclass(frozen=True, slots=True)
class _Flat:
    """The candidates of all segments in one row of arrays."""

    place: npt.NDArray[np.intp]
    """Index of the segment in the choice."""
    offset: npt.NDArray[np.intp]
    score: npt.NDArray[np.float64]
    gain: npt.NDArray[np.float64]
    cost: npt.NDArray[np.float64]
    age: npt.NDArray[np.intp]
    message: npt.NDArray[np.intp]

    def where(self, mask: Bools) -> _Flat:
        return _Flat(*(getattr(self, name)[mask] for name in COLUMNS))


COLUMNS = tuple(field.name for field in fields(_Flat))


def take_lowest(
    choice: Choice,
    to_free: float,
    *,
    fair: float = 0.0,
    block: int = 1,
    room: float = np.inf,
) -> Taken:
    """The rows of the lowest scores that gain `to_free` bytes together, or all there are.

    Of equal scores the older segment's go first, then those of the earlier segment and offset.
    The last block is cut short where a part of it is enough.

    Args:
        choice: The candidates.
        to_free: Bytes.
        fair: See `Draft.evict`.
        block: Neighbours that are judged by their mean.
        room: Of bytes by `choice.costs`; rows after the first that does not fit stay.
    """
    rows = _flat(choice)
    total = float(rows.gain.sum())
    if total <= 0 or to_free <= 0:
        return {}
    if fair <= 0 or total <= to_free:
        return _gathered(choice, [_first(rows, to_free, block=block, room=room)])
    kept = _reserved(rows, fair * (1 - to_free / total))
    first = _first(rows.where(~kept), to_free, block=block, room=room)
    left = to_free - float(first.gain.sum())
    room -= float(first.cost.sum())
    second = _first(rows.where(kept), left, block=block, room=room)
    return _gathered(choice, [first, second])


def take_groups(choice: Choice, to_free: float) -> Taken:
    """As `take_lowest`, in groups of up to 64 neighbouring candidates by their mean score."""
    groups = []
    scores = _weighted(choice)
    for place, rows in enumerate(choice.rows):
        offsets = np.flatnonzero(rows)
        for first in range(0, offsets.size, GROUP_ROWS):
            group = offsets[first : first + GROUP_ROWS]
            gain = float(choice.gains[place][group].sum())
            if group.size >= LEAST_ROWS and gain > 0:
                score = float(scores[place][group].mean())
                groups.append((score, -choice.segments[place].age, place, group, gain))
    taken: dict[int, list[npt.NDArray[np.intp]]] = {}
    for _, _, place, group, gain in sorted(groups, key=lambda g: (*g[:3], g[3][0])):
        if to_free <= 0:
            break
        taken.setdefault(choice.segments[place].segment_id, []).append(group)
        to_free -= gain
    return {at: np.sort(np.concatenate(found)) for at, found in taken.items()}


def messages(segment: SegmentFacts) -> npt.NDArray[np.intp]:
    """Which message of the segment a token belongs to, `[n_tokens]`: runs of one kind.

    The template's own tokens belong to the message before them.
    """
    kinds = segment.kinds.astype(np.intp)
    is_text = kinds != TokenKind.DELIMITER
    # The place of the last text token up to each token; a delimiter takes that one's kind.
    at = np.maximum.accumulate(np.where(is_text, np.arange(kinds.size), 0))
    begins = np.zeros(kinds.size, bool)
    begins[1:] = (kinds[at][1:] != kinds[at][:-1]) | (is_text[1:] & ~is_text[:-1])
    return np.cumsum(begins)


def _flat(choice: Choice) -> _Flat:
    scores = _weighted(choice)
    costs = choice.gains if choice.costs is None else choice.costs
    parts = []
    n_messages = 0
    for place, (segment, rows) in enumerate(zip(choice.segments, choice.rows, strict=True)):
        offsets = np.flatnonzero(rows & (choice.gains[place] > 0))
        message = messages(segment) + n_messages
        n_messages = int(message[-1]) + 1 if message.size else n_messages
        parts.append(
            _Flat(
                np.full(offsets.size, place),
                offsets,
                scores[place][offsets],
                choice.gains[place][offsets],
                costs[place][offsets],
                np.full(offsets.size, segment.age),
                message[offsets],
            )
        )
    return _joined(parts)


def _weighted(choice: Choice) -> list[npt.NDArray[np.float64]]:
    """Scores times the user's factors; an unknown score counts as the lowest."""
    lowest = _lowest(choice)
    # Scores below zero would be turned around by a factor: count them from the lowest.
    base = min(0.0, lowest)
    found = []
    for segment, given in zip(choice.segments, choice.scores, strict=True):
        scores = np.nan_to_num(np.asarray(given, np.float64), nan=lowest)
        weights = segment.weights
        found.append(scores if weights is None else (scores - base) * weights + base)
    return found


def _lowest(choice: Choice) -> float:
    lowest = np.inf
    for scores, rows in zip(choice.scores, choice.rows, strict=True):
        known = np.asarray(scores, np.float64)[rows & np.isfinite(scores)]
        lowest = min(lowest, float(known.min(initial=np.inf)))
    return lowest if np.isfinite(lowest) else 0.0


def _reserved(rows: _Flat, share: float) -> Bools:
    """The best `share` of each message's candidates."""
    order = np.lexsort((-rows.offset, -rows.score, rows.message))
    message = rows.message[order]
    _, first, counts = np.unique(message, return_index=True, return_counts=True)
    rank = np.arange(message.size) - np.repeat(first, counts)
    reserved = np.zeros(message.size, bool)
    reserved[order] = rank < np.floor(np.repeat(counts, counts) * share)
    return reserved


def _first(rows: _Flat, to_free: float, *, block: int, room: float) -> _Flat:
    if to_free <= 0 or not rows.offset.size:
        return rows.where(np.zeros(rows.offset.size, bool))
    score = rows.score
    if block > 1:
        _, group = np.unique(
            np.stack((rows.place, rows.offset // block)), axis=1, return_inverse=True
        )
        group = group.reshape(-1)
        score = (np.bincount(group, rows.score) / np.bincount(group))[group]
    order = np.lexsort((rows.offset, rows.place, -rows.age, score))
    gained = np.cumsum(rows.gain[order])
    # A hair less, since sums of fractions of bytes do not come out even.
    enough = int(np.searchsorted(gained, to_free * (1 - 1e-12))) + 1
    fitting = int(np.searchsorted(np.cumsum(rows.cost[order]), room, side="right"))
    taken = np.zeros(order.size, bool)
    taken[order[: min(enough, fitting)]] = True
    return rows.where(taken)


def _joined(parts: Sequence[_Flat]) -> _Flat:
    if not parts:
        none = np.zeros(0, np.intp)
        empty = none.astype(np.float64)
        return _Flat(none, none, empty, empty, empty, none, none)
    return _Flat(*(np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS))


def _gathered(choice: Choice, parts: Sequence[_Flat]) -> Taken:
    rows = _joined(parts)
    taken = {}
    for place in np.unique(rows.place):
        offsets = np.sort(rows.offset[rows.place == place])
        taken[choice.segments[int(place)].segment_id] = offsets
    return taken
