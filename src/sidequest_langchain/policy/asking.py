"""Whose next token a cycle's acts are judged by: running paths, and idle ones that they touch.

An idle path has no next token of its own, but the last tokens that read it are known, and are run
again. It must not know how the divergence is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.acts import Act, Archive, Compress, Evict, EvictByHead
from sidequest_langchain.policy.facts import CacheFacts

MOST_IDLE_PATHS = 4
"""Idle paths that are asked in one cycle: each costs two passes over a few tokens."""

EXACT_ACT = "exact: nothing is lost"
UNASKED = "the guard measures nothing: canary_tokens is 0"
AWAY = "not measured: rows of every path that reads these are in a slower tier"
TOO_SHORT = "not measured: no path that reads these rows has a token after them"
TOO_MANY = f"not measured: a cycle asks {MOST_IDLE_PATHS} idle paths at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Paths to ask, and why others are not."""

    tips: tuple[Segment, ...] = ()
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why the acts on a segment are not measured, by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The divergence of a cycle's lossy acts, or why there is none."""

    kl: float | None = None
    """Nats a token, of the path where it is largest; infinite where it could not be measured."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    why: str = ""
    """Why nothing at all was measured."""

    def of(self, act: Act, facts: CacheFacts) -> tuple[float | None, str]:
        """What the receipt of an act says: its divergence, else why there is none."""
        if not is_lossy(act, facts):
            return None, EXACT_ACT
        if self.why:
            return None, self.why
        reason = self.reasons.get(act.segment_id, "")
        if reason or self.kl is None:
            return None, reason or TOO_SHORT
        return self.kl, ""


def is_lossy(act: Act, facts: CacheFacts) -> bool:
    """Whether an act loses something: what idles comes back from the archive before it is read."""
    if isinstance(act, Archive):
        return facts.segment(act.segment_id).is_active
    return isinstance(act, Evict | EvictByHead | Compress)


def paths_to_ask(
    acts: Sequence[Act],
    facts: CacheFacts,
    segments: Mapping[int, Segment],
    is_away: Callable[[Segment], bool],
) -> Asked:
    """The running paths, and of each idle segment that would lose something the latest path.

    Args:
        acts: Of the cycle.
        facts: Of this moment.
        segments: The segments of the facts, by id.
        is_away: Whether a segment's rows idle in a slower tier: what a path says without them,
            it will not say.
    """
    tips = [segments[tip[-1]] for tip in facts.tips if tip and tip[-1] in segments]
    running = {segment for tip in tips for segment in tip.path()}
    idle: dict[Segment, None] = {}
    reasons: dict[int, str] = {}
    touched = dict.fromkeys(act.segment_id for act in acts if is_lossy(act, facts))
    for segment_id in sorted(touched, key=lambda s: -segments[s].last_used):
        segment = segments[segment_id]
        if segment in running:
            continue
        tip = _latest_tip(segment)
        if any(is_away(other) for other in tip.path()):
            reasons[segment_id] = AWAY
        elif tip.end < 2:
            reasons[segment_id] = TOO_SHORT
        elif tip not in idle and len(idle) == MOST_IDLE_PATHS:
            reasons[segment_id] = TOO_MANY
        else:
            idle[tip] = None
    return Asked(tips=(*tips, *idle), reasons=reasons)


def _latest_tip(segment: Segment) -> Segment:
    """The end of the path over a segment that was used last."""
    while segment.children:
        segment = max(segment.children, key=lambda child: (child.last_used, child.end))
    return segment
