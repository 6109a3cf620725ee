"""Who is compared: a policy at a budget, and the cache settings that make it so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.config.presets import PRESETS
from sidequest_langchain.policy.registry import policy_for

Preset = Literal["conservative", "balanced", "aggressive"]

NONE = "none"
"""The full cache: nothing is managed, no budget."""
POLICIES = (NONE, "lru", "window", "h2o", "snapkv", "tova", "r_kv", "random", "staged")
BUDGETS = (0.5, 0.35, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One policy at one budget."""

    policy: str
    """Or a preset of the settings."""
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
        ConfigError: A policy has a name that is not known, nor is it a preset's.
    """
    managed = [policy for policy in dict.fromkeys(policies) if policy != NONE]
    for policy in managed:
        if policy not in PRESETS:
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
    given: dict[str, Any] = {
        "budget_bytes": max(1, round(arm.budget * full_bytes)),
        "predictor": predictor,
    }
    if arm.policy in PRESETS:
        return CacheConfig.preset(cast(Preset, arm.policy), **given)
    return CacheConfig(policy=arm.policy, **given)
