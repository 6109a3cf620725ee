"""Receipts of acts, with the words of the rows that go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.acts import Act, Archive, Compress, Evict, EvictByHead, Release
from sidequest_langchain.policy.asking import Measured
from sidequest_langchain.policy.deciding import mass_of
from sidequest_langchain.policy.executor import Done
from sidequest_langchain.policy.facts import CacheFacts
from sidequest_langchain.policy.receipts import ActReceipt, Outcome, Verb, runs_of

Decode: TypeAlias = Callable[[Sequence[int]], str]
MOST_TEXT = 2000
"""Characters of a receipt's text."""

_VERBS: dict[type[Act], Verb] = {
    Evict: "evict",
    EvictByHead: "evict_by_head",
    Compress: "compress",
    Archive: "archive",
    Release: "release",
}


class ReceiptWriter:
    """Writes receipts for one policy."""

    def __init__(self, policy: str, decode: Decode, *, mask_only: bool) -> None:
        self._policy, self._decode, self._mask_only = policy, decode, mask_only

    def write(
        self,
        facts: CacheFacts,
        act: Act,
        segment: Segment | None,
        outcome: Outcome,
        *,
        why: str = "",
        measured: Measured | None = None,
        is_forced: bool = False,
    ) -> ActReceipt:
        """The receipt of an act, to be written before it is done: a release empties the segment.

        Args:
            facts: Of the cycle.
            act: What is asked for.
            segment: Whose rows; `None` if there is no such segment.
            outcome: What becomes of it.
            why: In place of the act's own reason.
            measured: The divergence of the cycle's acts, if it was asked for.
            is_forced: Whether the budget asked for more than the guard allows.
        """
        offsets: Sequence[int] = getattr(act, "offsets", ())
        freed = n_rows = 0
        is_exact = isinstance(act, Release)
        if segment is not None:
            this = facts.segment(act.segment_id)
            if isinstance(act, Release):
                offsets = range(segment.n_tokens)
            offsets = [at for at in offsets if at < this.n_tokens]
            freed = int(facts.row_bytes(this)[list(offsets)].sum())
            n_rows = len(offsets)
            if isinstance(act, EvictByHead):
                n_rows = max(0, int(this.resident.sum()) - act.n_keep)
                freed = n_rows * facts.bytes_per_row
            is_exact = is_exact or (isinstance(act, Archive) and not this.is_active)
        kl, kl_reason = (None, "") if measured is None else measured.of(act, facts)
        is_hidden = isinstance(act, Evict) and self._mask_only
        return ActReceipt(
            verb="hide" if is_hidden else _VERBS[type(act)],
            outcome=outcome,
            policy=self._policy,
            reason=why or getattr(act, "reason", ""),
            segment_id=act.segment_id,
            path="" if segment is None else name_of(segment),
            n_rows=n_rows,
            bits=act.bits if isinstance(act, Compress) else None,
            freed_bytes=freed,
            mass=0.0 if segment is None else mass_of(facts, act),
            kl=kl,
            kl_reason=kl_reason,
            is_forced=is_forced,
            exact=is_exact,
            step=facts.step,
            runs=() if segment is None else runs_of([segment.start + at for at in offsets]),
            text=self._text(segment, act, offsets),
        )

    def _text(self, segment: Segment | None, act: Act, offsets: Sequence[int]) -> str:
        """What rows said that go; packed ones stay, and need no words."""
        if segment is None or isinstance(act, Compress | EvictByHead):
            return ""
        ids = segment.token_ids
        parts = [self._decode(ids[first : last + 1]).strip() for first, last in runs_of(offsets)]
        text = " … ".join(parts)
        return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"


def name_of(segment: Segment) -> str:
    """A label of a segment: that of the nearest path that ends in it or below it."""
    stack = [segment]
    while stack:
        at = stack.pop(0)
        for path in sorted(at.paths, key=lambda p: p.serial):
            label = path.label
            return str(label.path_id or label.node or label.call_id)
        stack.extend(at.children)
    return ""


def completed(receipt: ActReceipt, done: Done) -> ActReceipt:
    """The receipt once the act is done."""
    reason = receipt.reason
    if done.is_copied:
        reason = f"{reason}; a copy is kept" if reason else "a copy is kept"
    return replace(receipt, freed_bytes=done.freed_bytes, reason=reason)
