"""How much may stay, and when to look again."""

from __future__ import annotations

import pytest

from sidequest_langchain.config import CacheConfig, Schedule
from sidequest_langchain.policy.schedule import (
    budget_in_bytes,
    keep_ratio,
    limit_in_bytes,
    next_interval,
    stage_of,
    to_free,
)

SCHEDULE = Schedule(full_until=1000, every=1000, loss=0.05, floor=0.35)


@pytest.mark.parametrize(
    ("n_seen", "ratio"),
    [
        (0, 1.0),
        (1999, 1.0),
        (2000, 0.95),
        (2999, 0.95),
        (3000, 0.9),
        (13_000, 0.4),
        (14_000, 0.35),
        (10**6, 0.35),
    ],
)
def test_every_further_thousand_keeps_five_percent_less(n_seen, ratio):
    assert keep_ratio(n_seen, SCHEDULE) == pytest.approx(ratio)


def test_without_a_schedule_everything_may_stay():
    assert keep_ratio(10**6, None) == 1.0
    assert keep_ratio(10**6, Schedule(loss=0)) == 1.0


def test_stages_by_length():
    schedule = Schedule(early_until=100, late_from=200)
    assert [stage_of(n, schedule) for n in (0, 99, 100, 199, 200)] == [
        "early",
        "early",
        "middle",
        "middle",
        "late",
    ]
    assert stage_of(1000, None) == "middle"


def test_the_smallest_budget_in_bytes_holds():
    def budget(**given):
        return budget_in_bytes(CacheConfig(**given), device_bytes=1000)

    assert budget() is None
    assert budget(budget_tokens=7) is None  # that one is in rows
    assert budget(budget_bytes=60) == 60
    assert budget(budget_bytes=60, budget_share=0.05) == 50
    assert budget_in_bytes(CacheConfig(budget_share=0.05)) is None


def test_the_schedule_tightens_the_budget():
    def limit(budget, n_seen=2000, n_tokens=2000):
        return limit_in_bytes(budget, SCHEDULE, n_seen=n_seen, n_tokens=n_tokens, bytes_per_row=10)

    assert limit(None) == 19_000
    assert limit(18_000) == 18_000
    assert limit(20_000) == 19_000
    assert limit(None, n_seen=500) is None
    assert limit(100, n_seen=500) == 100
    # The share is of all tokens there are.
    assert limit(None, n_tokens=4000) == 38_000


def test_nothing_goes_up_to_the_trigger_and_then_down_to_the_target():
    assert to_free(800, 1000) == 0
    assert to_free(801, 1000) == 101
    assert to_free(1200, 1000) == 500
    assert to_free(10**9, None) == 0
    assert to_free(95, 100, trigger=0.9, target=0.5) == 45


def test_after_a_cycle_there_is_nothing_to_free():
    n_bytes = 950
    freed = to_free(n_bytes, 1000)
    assert to_free(n_bytes - freed, 1000) == 0


def test_the_interval_grows_while_nothing_happens_and_shrinks_with_growth():
    def after(interval=16, **given):
        plain = {"has_acted": False, "growth": 0.0, "headroom": 1000.0}
        return next_interval(interval, **{**plain, **given})

    assert after() == 32
    assert after(has_acted=True) == 8
    assert after(growth=20.0) == 25
    assert after(growth=100.0) == 5
    assert after(growth=100.0, headroom=-5.0) == 4
    assert after(interval=256) == 256
    assert after(interval=4, has_acted=True) == 4
    assert after(least=1, growth=1000.0) == 1
