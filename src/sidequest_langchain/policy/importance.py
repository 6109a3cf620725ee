"""A small learned guess of how much attention a token will get, from what is known of it.

It must not know how it was trained; see `fitting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.facts import CacheFacts, Floats, SegmentFacts
from sidequest_langchain.policy.tensor_file import read_arrays, write_arrays

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

DATA = Path(__file__).with_name("data")
"""Weights that come with the package, by model."""
TENSORS = ("mean", "scale", "hidden", "hidden_bias", "out", "out_bias")


class Predictor(Protocol):
    """Guesses the attention a query will give a token from now on."""

    def __call__(self, features: Floats) -> Floats:
        """Expected probability, `[n]`, from features `[n, len(FEATURES)]`; pure."""
        ...


def features_of(facts: CacheFacts, segment: SegmentFacts) -> Floats:
    """What is known of each token, `[n_tokens, len(FEATURES)]`; absent norms are 0."""
    return _features(facts, (segment,))


def predict(facts: CacheFacts, predictor: Predictor) -> CacheFacts:
    """The facts with `predicted` of every segment filled in."""
    if not facts.segments:
        return facts
    found = predictor(_features(facts, facts.segments))
    ends = np.cumsum([s.n_tokens for s in facts.segments])
    segments = tuple(
        replace(s, predicted=found[end - s.n_tokens : end])
        for s, end in zip(facts.segments, ends, strict=True)
    )
    return replace(facts, segments=segments)


def _features(facts: CacheFacts, segments: Sequence[SegmentFacts]) -> Floats:
    """The features of all tokens of some segments, `[n, F]`: one pass, since segments are many."""
    lengths = [s.n_tokens for s in segments]
    of = np.repeat(np.arange(len(segments)), lengths)

    def tokens(name: str) -> npt.NDArray[np.float32]:
        return np.concatenate([getattr(s, name) for s in segments])

    def norms(name: str) -> npt.NDArray[np.float32]:
        zeros = [np.zeros(n, np.float32) for n in lengths]
        found = [getattr(s, name) for s in segments]
        has_both = [s.key_norm is not None and s.value_norm is not None for s in segments]
        return np.concatenate(
            [f if has else zero for f, zero, has in zip(found, zeros, has_both, strict=True)]
        )

    starts = np.array([s.start for s in segments]) - np.cumsum([0, *lengths[:-1]])
    positions = np.arange(len(of)) + starts[of]
    n_seen = tokens("n_seen")
    attention = np.stack(
        [
            tokens("importance"),
            tokens("last"),
            np.nan_to_num(tokens("window")),
            tokens("accumulated") / np.maximum(n_seen, 1),
        ],
        axis=1,
    )
    counts = [n_seen, positions, np.maximum(0, facts.n_seen - positions)]
    whole = np.array(
        [
            [
                np.log1p(s.age),
                np.log(max(s.mass, 0.0) + EPSILON),
                s.depth,
                s.is_active,
                s.key_norm is not None and s.value_norm is not None,
            ]
            for s in segments
        ],
        np.float32,
    ).reshape(len(segments), -1)
    sizes = np.stack([norms("key_norm"), norms("value_norm")], axis=1)
    kinds = np.eye(len(TokenKind), dtype=np.float32)
    return np.concatenate(
        [
            np.log(np.maximum(attention, 0.0) + EPSILON),
            np.log1p(np.stack(counts, axis=1)),
            whole[of],
            np.log1p(sizes),
            kinds[tokens("kinds")],
            kinds[[_kind_of(s) for s in segments]][of],
        ],
        axis=1,
        dtype=np.float32,
        casting="same_kind",
    )


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
        arrays = {n: np.ascontiguousarray(self.tensors[n], np.float32) for n in TENSORS}
        write_arrays(path, arrays, {"features": ",".join(FEATURES)})

    @classmethod
    def load(cls, path: Path) -> MLP:
        """Read weights that `save` wrote.

        Raises:
            ConfigError: The file is missing, damaged, or was made for other features.
        """
        tensors, meta = read_arrays(path, "importance weights")
        if meta.get("features") != ",".join(FEATURES):
            msg = f"the importance weights in {str(path)!r} are for other features; make them again"
            raise ConfigError(msg)
        return cls(tensors)


def predictor_for(setting: Path | str, model: str) -> MLP | None:
    """The predictor that `CacheConfig(predictor=...)` names; `None`: the moving average.

    Args:
        setting: `"auto"`, `"none"` or a file of weights.
        model: Its name: `"auto"` takes what comes with the package for it, if anything does.

    Raises:
        ConfigError: The weights cannot be read, or were made for other features.
    """
    if setting == "none":
        return None
    if setting != "auto":
        return MLP.load(Path(setting))
    # By comparison, and not by making a path of the name: that may be anything.
    shipped = {path.stem: path for path in DATA.glob("*.safetensors")}
    return MLP.load(shipped[model]) if model in shipped else None


def _kind_of(segment: SegmentFacts) -> int:
    """What most of a segment's tokens are, its delimiters apart."""
    kinds = segment.kinds[segment.kinds != TokenKind.DELIMITER]
    return int(np.bincount(kinds).argmax()) if kinds.size else int(TokenKind.DELIMITER)
