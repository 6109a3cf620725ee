"""Policies made of others: pack first, each head its own rows, a plain function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sidequest_langchain.policy.acts import Act
from sidequest_langchain.policy.facts import CacheFacts, Need, Policy, checked
from sidequest_langchain.policy.scoring import ByScore, with_prior
from sidequest_langchain.policy.selection import Draft, by_head


@dataclass(frozen=True)
class CompressFirst:
    """Packs rows to INT8, then to INT4, and lets another policy act only where that is too little.

    Rows are ranked by the other policy's scores if it has any, else by expected attention. Lossy.
    """

    inner: Policy

    @property
    def name(self) -> str:
        """Of the other policy, marked."""
        return f"compress_first({self.inner.name})"

    @property
    def needs(self) -> frozenset[Need]:
        """What the other policy needs, and importance."""
        return self.inner.needs | {Need.IMPORTANCE}

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """Pack; then the other policy's acts on what is left."""
        if facts.to_free <= 0:
            return ()
        if isinstance(self.inner, ByScore):
            scores = self.inner.scores(facts)
        else:
            scores = with_prior(facts, {s.segment_id: s.score for s in facts.segments})
        draft = Draft(facts)
        draft.compress(8, scores, reason="packed before anything is evicted")
        draft.compress(4, scores, reason="packed further before anything is evicted")
        if draft.left > 0:
            draft.add(self.inner(draft.after()))
        return draft.acts()


@dataclass(frozen=True)
class PerHead:
    """Lets each KV head keep its own best rows, as many as another policy leaves."""

    inner: Policy

    @property
    def name(self) -> str:
        """Of the other policy, marked."""
        return f"per_head({self.inner.name})"

    @property
    def needs(self) -> frozenset[Need]:
        """What the other policy needs."""
        return self.inner.needs

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """The other policy's acts, its evictions by count."""
        return by_head(facts, self.inner(facts))


@dataclass(frozen=True)
class Plain:
    """A policy from a function, or from any object that is called with the facts.

    Raises:
        ConfigError: When it is called: it returned something else than acts.
    """

    function: Callable[[CacheFacts], Sequence[Act]]
    name: str = field(default="")
    needs: frozenset[Need] = frozenset({Need.IMPORTANCE})

    def __post_init__(self) -> None:
        named = getattr(self.function, "__name__", type(self.function).__name__)
        object.__setattr__(self, "name", self.name or named)

    def __call__(self, facts: CacheFacts) -> Sequence[Act]:
        """What the function decides."""
        return checked(self.function(facts))
