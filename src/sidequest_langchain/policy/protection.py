"""Rows that no policy may take out of memory, and rows that keep full precision.

Which rows are protected matters more than which score ranks the others (arXiv:2605.18053).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sidequest_langchain.config import Protection
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.facts import Bools, Bytes, CacheFacts, Floats, SegmentFacts

PROMPTED = (
    TokenKind.OTHER,
    TokenKind.SYSTEM,
    TokenKind.QUESTION,
    TokenKind.TOOL_RESULT,
    TokenKind.MARKED,
)
"""Kinds that a model does not write: after the last of them its answer begins."""

NO_WEIGHTS: Mapping[int, float] = {}


def protect(
    facts: CacheFacts, rules: Protection, token_weights: Mapping[int, float] = NO_WEIGHTS
) -> CacheFacts:
    """The facts with `protected`, `precise` and `weights` of every segment filled in.

    Protected, whatever a segment's state: the first `n_sink` tokens, the recent window of every
    running path and of every path that ends in a leaf, the kinds that the rules name, the newest
    tool call of each of these paths, tokens of infinite weight, and `ends` of the budget at
    either end of the running paths' prompts (paths share it: siblings must not add up to the
    whole budget). Precise: the sinks and running paths' recent windows; all that is protected if
    `rules.precise`. Other protected rows may be packed.

    Args:
        facts: Not changed.
        rules: Settings.
        token_weights: Factor by token id; texts of `rules.weights` are turned into ids above.
    """
    masks = _Masks(facts)
    _protect_kinds(masks, rules)
    running = [tip[-1] for tip in facts.tips if tip]
    idle = [s.segment_id for s in facts.leaves() if s.segment_id not in running]
    for segment in facts.segments:
        n_sinks = max(0, rules.n_sink - segment.start)
        masks.precise[segment.segment_id][:n_sinks] = True
    for tip in running:
        masks.mark_last(masks.precise, facts.path(tip), rules.recent_window)
    for tip in idle:
        masks.mark_last(masks.protected, facts.path(tip), rules.recent_window)
    if rules.newest_tool_call:
        for tip in (*running, *idle):
            masks.mark_newest_call(facts.path(tip))
    _protect_ends(masks, [facts.path(tip) for tip in running], rules)
    heavy = [token for token, weight in token_weights.items() if math.isinf(weight)]
    factors = {t: w for t, w in token_weights.items() if not math.isinf(w)}
    segments = []
    for segment in facts.segments:
        protected = masks.protected[segment.segment_id] | masks.precise[segment.segment_id]
        protected |= np.isin(segment.token_ids, heavy)
        segments.append(
            replace(
                segment,
                protected=protected,
                precise=protected if rules.precise else masks.precise[segment.segment_id],
                weights=_weights(segment, factors),
            )
        )
    return replace(facts, segments=tuple(segments))


def protected_bytes(facts: CacheFacts) -> int:
    """Bytes that no policy can free: rows that are protected, or whose segment may not change.

    Idle segments do not count where they could be released. Rows as they are now: packing may
    make them smaller. Above the budget, it cannot be kept by evicting.
    """
    total = 0.0
    for segment in facts.segments:
        if not (segment.is_idle and segment.may_change):
            total += float(facts.row_bytes(segment)[~segment.evictable].sum())
    return math.ceil(total)


class _Masks:
    """The masks while they are being made: `[n_tokens]` by segment id."""

    def __init__(self, facts: CacheFacts) -> None:
        self.facts = facts
        self.protected = {s.segment_id: np.zeros(s.n_tokens, bool) for s in facts.segments}
        self.precise = {s.segment_id: np.zeros(s.n_tokens, bool) for s in facts.segments}

    def mark_last(
        self, masks: dict[int, Bools], path: Sequence[SegmentFacts], n: int, end: int | None = None
    ) -> None:
        """Mark the `n` positions of the path before `end`, its own end by default."""
        if not path:
            return
        last = path[-1].end if end is None else end
        for segment in path:
            first = max(0, last - n - segment.start)
            masks[segment.segment_id][first : max(0, last - segment.start)] = True

    def mark_newest_call(self, path: Sequence[SegmentFacts]) -> None:
        """Mark the last run of tool-call tokens; the template's tokens inside belong to it."""
        kinds = _kinds(path)
        calls = np.flatnonzero(kinds == TokenKind.TOOL_CALL)
        if calls.size == 0:
            return
        others = np.flatnonzero(~np.isin(kinds, (TokenKind.TOOL_CALL, TokenKind.DELIMITER)))
        begins = calls[calls > max(others[others < calls[-1]], default=-1)][0]
        start = path[0].start
        n = int(calls[-1] - begins) + 1
        self.mark_last(self.protected, path, n, end=start + int(calls[-1]) + 1)


def _protect_kinds(masks: _Masks, rules: Protection) -> None:
    named = {
        TokenKind.SYSTEM: rules.system,
        TokenKind.QUESTION: rules.question,
        TokenKind.DELIMITER: rules.delimiters,
        TokenKind.MARKED: rules.marked,
    }
    kinds = [kind for kind, is_on in named.items() if is_on]
    for segment in masks.facts.segments:
        masks.protected[segment.segment_id] |= np.isin(segment.kinds, kinds)


def _protect_ends(
    masks: _Masks, paths: Sequence[Sequence[SegmentFacts]], rules: Protection
) -> None:
    facts = masks.facts
    if facts.budget_bytes is None or not paths:
        return
    rows = rules.ends * facts.budget_bytes / max(1, facts.bytes_per_row)
    n_first = int(rows / len({path[0].segment_id for path in paths}))
    n_last = int(rows / len(paths))
    for path in paths:
        start = path[0].start
        masks.mark_last(masks.protected, path, n_first, end=start + n_first)
        masks.mark_last(masks.protected, path, n_last, end=start + _prompt_end(_kinds(path)))


def _prompt_end(kinds: Bytes) -> int:
    """Index after the prompt's last token: the last that no model wrote, and its delimiters."""
    prompted = np.flatnonzero(np.isin(kinds, PROMPTED))
    if prompted.size == 0:
        return int(kinds.size)
    end = int(prompted[-1]) + 1
    others = np.flatnonzero(kinds[end:] != TokenKind.DELIMITER)
    return end + int(others[0]) if others.size else int(kinds.size)


def _kinds(path: Sequence[SegmentFacts]) -> Bytes:
    return np.concatenate([segment.kinds for segment in path])


def _weights(segment: SegmentFacts, factors: Mapping[int, float]) -> Floats | None:
    if not factors:
        return segment.weights
    weights: npt.NDArray[np.float32] = np.ones(segment.n_tokens, np.float32)
    for token, factor in factors.items():
        weights[segment.token_ids == token] = factor
    return weights
