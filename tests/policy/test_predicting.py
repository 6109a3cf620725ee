"""Predictions reach the policy where there are weights, and nowhere else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.models import DEFAULT_MODEL
from sidequest_langchain.policy import importance
from sidequest_langchain.policy.importance import FEATURES, MLP, features_of, predict, predictor_for
from tests.engine.driving import ask, ids, model_of, run
from tests.engine.managing import managed
from tests.policy.making import cache, segment
from tests.support.tok import byte_tokenizer


def weights(factor=0.0):
    """Weights that guess the average times e to the `factor`."""
    n = len(FEATURES)
    shapes = {"mean": n, "scale": n, "hidden": (n, 2), "hidden_bias": 2, "out": 2, "out_bias": 1}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tensors["scale"] += 1
    tensors["out_bias"] += factor
    return MLP(tensors)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that comes with weights for a model named `known`."""
    folder = tmp_path / "data"
    folder.mkdir()
    weights(1.0).save(folder / "known.safetensors")
    monkeypatch.setattr(importance, "DATA", folder)
    return folder


def asked(engine_name="", **settings):
    """What a policy was given on an engine of that name: one cycle's facts."""
    seen = []

    def policy(facts):
        seen.append(facts)
        return ()

    config = managed(policy, 4000, trigger=0.01, target=0.005, **settings)
    engine = Engine(model_of("llama"), byte_tokenizer(), config=config, name=engine_name)
    try:
        run(engine, ask(ids(60), 12, ignore_eos=True))
    finally:
        engine.close()
    return seen[-1]


class TestChoice:
    def test_auto_is_by_the_name_of_the_model(self, shipped):
        assert predictor_for("auto", "known") is not None
        for name in ("", "unknown", "../data/known", str(shipped / "known"), "known.safetensors"):
            assert predictor_for("auto", name) is None

    def test_none_is_none_and_a_path_is_that_file(self, shipped):
        assert predictor_for("none", "known") is None
        assert predictor_for(shipped / "known.safetensors", "unknown") is not None

    def test_damaged_foreign_and_missing_files_are_refused(self, shipped, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            predictor_for(tmp_path / "nothing", "known")
        (shipped / "known.safetensors").write_bytes(b"damaged")
        for setting in ("auto", shipped / "known.safetensors"):
            with pytest.raises(ConfigError, match="cannot be read"):
                predictor_for(setting, "known")

    def test_a_model_is_refused_with_its_weights_and_not_at_its_first_cycle(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            asked(predictor=tmp_path / "nothing")


class TestUse:
    def test_a_policy_sees_predictions_where_there_are_weights(self, shipped):
        for facts in (asked("known"), asked(predictor=shipped / "known.safetensors")):
            assert sum(s.n_tokens for s in facts.segments) > 60
            for s in facts.segments:
                assert s.predicted == pytest.approx(np.e * (s.importance + 1e-7), rel=1e-4)
                assert s.score is s.predicted

    @pytest.mark.parametrize(
        ("name", "setting"), [("unknown", "auto"), ("", "auto"), ("known", "none")]
    )
    def test_and_the_average_everywhere_else(self, shipped, name, setting):
        for s in asked(name, predictor=setting).segments:
            assert s.predicted is None
            assert s.score is s.importance

    def test_a_dropped_package_folder_is_no_weights(self, shipped):
        shutil.rmtree(shipped)
        assert predictor_for("auto", "known") is None


def test_all_segments_at_once_are_as_one_by_one():
    trunk = segment(1, "sdqd", importance=[0.1, 0.2, 0.3, 0.4], n_seen=[9, 8, 7, 6])
    middle = segment(2, "a" * 5, trunk, key_norm=range(5), value_norm=range(5), n_reads=3)
    facts = cache(trunk, middle, segment(3, "rrdr", middle, age=4, mass=0.3))
    given = []

    def numbered(features):
        given.append(features)
        return np.arange(len(features), dtype=np.float32)

    together = predict(facts, numbered)
    want = np.concatenate([features_of(facts, s) for s in facts.segments])
    assert np.array_equal(given[0], want)
    assert len({tuple(row) for row in want[:, :9].tolist()}) == 13
    assert [s.predicted.tolist() for s in together.segments] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8],
        [9, 10, 11, 12],
    ]
    assert predict(cache(), numbered).segments == ()


def test_settings_tell_engines_apart_by_the_predictor():
    assert CacheConfig() != CacheConfig(predictor="none")
    assert "predictor='none'" in repr(CacheConfig(predictor="none"))


def test_the_page_says_what_runs_and_how_much_is_shipped():
    page = (Path(__file__).parents[2] / "docs" / "importance.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "importance.md", "exec"), {})
    shipped = predictor_for("auto", DEFAULT_MODEL)
    assert f"{shipped.n_bytes / 1000:.1f} KB" in page
    assert f"{sum(t.size for t in shipped.tensors.values()):,} numbers" in page
    assert page.count(f"`{DEFAULT_MODEL}` has weights") == 1
