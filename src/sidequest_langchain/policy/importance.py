"""A small learned guess of how much attention a token will get, from what is known of it.

It must not know how it was trained; see `fitting`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.facts import CacheFacts, Floats, SegmentFacts

EPSILON = 1e-7
"""Added to probabilities before their logarithm: less attention is none."""

NUMBERS = (
    "log_importance",
    "log_last",
    "log_window",
    "log_accumulated",
    "log_n_seen",
    "log_position",
    "log_distance",
    "log_age",
    "log_mass",
    "depth",
    "is_active",
    "has_norms",
    "log_key_norm",
    "log_value_norm",
)
FEATURES = (
    *NUMBERS,
    *(f"token_{kind.name.lower()}" for kind in TokenKind),
    *(f"segment_{kind.name.lower()}" for kind in TokenKind),
)
"""The columns, in order. Weights that were made for other columns are refused."""

TENSORS = ("mean", "scale", "hidden", "hidden_bias", "out", "out_bias")


class Predictor(Protocol):
    """Guesses the attention a query will give a token from now on."""

    def __call__(self, features: Floats) -> Floats:
        """Expected probability, `[n]`, from features `[n, len(FEATURES)]`; pure."""
        ...


def features_of(facts: CacheFacts, segment: SegmentFacts) -> Floats:
    """What is known of each token, `[n_tokens, len(FEATURES)]`; absent norms are 0."""
    n = segment.n_tokens
    positions = segment.start + np.arange(n)
    mean_seen = segment.accumulated / np.maximum(segment.n_seen, 1)
    has_norms = segment.key_norm is not None and segment.value_norm is not None
    zeros = np.zeros(n)
    columns = {
        "log_importance": _log(segment.importance),
        "log_last": _log(segment.last),
        "log_window": _log(np.nan_to_num(segment.window)),
        "log_accumulated": _log(mean_seen),
        "log_n_seen": np.log1p(segment.n_seen),
        "log_position": np.log1p(positions),
        "log_distance": np.log1p(np.maximum(0, facts.n_seen - positions)),
        "log_age": np.full(n, np.log1p(segment.age)),
        "log_mass": np.full(n, _log(np.asarray(segment.mass))),
        "depth": np.full(n, float(segment.depth)),
        "is_active": np.full(n, float(segment.is_active)),
        "has_norms": np.full(n, float(has_norms)),
        "log_key_norm": np.log1p(segment.key_norm) if segment.key_norm is not None else zeros,
        "log_value_norm": np.log1p(segment.value_norm) if segment.value_norm is not None else zeros,
    }
    kinds = np.eye(len(TokenKind))
    of_segment = np.broadcast_to(kinds[_kind_of(segment)], (n, len(TokenKind)))
    numbers = np.stack([columns[name] for name in NUMBERS], axis=1)
    return np.concatenate([numbers, kinds[segment.kinds], of_segment], axis=1).astype(np.float32)


def predict(facts: CacheFacts, predictor: Predictor) -> CacheFacts:
    """The facts with `predicted` of every segment filled in."""
    segments = tuple(replace(s, predicted=predictor(features_of(facts, s))) for s in facts.segments)
    return replace(facts, segments=segments)


@dataclass(frozen=True, eq=False)
class MLP:
    """One hidden layer on the logarithm of the moving average: untrained, it is that average.

    Raises:
        ConfigError: A tensor is missing, or has another shape, or is not finite.
    """

    tensors: Mapping[str, npt.NDArray[np.float32]]
    """`mean`, `scale` `[F]`; `hidden` `[F, H]`, `hidden_bias`, `out` `[H]`; `out_bias` `[1]`."""

    def __post_init__(self) -> None:
        missing = [name for name in TENSORS if name not in self.tensors]
        if missing:
            msg = f"importance weights lack {', '.join(missing)}; make them again"
            raise ConfigError(msg)
        n, h = len(FEATURES), self.tensors["hidden_bias"].size
        shapes = {"mean": (n,), "scale": (n,), "hidden": (n, h), "hidden_bias": (h,), "out": (h,)}
        for name, shape in {**shapes, "out_bias": (1,)}.items():
            found = self.tensors[name]
            if found.shape != shape or not np.isfinite(found).all():
                msg = (
                    f"importance weights: {name} must be finite and of shape {shape}, found shape "
                    f"{found.shape}; make them again"
                )
                raise ConfigError(msg)

    def __call__(self, features: Floats) -> Floats:
        """Expected probability, `[n]`, from features `[n, F]`."""
        t = self.tensors
        hidden = np.tanh((features - t["mean"]) / t["scale"] @ t["hidden"] + t["hidden_bias"])
        # Bounded, so that features from far outside of training cannot overflow.
        change = np.clip(hidden @ t["out"] + t["out_bias"], -20.0, 20.0)
        base = features[:, FEATURES.index("log_importance")]
        return np.asarray(np.exp(base + change), np.float32)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(int(self.tensors[name].nbytes) for name in TENSORS)

    def save(self, path: Path) -> None:
        """Write the weights as safetensors, atomically."""
        content = save(
            {name: np.ascontiguousarray(self.tensors[name], np.float32) for name in TENSORS},
            metadata={"features": ",".join(FEATURES)},
        )
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> MLP:
        """Read weights that `save` wrote.

        Raises:
            ConfigError: The file is missing, damaged, or was made for other features.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                made_for = (file.metadata() or {}).get("features")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            msg = f"importance weights cannot be read from {str(path)!r}: {error}"
            raise ConfigError(msg) from error
        if made_for != ",".join(FEATURES):
            msg = f"the importance weights in {str(path)!r} are for other features; make them again"
            raise ConfigError(msg)
        return cls(tensors)


def _log(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.asarray(np.log(np.maximum(values, 0.0) + EPSILON))


def _kind_of(segment: SegmentFacts) -> int:
    """What most of a segment's tokens are, its delimiters apart."""
    kinds = segment.kinds[segment.kinds != TokenKind.DELIMITER]
    return int(np.bincount(kinds).argmax()) if kinds.size else int(TokenKind.DELIMITER)
