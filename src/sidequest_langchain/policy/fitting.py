"""Training the importance predictor, and judging it: numpy only, minutes at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.facts import Floats
from sidequest_langchain.policy.importance import FEATURES, MLP, TENSORS, Predictor
from sidequest_langchain.policy.traces import Cycle

Weights = dict[str, npt.NDArray[np.float64]]
BASE = FEATURES.index("log_importance")
SHARES = (0.5, 0.35, 0.2)
"""Of the rows, kept, where scores are judged."""
NORMS = ("has_norms", "log_key_norm", "log_value_norm")


def fit(
    features: Floats,
    targets: Floats,
    *,
    seed: int,
    n_hidden: int = 32,
    n_epochs: int = 30,
    batch: int = 1024,
    rate: float = 3e-3,
    decay: float = 1e-4,
) -> MLP:
    """Train a predictor of future attention; the same seed gives the same weights.

    The loss is that of a Poisson rate, whose best guess is the *mean* future attention: a token
    that is rarely but strongly needed must not be guessed at its median, which is nothing.
    Leave out rows that are protected anyway: a sink's attention would drown all others.

    Args:
        features: `[N, F]`, of `features_of`.
        targets: Mean attention probability afterwards, `[N]`.
        seed: Of the first weights and the order.
        n_hidden: Width of the hidden layer.
        n_epochs: Passes over all rows.
        batch: Rows a step.
        rate: Of Adam at the beginning; it falls to 0 by a cosine.
        decay: Weight decay.

    Raises:
        ValueError: There are no rows, they are not finite, or the lengths differ.
    """
    x, y = np.asarray(features, np.float64), np.asarray(targets, np.float64)
    if x.ndim != 2 or x.shape[1] != len(FEATURES) or y.shape != x.shape[:1] or not y.size:
        msg = f"features must be [N, {len(FEATURES)}] and targets [N], found {x.shape}, {y.shape}"
        raise ValueError(msg)
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (y >= 0).all()):
        msg = "features must be finite, and targets finite and not negative"
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    weights = _first_weights(x, y, n_hidden, rng)
    adam = _Adam(decay)
    # In units of the mean target, so that one learning rate suits every trace.
    unit = max(float(y.mean()), 1e-12)
    n_steps = n_epochs * -(-y.size // batch)
    step = 0
    for _ in range(n_epochs):
        order = rng.permutation(y.size)
        for first in range(0, y.size, batch):
            rows = order[first : first + batch]
            gradients = _gradients(weights, x[rows], y[rows] / unit, np.log(unit))
            adam.step(weights, gradients, rate * 0.5 * (1 + np.cos(np.pi * step / n_steps)))
            step += 1
    return MLP({name: weights[name].astype(np.float32) for name in TENSORS})


def recall(scores: Floats, future: Floats, share: float) -> float:
    """Share of the future attention that falls on the `share` of rows with the highest scores.

    Args:
        scores: `[n]`.
        future: Attention afterwards, `[n]`.
        share: Of the rows, kept; at least one is.
    """
    total = float(future.sum())
    if total <= 0:
        return 1.0
    n_keep = max(1, round(share * len(scores)))
    best = np.argsort(-np.asarray(scores, np.float64), kind="stable")[:n_keep]
    return float(future[best].sum()) / total


def _column(name: str) -> Callable[[Floats], Floats]:
    at = FEATURES.index(name)
    return lambda features: features[:, at]


def _window(features: Floats) -> Floats:
    """As SnapKV's policy ranks: what no window saw, by its average."""
    window, average = _column("log_window")(features), features[:, BASE]
    return np.where(window > window.min(initial=0.0), window, average)


def _accumulated(features: Floats) -> Floats:
    """The plain sum of H2O, from its mean and its count."""
    n_seen = np.expm1(_column("log_n_seen")(features))
    return np.asarray(np.exp(_column("log_accumulated")(features)) * n_seen, np.float32)


BASELINES: Mapping[str, Callable[[Floats], Floats]] = {
    "average": _column("log_importance"),
    "last": _column("log_last"),
    "window": _window,
    "accumulated": _accumulated,
    "accumulated a query": _column("log_accumulated"),
}
"""Scores that need no training: our moving average, TOVA, SnapKV (not pooled), and H2O's sum, plain
and divided by the queries that could see the token."""


