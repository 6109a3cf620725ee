"""The learned guess: its features, its training, its file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.fitting import _gradients, fit, fit_cycles, judge, recall
from sidequest_langchain.policy.importance import FEATURES, MLP, features_of, predict
from sidequest_langchain.policy.staged import EvictStaged
from sidequest_langchain.policy.traces import Cycle
from tests.policy.making import cache, evicted, segment

BASE = FEATURES.index("log_importance")
RESULT = FEATURES.index("token_tool_result")


def column(features, name):
    return features[:, FEATURES.index(name)].tolist()


def traces(seed, n_cycles=40, n=100):
    """Cycles where tool results are looked at four times as often as their average says."""
    rng = np.random.default_rng(seed)
    cycles = []
    for _ in range(n_cycles):
        kinds = rng.choice(list("ar"), n)
        importance = rng.gamma(1.0, 0.01, n)
        facts = cache(segment(1, "".join(kinds), importance=importance))
        future = importance * np.where(kinds == "r", 4.0, 1.0) * rng.gamma(4.0, 0.25, n)
        features = features_of(facts, facts.segments[0])
        cycles.append(Cycle(f"made {seed} {len(cycles)}", features, future.astype(np.float32)))
    return cycles


@pytest.fixture(scope="module")
def fitted():
    return fit_cycles(traces(1), seed=3, n_hidden=32)


def test_features_are_what_their_names_say():
    trunk = segment(1, 3)
    path = segment(
        2,
        "drr",
        trunk,
        importance=[0.1, 0.2, 0.0],
        accumulated=[4, 0, 0],
        n_seen=[2, 0, 1],
        window=[np.nan, 0.5, 0],
        age=3,
        key_norm=[1, 2, 3],
        value_norm=[4, 5, 6],
    )
    found = features_of(cache(trunk, path, n_seen=10), path)
    assert found.shape == (3, len(FEATURES))
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert column(found, "log_importance")[:2] == pytest.approx(np.log([0.1, 0.2]), abs=1e-4)
    assert column(found, "log_accumulated")[0] == pytest.approx(np.log(2), abs=1e-4)
    assert column(found, "log_position") == pytest.approx(np.log1p([3, 4, 5]))
    assert column(found, "log_distance") == pytest.approx(np.log1p([7, 6, 5]))
    assert column(found, "log_age") == pytest.approx(np.log1p([3] * 3))
    assert column(found, "token_delimiter") == [1, 0, 0]
    assert column(found, "segment_tool_result") == [1, 1, 1]
    assert column(found, "segment_delimiter") == [0, 0, 0]
    assert column(found, "has_norms") == [1, 1, 1]
    assert column(found, "log_key_norm") == pytest.approx(np.log1p([1, 2, 3]))
    assert column(features_of(cache(trunk), trunk), "has_norms") == [0, 0, 0]
    assert len(FEATURES) == len(set(FEATURES)) == 14 + 2 * len(TokenKind)


def test_an_empty_segment_has_no_rows_of_features():
    empty = segment(1, 0)
    assert features_of(cache(empty), empty).shape == (0, len(FEATURES))


def test_it_learns_what_the_average_does_not_know(fitted):
    held_out = traces(2)
    knowing = judge(lambda x: np.exp(x[:, BASE]) * (1 + 3 * x[:, RESULT]), held_out)
    for share, found in judge(fitted, held_out).items():
        most = knowing[share]["predicted"]
        assert found["average"] + 0.04 < most
        assert most - 0.005 < found["predicted"] <= found["best"] <= 1
    # The rate itself is right, not only the order: four times for tool results.
    features = held_out[0].features
    factor = fitted(features) / np.exp(features[:, BASE])
    is_result = features[:, RESULT] == 1
    assert np.median(factor[is_result]) == pytest.approx(4, rel=0.3)
    assert np.median(factor[~is_result]) == pytest.approx(1, rel=0.3)


def test_the_same_seed_gives_the_same_weights_and_another_others():
    (cycle,) = traces(1, n_cycles=1)
    x, y = cycle.features, cycle.future
    one, same, other = (fit(x, y, seed=s, n_epochs=2) for s in (1, 1, 2))
    assert all(np.array_equal(one.tensors[k], same.tensors[k]) for k in one.tensors)
    assert not np.array_equal(one.tensors["hidden"], other.tensors["hidden"])


def test_gradients_are_those_of_the_loss():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, len(FEATURES)))
    y = rng.gamma(1.0, 1.0, 6)
    weights = {
        "mean": np.zeros(len(FEATURES)),
        "scale": np.ones(len(FEATURES)),
        "hidden": rng.normal(size=(len(FEATURES), 4)) / 4,
        "hidden_bias": rng.normal(size=4),
        "out": rng.normal(size=4),
        "out_bias": rng.normal(size=1),
    }

    def loss():
        hidden = np.tanh(x @ weights["hidden"] + weights["hidden_bias"])
        log_rate = x[:, BASE] - 0.3 + hidden @ weights["out"] + weights["out_bias"]
        return np.mean(np.exp(log_rate) - y * log_rate)

    for name, gradient in _gradients(weights, x, y, 0.3).items():
        for at in list(np.ndindex(gradient.shape))[:5]:
            was = weights[name][at]
            weights[name][at] = was + 1e-6
            above = loss()
            weights[name][at] = was - 1e-6
            slope = (above - loss()) / 2e-6
            weights[name][at] = was
            assert gradient[at] == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_it_is_small_and_comes_back_as_it_was(fitted, tmp_path):
    path = tmp_path / "weights.safetensors"
    fitted.save(path)
    assert path.stat().st_size < 8000
    assert fitted.n_bytes < 6000
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]
    features = traces(5, n_cycles=1)[0].features
    assert np.array_equal(MLP.load(path)(features), fitted(features))


def test_damaged_missing_and_foreign_weights_are_refused(fitted, tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ConfigError, match=r"cannot be read from .*weights"):
        MLP.load(path)
    fitted.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        MLP.load(path)
    save_file(dict(fitted.tensors), path, metadata={"features": "log_importance"})
    with pytest.raises(ConfigError, match="for other features"):
        MLP.load(path)
    with pytest.raises(ConfigError, match="lack out_bias"):
        MLP({k: v for k, v in fitted.tensors.items() if k != "out_bias"})
    for wrong in (np.zeros(3, np.float32), np.full_like(fitted.tensors["mean"], np.nan)):
        with pytest.raises(ConfigError, match="mean must be finite and of shape"):
            MLP({**fitted.tensors, "mean": wrong})


def test_far_features_give_finite_guesses(fitted):
    far = np.full((3, len(FEATURES)), 50.0, np.float32)
    far[:, BASE] = 0
    assert np.isfinite(fitted(far)).all()


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.zeros((0, len(FEATURES))), np.zeros(0)),
        (np.zeros((2, 3)), np.zeros(2)),
        (np.zeros((2, len(FEATURES))), np.zeros(3)),
        (np.full((2, len(FEATURES)), np.nan), np.zeros(2)),
        (np.zeros((2, len(FEATURES))), -np.ones(2)),
    ],
)
def test_what_cannot_be_learned_from_is_refused(x, y):
    with pytest.raises(ValueError, match="features must be"):
        fit(x, y, seed=0)


def test_targets_of_nothing_do_not_break_training():
    x = traces(1, n_cycles=1)[0].features
    model = fit(x, np.zeros(len(x)), seed=0, n_epochs=1)
    assert np.isfinite(model(x)).all()


def test_recall_is_a_share_of_the_future():
    future = np.array([0.5, 0.3, 0.2, 0.0])
    assert recall(np.array([4, 3, 2, 1]), future, 0.5) == pytest.approx(0.8)
    assert recall(np.array([1, 2, 3, 4]), future, 0.5) == pytest.approx(0.2)
    assert recall(future, future, 0.01) == pytest.approx(0.5)
    assert recall(future, np.zeros(4), 0.5) == 1.0


def test_a_policy_follows_the_prediction():
    path = segment(1, "aar", importance=[0.1, 0.2, 0.3])
    facts = cache(path, rows=1)
    guessed = predict(facts, lambda features: np.exp(-features[:, BASE]))
    assert facts.segments[0].predicted is None
    assert evicted(EvictStaged(fair=0)(facts)) == {1: [0]}
    assert evicted(EvictStaged(fair=0)(replace(guessed))) == {1: [2]}
