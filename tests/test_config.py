"""Settings of the cache: checked when they are made, with a message that says what was found."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import ConfigError

COUNTS = ["budget_tokens", "budget_bytes", "prefill_chunk", "max_running"]


def test_without_settings_everything_stays():
    config = CacheConfig()
    assert (config.budget_tokens, config.budget_bytes, config.prefill_chunk) == (None,) * 3
    assert (config.retain, config.isolation) == (None, "thread")
    assert config.max_running >= 1


def test_settings_are_frozen_keywords_and_unknown_ones_are_refused():
    with pytest.raises(FrozenInstanceError):
        CacheConfig().budget_tokens = 5
    with pytest.raises(TypeError):
        CacheConfig(4096)
    with pytest.raises(TypeError, match="budget_token"):
        CacheConfig(budget_token=4096)
    assert {f.name for f in fields(CacheConfig)} >= {*COUNTS, "retain", "isolation"}


@pytest.mark.parametrize("name", COUNTS)
def test_the_least_count_is_one(name):
    assert getattr(CacheConfig(**{name: 1}), name) == 1
    assert getattr(CacheConfig(**{name: 2**40}), name) == 2**40
    for value in (0, -1):
        with pytest.raises(ConfigError, match=rf"{name} must be at least 1, found {value}"):
            CacheConfig(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, 1.5, 4096.0, "4096", [1]])
def test_a_count_is_a_whole_number(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number") as caught:
        CacheConfig(**{name: value})
    assert repr(value) in str(caught.value)


def test_only_what_may_be_absent_may_be_none():
    for name in ["budget_tokens", "budget_bytes", "prefill_chunk", "retain"]:
        CacheConfig(**{name: None})
    for name in ["max_running", "isolation"]:
        with pytest.raises(ConfigError, match=name):
            CacheConfig(**{name: None})


@pytest.mark.parametrize("value", ["thread", "tenant", "shared"])
def test_the_kinds_of_isolation(value):
    assert CacheConfig(isolation=value).isolation == value


@pytest.mark.parametrize("value", ["run", "thread", None])
def test_the_kinds_of_retention(value):
    assert CacheConfig(retain=value).retain == value


@pytest.mark.parametrize("value", ["", "Thread", "threads", "none", 1, False])
def test_other_words_are_refused_by_name(value):
    with pytest.raises(ConfigError, match="isolation is 'thread', 'tenant' or 'shared'") as caught:
        CacheConfig(isolation=value)
    assert repr(value) in str(caught.value)
    with pytest.raises(ConfigError, match="retain is 'run', 'thread' or None") as caught:
        CacheConfig(retain=value)
    assert repr(value) in str(caught.value)


def test_a_copy_is_checked_too():
    with pytest.raises(ConfigError, match="budget_tokens"):
        replace(CacheConfig(), budget_tokens=0)
