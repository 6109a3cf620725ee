"""The file of a trace: comes back as it was, holds no text, and is refused when it is not one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.importance import FEATURES, MLP, features_of
from sidequest_langchain.policy.traces import DTYPES, Cycle, Trace
from tests.policy.making import cache, segment

SETTINGS = {"model": "some-model", "tokens": 100}


def cycle(sample, kinds, seed=0):
    rng = np.random.default_rng(seed)
    n = len(kinds)
    facts = cache(
        segment(1, kinds, importance=rng.gamma(1, 0.01, n), token_ids=range(500, 500 + n))
    )
    future = rng.gamma(1, 0.01, n).astype(np.float32)
    return Cycle(sample, features_of(facts, facts.segments[0]), future)


@pytest.fixture
def trace():
    return Trace(
        settings=SETTINGS,
        cycles=(cycle("needle 0 0", "rrda"), cycle("needle 0 0", "ra", 1), cycle("keys 1 0", "ct")),
    )


@pytest.fixture
def path(tmp_path, trace):
    trace.save(tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


def columns_of(path):
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_it_comes_back_as_it_was(trace, path):
    again = Trace.load(path)
    assert again.settings == SETTINGS
    assert again.samples == trace.samples == ("needle 0 0", "keys 1 0")
    for one, other in zip(trace.cycles, again.cycles, strict=True):
        assert one.sample == other.sample
        assert np.array_equal(one.future, other.future)
        assert np.array_equal(one.features[:, :4], other.features[:, :4])
        assert np.allclose(one.features, other.features, rtol=1e-3, atol=1e-3)
        assert np.array_equal(one.features[:, 14:], other.features[:, 14:])
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_trace_of_nothing_comes_back_too(tmp_path):
    Trace(settings={}).save(tmp_path / "t")
    assert Trace.load(tmp_path / "t").cycles == ()


def test_it_holds_neither_token_ids_nor_text(path):
    columns, meta = columns_of(path)
    assert set(columns) == set(DTYPES)
    assert {str(c.dtype) for c in columns.values()} == {"float32", "float16", "uint8", "int32"}
    # The only whole numbers are kinds, lengths and which sample: none of 500 and above, the ids.
    assert (
        max(int(columns[name].max()) for name, d in DTYPES.items() if d in (np.uint8, np.int32))
        < 10
    )
    assert set(meta) == {"schema", "features", "samples", "settings"}
    assert json.loads(meta["samples"]) == ["needle 0 0", "keys 1 0"]
    assert not any("id" in name.split("_") for name in FEATURES)


def break_length(columns, meta):
    columns["future"] = columns["future"][:-1]


def break_kind(columns, meta):
    columns["token_kinds"] = columns["token_kinds"] + np.uint8(200)


def break_sample(columns, meta):
    columns["cycle_samples"] = columns["cycle_samples"] + np.int32(7)


def break_values(columns, meta):
    columns["future"] = -columns["future"]


def break_numbers(columns, meta):
    columns["numbers"] = columns["numbers"] * np.float16(np.nan)


def break_columns(columns, meta):
    del columns["attention"]


def break_features(columns, meta):
    meta["features"] = "log_importance"


def break_settings(columns, meta):
    meta["settings"] = "{"


@pytest.mark.parametrize(
    "damage",
    [
        break_length,
        break_kind,
        break_sample,
        break_values,
        break_numbers,
        break_columns,
        break_features,
        break_settings,
    ],
)
def test_damage_is_told(path, damage):
    columns, meta = columns_of(path)
    damage(columns, meta)
    save_file(columns, path, metadata=meta)
    with pytest.raises(ConfigError, match=r"t\.safetensors'"):
        Trace.load(path)


def test_missing_cut_and_foreign_files_are_refused(tmp_path, path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace.load(tmp_path / "nothing")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace.load(path)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="lack mean"):
        MLP.load(path)
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(ConfigError, match="is no trace of this release"):
        Trace.load(path)


def test_a_trace_can_be_replaced_but_not_changed(trace):
    assert replace(trace, cycles=()).samples == ()
    with pytest.raises(AttributeError):
        trace.cycles = ()
