"""Settings as TOML, both ways."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidequest_langchain.config import CacheConfig, Guard, Protection, Schedule, Tiers
from sidequest_langchain.errors import ConfigError


def decide(facts):
    return []


TOML = """
budget_tokens = 2048
policy = "staged"
interval = "adaptive"
observed_layers = [2, 5]

[protection]
recent_window = 64
weights = [[" not", 2.0], [17, inf]]

[schedule]
loss = 0.1

[tiers]
disk_bytes = 1_000_000
archive_folder = "/tmp/rows"
"""


def test_toml_as_text_and_as_a_file(tmp_path):
    expected = CacheConfig(
        budget_tokens=2048,
        policy="staged",
        interval="adaptive",
        observed_layers=(2, 5),
        protection=Protection(recent_window=64, weights={" not": 2.0, 17: math.inf}),
        schedule=Schedule(loss=0.1),
        tiers=Tiers(disk_bytes=1_000_000, archive_folder="/tmp/rows"),
    )
    assert CacheConfig.from_toml(TOML) == expected
    path = tmp_path / "cache.toml"
    path.write_text(TOML, encoding="utf-8")
    assert CacheConfig.from_toml(path) == expected
    assert CacheConfig.from_toml(str(path)) == expected
    assert CacheConfig.from_toml("") == CacheConfig()


def test_toml_may_begin_with_a_preset():
    config = CacheConfig.from_toml('preset = "aggressive"\nbudget_tokens = 4096\n[guard]\n')
    preset = CacheConfig.preset("aggressive", budget_tokens=4096)
    assert config == replace(preset, guard=Guard())


def test_weights_in_toml_may_be_a_table_of_texts():
    config = CacheConfig.from_toml('[protection.weights]\n" not" = 2')
    assert config.protection.weights == ((" not", 2.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget_tokens = ", "no valid TOML"),
        ("budget_token = 5", "the TOML has an unknown setting 'budget_token'; did you mean"),
        ("xyzzy = 5", "unknown setting 'xyzzy'; settings are budget_tokens, "),
        ("[protection]\nsinks = 5", r"\[protection\] has an unknown setting 'sinks'; did you mean"),
        ("[tiers]\ndisk_bytes = 5", "archive_folder is not set"),
        ("protection = 5", r"protection must be a Protection\(...\), found 5"),
        ('preset = "bold"', "no preset 'bold'"),
        ("preset = [1]", "no preset"),
    ],
)
def test_toml_that_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig.from_toml(text)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    for path in (tmp_path / "none.toml", str(tmp_path / "none.toml"), tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            CacheConfig.from_toml(path)
    (tmp_path / "latin.toml").write_bytes(b'policy = "\xe9"')
    with pytest.raises(ConfigError, match="cannot be read"):
        CacheConfig.from_toml(tmp_path / "latin.toml")


shares = st.floats(0.01, 0.45)
configs = st.builds(
    CacheConfig,
    budget_tokens=st.integers(300, 10**9),
    budget_share=st.none() | shares,
    retain=st.sampled_from([None, "run", "thread"]),
    policy=st.sampled_from(["staged", "h2o", 'a "quoted"\\ \x7f\n name é']),
    target=shares,
    interval=st.integers(1, 99) | st.just("adaptive"),
    observe=st.booleans(),
    observed_layers=st.integers(1, 9) | st.lists(st.integers(0, 99), min_size=1).map(tuple),
    receipts_file=st.none() | st.just("receipts/a b.jsonl"),
    protection=st.builds(
        Protection,
        n_sink=st.integers(0, 9),
        precise=st.booleans(),
        ends=shares,
        weights=st.dictionaries(
            st.integers(0, 99) | st.text(min_size=1).filter(str.isprintable),
            st.floats(0, allow_nan=False, width=32) | st.just(math.inf),
            max_size=4,
        ),
    ),
    schedule=st.none() | st.builds(Schedule, floor=shares, loss=shares),
    tiers=st.just(Tiers())
    | st.builds(Tiers, disk_bytes=st.just(5), archive_folder=st.just("/x y")),
    guard=st.builds(Guard, max_kl=st.none() | shares, max_mass=st.none() | shares),
)


@given(configs)
def test_toml_round_trip(config):
    assert CacheConfig.from_toml(config.to_toml()) == config


@pytest.mark.parametrize(
    "config",
    [CacheConfig(), CacheConfig(schedule=Schedule(), policy="lru"), CacheConfig(tiers=Tiers())],
)
def test_toml_of_little(config):
    assert CacheConfig.from_toml(config.to_toml()) == config


def test_a_policy_object_has_no_toml():
    with pytest.raises(ConfigError, match=r"policy is .*cannot be written as TOML; give the name"):
        CacheConfig(policy=decide, budget_tokens=99).to_toml()
