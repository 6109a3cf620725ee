"""How much may stay, when to look again, and how bold to be. Pure functions of numbers."""

from __future__ import annotations

import math

from sidequest_langchain.config import CacheConfig, Schedule
from sidequest_langchain.policy.facts import Stage

LEAST_INTERVAL = 4
MOST_INTERVAL = 256


def keep_ratio(n_seen: int, schedule: Schedule | None) -> float:
    """Share of the rows that may stay once `n_seen` tokens were seen, over 0 and up to 1.

    After the first `full_until` tokens, each further whole `every` tokens cost a share `loss` of
    all rows, down to `floor`; 1 without a schedule.
    """
    if schedule is None or not schedule.has_limit:
        return 1.0
    n_steps = max(0, n_seen - schedule.full_until) // schedule.every
    return max(schedule.floor, 1.0 - schedule.loss * n_steps)


def stage_of(n_seen: int, schedule: Schedule | None) -> Stage:
    """How bold a staged policy is at this length; the default schedule's without one."""
    stages = schedule or Schedule()
    if n_seen < stages.early_until:
        return "early"
    return "late" if n_seen >= stages.late_from else "middle"


def budget_in_bytes(config: CacheConfig, *, device_bytes: int | None = None) -> int | None:
    """The smaller of the budgets that are in bytes; `None` if there is none.

    Args:
        config: Settings.
        device_bytes: Memory of the device, for `budget_share`; unknown: that share is no limit.
    """
    budgets = []
    if config.budget_bytes is not None:
        budgets.append(config.budget_bytes)
    if config.budget_share is not None and device_bytes is not None:
        budgets.append(int(config.budget_share * device_bytes))
    return min(budgets, default=None)


def limit_in_bytes(
    budget_bytes: int | None,
    schedule: Schedule | None,
    *,
    n_seen: int,
    n_tokens: int,
    bytes_per_row: int,
) -> int | None:
    """What may stay now: the budget, or less by the schedule; `None` is no limit.

    Args:
        budget_bytes: The hard limit.
        schedule: Keeps a share of what full precision of all tokens would take.
        n_seen: Tokens of the longest running path: they set the share.
        n_tokens: Tokens of all segments, those whose rows left included.
        bytes_per_row: Of a row at full precision, all layers.
    """
    ratio = keep_ratio(n_seen, schedule)
    if ratio == 1.0:
        return budget_bytes
    by_length = math.ceil(ratio * n_tokens * bytes_per_row)
    return by_length if budget_bytes is None else min(budget_bytes, by_length)


def to_free(
    n_bytes: int, limit_bytes: int | None, *, trigger: float = 0.8, target: float = 0.7
) -> int:
    """Bytes to give back in this cycle: none up to the trigger, above it down to the target.

    The distance between the two is the hysteresis: without it every cycle would move a few rows.
    The trigger lies below the limit, so that what arrives until the next cycle still fits.

    Args:
        n_bytes: Bytes that are resident.
        limit_bytes: See `limit_in_bytes`; `None` frees nothing.
        trigger: Share of the limit.
        target: Share of the limit, less than the trigger.
    """
    if limit_bytes is None or n_bytes <= trigger * limit_bytes:
        return 0
    return max(0, n_bytes - math.floor(target * limit_bytes))


def next_interval(
    interval: int,
    *,
    has_acted: bool,
    growth: float,
    headroom: float,
    least: int = LEAST_INTERVAL,
    most: int = MOST_INTERVAL,
) -> int:
    """Steps until the next cycle of an adaptive interval.

    It doubles while nothing has to be done and halves once something was, but the cache must not
    grow through more than half of its headroom unseen.

    Args:
        interval: The last one.
        has_acted: Whether the last cycle freed anything.
        growth: Bytes a step since the last cycle.
        headroom: Bytes up to the trigger.
        least: Of the result.
        most: Of the result.
    """
    wanted = interval // 2 if has_acted else interval * 2
    if growth > 0:
        wanted = min(wanted, int(max(0.0, headroom) / growth / 2))
    return max(least, min(most, wanted))