def judge(
    predictor: Predictor, cycles: Sequence[Cycle], shares: Sequence[float] = SHARES
) -> dict[float, dict[str, float]]:
    """Mean recall over cycles at each kept share.

    Args:
        predictor: To be judged.
        cycles: Held out of training.
        shares: Kept.

    Returns:
        By share, by score: `"predicted"`, those of `BASELINES`, and `"best"`, which knows the
        future.
    """
    table: dict[float, dict[str, float]] = {share: {} for share in shares}
    scorers = {"predicted": predictor, **BASELINES}
    for name in (*scorers, "best"):
        found = [(scorers[name](c.features) if name in scorers else c.future) for c in cycles]
        for share in shares:
            recalls = [recall(s, c.future, share) for s, c in zip(found, cycles, strict=True)]
            table[share][name] = fmean(recalls) if recalls else float("nan")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """By how much a predictor's recall is above that of another score at one kept share."""

    mean: float
    """Over whole samples, each as the mean of its cycles."""
    error: float
    """Standard error of the mean; samples are what was drawn, cycles of one are much alike."""
    n_won: int
    n_samples: int

    @property
    def is_clear(self) -> bool:
        """Whether the mean is above zero by more than two standard errors."""
        return self.n_samples > 1 and self.mean > 2 * self.error


def gains(
    predictor: Predictor,
    cycles: Sequence[Cycle],
    shares: Sequence[float] = SHARES,
    *,
    over: str = "average",
) -> dict[float, Gain]:
    """What a predictor gains over one of `BASELINES`, by kept share."""
    found: dict[float, list[float]] = {share: [] for share in shares}
    for sample in dict.fromkeys(cycle.sample for cycle in cycles):
        own = judge(predictor, [c for c in cycles if c.sample == sample], shares)
        for share in shares:
            found[share].append(own[share]["predicted"] - own[share][over])
    return {
        share: Gain(
            mean=fmean(each) if each else 0.0,
            error=stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0,
            n_won=sum(gain > 0 for gain in each),
            n_samples=len(each),
        )
        for share, each in found.items()
    }


def fit_cycles(cycles: Sequence[Cycle], *, seed: int, n_hidden: int = 32) -> MLP:
    """Train a predictor on the rows of some cycles; see `fit`.

    Norms of keys and values are left out: a cycle that reads them costs a pass over the keys.

    Raises:
        ConfigError: There is nothing to learn from.
    """
    if not sum(len(cycle.future) for cycle in cycles):
        msg = "the traces hold no rows to learn from; record longer samples, or more of them"
        raise ConfigError(msg)
    features = np.concatenate([cycle.features for cycle in cycles])
    features[:, [FEATURES.index(name) for name in NORMS]] = 0.0
    future = np.concatenate([cycle.future for cycle in cycles])
    return fit(features, future, seed=seed, n_hidden=n_hidden)


@dataclass
class _Adam:
    """Adam with decoupled weight decay, arXiv:1711.05101. Changes the weights in place."""

    decay: float
    mean: Weights = field(default_factory=dict)
    square: Weights = field(default_factory=dict)
    n: int = 0

    def step(self, weights: Weights, gradients: Weights, rate: float) -> None:
        self.n += 1
        for name, gradient in gradients.items():
            mean = 0.9 * self.mean.get(name, np.zeros_like(gradient)) + 0.1 * gradient
            square = 0.999 * self.square.get(name, np.zeros_like(gradient)) + 0.001 * gradient**2
            self.mean[name], self.square[name] = mean, square
            way = (mean / (1 - 0.9**self.n)) / (np.sqrt(square / (1 - 0.999**self.n)) + 1e-8)
            weights[name] = weights[name] - rate * (way + self.decay * weights[name])


def _first_weights(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], n_hidden: int, rng: np.random.Generator
) -> Weights:
    scale = x.std(axis=0)
    # Means agree from the beginning; the output layer adds nothing yet.
    base = max(float(np.exp(x[:, BASE]).mean()), 1e-12)
    hidden = rng.normal(0.0, x.shape[1] ** -0.5, (x.shape[1], n_hidden))
    # What never changed in training says nothing, whatever it is later.
    hidden[scale <= 1e-6] = 0.0
    return {
        "mean": x.mean(axis=0),
        "scale": np.where(scale > 1e-6, scale, 1.0),
        "hidden": hidden,
        "hidden_bias": np.zeros(n_hidden),
        "out": np.zeros(n_hidden),
        "out_bias": np.log([max(float(y.mean()), 1e-12) / base]),
    }


def _gradients(
    weights: Weights, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], log_unit: float
) -> Weights:
    normal = (x - weights["mean"]) / weights["scale"]
    hidden = np.tanh(normal @ weights["hidden"] + weights["hidden_bias"])
    log_rate = x[:, BASE] - log_unit + hidden @ weights["out"] + weights["out_bias"]
    # Of the Poisson loss, exp(f) - y f; bounded, since one outlier must not undo the rest.
    error = np.clip(np.exp(np.minimum(log_rate, 20.0)) - y, -100.0, 100.0) / y.size
    at_hidden = np.outer(error, weights["out"]) * (1 - hidden**2)
    return {
        "hidden": normal.T @ at_hidden,
        "hidden_bias": at_hidden.sum(axis=0),
        "out": hidden.T @ error,
        "out_bias": error.sum(keepdims=True),
    }
