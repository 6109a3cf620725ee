"""Settings of a managed cache: refused when they contradict, readable from TOML."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sidequest_langchain.config import CacheConfig, Guard, Protection, Schedule, Tiers
from sidequest_langchain.config.presets import PRESETS
from sidequest_langchain.errors import ConfigError

MANAGED = {"policy": "staged", "budget_tokens": 1000}


def decide(facts):
    return []


@dataclass(frozen=True)
class Decides:
    n: int = 1

    def __call__(self, facts):
        return []


def test_without_a_policy_nothing_is_managed():
    config = CacheConfig()
    assert config.policy is None
    assert not config.observe
    assert config.schedule is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "staged"}, "nothing says how much may stay: give budget_tokens"),
        ({"policy": "staged", "schedule": Schedule(loss=0)}, "nothing says how much may stay"),
        ({"schedule": Schedule()}, "no policy follows it"),
        ({"schedule": Schedule(), "policy": "none"}, "no policy follows it"),
        ({"compress_first": True}, "there is no policy"),
        (
            {
                **MANAGED,
                "budget_bytes": 9,
                "compress_first": True,
                "tiers": Tiers(int8=False, int4=False),
            },
            "compress_first needs tiers",
        ),
        ({"tiers": Tiers(cpu_bytes=9)}, "tiers are set, but without a policy .* recalled: give"),
        ({"guard": Guard(max_kl=0.5)}, "guard is set, but without a policy .*: give policy="),
        ({**MANAGED, "compress_first": True}, "frees bytes and no rows: give budget_bytes"),
        ({"trigger": 0.5}, r"target \(0.7\) must be less than trigger \(0.5\)"),
        ({"trigger": 0.7, "target": 0.7}, "must be less than trigger"),
        ({**MANAGED, "eviction": "per_head"}, r"excludes packed rows.*int4=False"),
        (
            {
                **MANAGED,
                "eviction": "per_head",
                "mask_only": True,
                "tiers": Tiers(int8=False, int4=False),
            },
            "mask_only hides rows for all heads",
        ),
        ({"policy": "h2o", "budget_tokens": 54}, "budget_tokens is 54.*protect 54 tokens"),
    ],
)
def test_settings_that_contradict_each_other(given, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"policy": "none"},
        {"policy": "h2o", "budget_tokens": 55},
        {"policy": "h2o", "budget_bytes": 1},
        {"policy": "h2o", "budget_share": 0.5},
        {"policy": "h2o", "schedule": Schedule()},
        {"budget_tokens": 3},
        {"observe": True},
        {**MANAGED, "eviction": "per_head", "tiers": Tiers(int8=False, int4=False)},
        {**MANAGED, "budget_bytes": 9, "compress_first": True, "tiers": Tiers(int8=False)},
        {**MANAGED, "policy": decide, "interval": "adaptive"},
    ],
)
def test_settings_that_do_not(given):
    CacheConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_share": 0}, "budget_share must be above 0 and at most 1, found 0"),
        ({"budget_share": 1.1}, "budget_share must be above 0 and at most 1, found 1.1"),
        ({"budget_share": True}, "budget_share must be a number, found True"),
        ({"trigger": math.nan}, "trigger must be a number, found nan"),
        ({"trigger": 1.5}, "trigger must be above 0 and at most 1"),
        ({"target": 0}, "target must be above 0"),
        ({"interval": 0}, "interval must be at least 1, found 0"),
        ({"interval": "often"}, "interval is a number of tokens or 'adaptive', found 'often'"),
        ({"interval": 1.5}, "interval must be a whole number"),
        ({"observe": 1}, "observe is True or False, found 1"),
        ({"mask_only": None}, "mask_only is True or False"),
        ({"compress_first": "yes"}, "compress_first is True or False"),
        ({"eviction": "heads"}, "eviction is 'shared' or 'per_head', found 'heads'"),
        ({"observed_layers": 0}, "observed_layers must be at least 1"),
        ({"observed_layers": ()}, "observed_layers must be at least 1"),
        ({"observed_layers": (1, -1)}, "a layer of observed_layers must be at least 0"),
        ({"observed_layers": "all"}, "observed_layers must be a whole number, found 'all'"),
        ({"receipts_file": ""}, "receipts_file must be a path, found ''"),
        ({"receipts_file": 3}, "receipts_file must be a path, found 3"),
        ({"predictor": 3}, "predictor must be a path, found 3"),
        ({"predictor": ""}, "predictor must be a path, found ''"),
        ({"predictor": None}, "predictor must be a path, found"),
        ({"protection": {"n_sink": 3}}, r"protection must be a Protection\(...\), found {"),
        ({"tiers": None}, r"tiers must be a Tiers\(...\), found None"),
        ({"guard": Tiers()}, r"guard must be a Guard\(...\)"),
        ({"schedule": 3}, r"schedule must be a Schedule\(...\), found 3"),
        ({"policy": ""}, "policy must be a name or an object called with the facts, found ''"),
        ({"policy": 3}, "policy must be a name or an object"),
        ({"policy": Decides}, "policy must be a name or an object"),
    ],
)
def test_values_out_of_range(given, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**given)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Protection, {"n_sink": -1}, "n_sink must be at least 0"),
        (Protection, {"recent_window": 2.0}, "recent_window must be a whole number"),
        (Protection, {"ends": 0.5}, "ends must be at least 0 and at most 0.45"),
        (Protection, {"system": "yes"}, "system is True or False"),
        (Protection, {"precise": 1}, "precise is True or False"),
        (Protection, {"weights": {"not": -1}}, "the weight of 'not' must be at least 0, found -1"),
        (Protection, {"weights": {"not": "high"}}, "the weight of 'not' must be a number"),
        (Protection, {"weights": {"": 1}}, "a factor for an empty text"),
        (Protection, {"weights": {-1: 1}}, "a token id in weights must be at least 0"),
        (Protection, {"weights": {1.5: 1}}, "a token id in weights must be a whole number"),
        (Protection, {"weights": 3}, "weights must map token ids or texts to factors"),
        (Protection, {"weights": ("abc",)}, "weights must map token ids or texts to factors"),
        (Schedule, {"every": 0}, "every must be at least 1"),
        (Schedule, {"full_until": -1}, "full_until must be at least 0"),
        (Schedule, {"loss": 2}, "loss must be at least 0 and at most 1"),
        (Schedule, {"floor": 0}, "floor must be above 0"),
        (Schedule, {"early_until": 9, "late_from": 9}, "must be less than late_from"),
        (Tiers, {"int8": 1}, "int8 is True or False"),
        (Tiers, {"cpu_bytes": -1}, "cpu_bytes must be at least 0"),
        (Tiers, {"disk_bytes": 5}, "archive_folder is not set: name a folder"),
        (Tiers, {"archive_folder": "x"}, "disk_bytes is 0: say how much"),
        (Tiers, {"archive_folder": Path(), "disk_bytes": 1}, "archive_folder must be a path"),
        (Guard, {"max_kl": 0}, "max_kl must be above 0, found 0"),
        (Guard, {"max_mass": 1.5}, "max_mass must be above 0 and at most 1"),
        (Guard, {"canary_tokens": 0}, "nothing is measured: give canary tokens, or max_kl=None"),
        (Guard, {"canary_tokens": -1}, "canary_tokens must be at least 0"),
    ],
)
def test_groups_check_their_own(kind, given, message):
    with pytest.raises(ConfigError, match=message):
        kind(**given)
    with pytest.raises(TypeError):
        kind(1)


def test_no_limit_is_none():
    assert Guard(max_kl=None, canary_tokens=0).max_kl is None
    assert Guard(max_kl=math.inf, canary_tokens=0).max_kl is None
    assert Schedule().has_limit
    assert not Schedule(loss=0).has_limit
    assert not Schedule(floor=1).has_limit


def test_weights_are_kept_in_one_order():
    one = Protection(weights={" not": 2, 7: math.inf, " if": 3})
    other = Protection(weights=((" if", 3.0), (" not", 2.0), (7, math.inf)))
    assert one == other
    assert repr(one) == repr(other)
    assert hash(one) == hash(other)


def test_settings_print_what_differs_and_equal_ones_alike():
    assert repr(CacheConfig()) == "CacheConfig()"
    config = CacheConfig(**MANAGED, protection=Protection(n_sink=8))
    assert repr(config) == (
        "CacheConfig(budget_tokens=1000, policy='staged', protection=Protection(n_sink=8))"
    )
    assert str(config) == repr(config)
    assert repr(CacheConfig(**MANAGED)) != repr(config)
    # 1 == 1.0, but settings that print alike must be the same.
    assert repr(CacheConfig(trigger=1)) != repr(CacheConfig())


def test_settings_are_keys():
    config = CacheConfig(**MANAGED, observed_layers=[3, 1], receipts_file="a.jsonl")
    assert {config: 1}[replace(config)] == 1
    assert config.observed_layers == (1, 3)
    assert config.receipts_file == Path("a.jsonl")
    assert hash(CacheConfig(policy=Decides(), budget_tokens=99))
    assert CacheConfig(policy=Decides(1), budget_tokens=99) != CacheConfig(
        policy=Decides(2), budget_tokens=99
    )


def test_a_policy_without_a_hash_is_refused():
    @dataclass
    class Loose:
        def __call__(self, facts):
            return []

    with pytest.raises(ConfigError, match=r"has no hash.*a function or a frozen dataclass"):
        CacheConfig(policy=Loose(), budget_tokens=99)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_need_a_budget_and_yield_to_settings(name):
    config = CacheConfig.preset(name, budget_tokens=2048)
    assert (config.policy, config.budget_tokens) == ("staged", 2048)
    assert CacheConfig.preset(name, budget_tokens=2048, target=0.1).target == 0.1
    if config.schedule is None:
        with pytest.raises(ConfigError, match="nothing says how much may stay"):
            CacheConfig.preset(name)


def test_presets_go_from_careful_to_bold():
    careful, even, bold = (
        CacheConfig.preset(n, budget_tokens=2048)
        for n in ("conservative", "balanced", "aggressive")
    )
    assert careful.guard.max_kl < even.guard.max_kl < bold.guard.max_kl
    assert careful.target > even.target > bold.target
    assert careful.protection.recent_window > bold.protection.recent_window
    assert even == CacheConfig(policy="staged", budget_tokens=2048)


def test_unknown_presets_and_settings_are_refused():
    with pytest.raises(ConfigError, match=r"no preset 'bold'; presets are 'conservative', "):
        CacheConfig.preset("bold")
    with pytest.raises(ConfigError, match="unknown setting 'budget_token'; did you mean 'budget_t"):
        CacheConfig.preset("balanced", budget_token=9)


def test_settings_need_neither_torch_nor_numpy():
    code = (
        "import sys; from sidequest_langchain.config import CacheConfig; CacheConfig();"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_predictor_is_a_word_or_a_path():
    assert CacheConfig().predictor == "auto"
    assert CacheConfig(predictor="none").predictor == "none"
    assert CacheConfig(predictor="a/b.safetensors").predictor == Path("a/b.safetensors")
    config = CacheConfig(predictor=Path("mine.safetensors"))
    assert CacheConfig.from_toml(config.to_toml()) == config
