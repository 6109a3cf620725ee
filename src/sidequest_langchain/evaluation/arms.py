"""Who is compared: a policy at a budget, and the cache settings that make it so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.policy.registry import policy_for

NONE = "none"
"""The full cache: nothing is managed, no budget."""
POLICIES = (NONE, "lru", "window", "h2o", "snapkv", "tova", "r_kv", "random", "staged")
BUDGETS = (0.5, 0.35, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One policy at one budget."""

    policy: str
    budget: float | None = None
    """Share of the bytes that the full cache holds for the same sample; `None`: no limit."""

    @property
    def is_full(self) -> bool:
        """Whether this is the full cache."""
        return self.budget is None

    def __str__(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} at {self.budget:g}"


def arms_of(policies: Iterable[str], budgets: Sequence[float]) -> tuple[Arm, ...]:
    """The full cache first, then every other policy at every budget.

    Raises:
        ConfigError: A policy has a name that is not known.
    """
    managed = [policy for policy in dict.fromkeys(policies) if policy != NONE]
    for policy in managed:
        policy_for(policy)
    pairs = [Arm(policy=policy, budget=budget) for budget in budgets for policy in managed]
    return (Arm(policy=NONE), *pairs)


def settings_of(arm: Arm, full_bytes: int, *, predictor: str = "auto") -> CacheConfig:
    """The cache settings of an arm.

    Args:
        arm: Policy and budget.
        full_bytes: What the full cache holds for the same sample. The budget is in bytes at
            the allocator, so that compressed rows count for what they are.
        predictor: As in the settings.
    """
    if arm.budget is None:
        return CacheConfig()
    budget_bytes = max(1, round(arm.budget * full_bytes))
    return CacheConfig(policy=arm.policy, budget_bytes=budget_bytes, predictor=predictor)
