"""Traces: what was known of each token, and the attention it then got; and the file they are in.

It must not know the tree; see `recording`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.facts import Bytes, Floats
from sidequest_langchain.policy.importance import FEATURES, NUMBERS
from sidequest_langchain.policy.tensor_file import read_arrays, write_arrays

SCHEMA = "sidequest.trace/1"
N_EXACT = 4
"""The first numbers are probabilities' logarithms, which rank tokens: they keep 32 bits."""
DTYPES: Mapping[str, type[np.generic]] = {
    "attention": np.float32,
    "numbers": np.float16,
    "token_kinds": np.uint8,
    "segment_kinds": np.uint8,
    "future": np.float32,
    "cycle_rows": np.int32,
    "cycle_samples": np.int32,
}


@dataclass(frozen=True, slots=True, eq=False)
class Cycle:
    """What a policy could choose from at one moment, and what came of it."""

    sample: str
    """Which sample it is of: samples are held out as a whole."""
    features: Floats
    """Of `importance.features_of`, `[n, len(FEATURES)]`."""
    future: Floats
    """Mean attention probability over the queries that came next, `[n]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Cycles of one model.

    No token id and no text is in it: attention, norms, positions, and of each token which kind of
    message it stands in. From these one sees how long messages were, not what they said.
    """

    settings: Mapping[str, Any]
    """What they were made from: model, seed, tokens and so on; plain values."""
    cycles: tuple[Cycle, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of the samples, in order."""
        return tuple(dict.fromkeys(cycle.sample for cycle in self.cycles))

    def save(self, path: Path) -> None:
        """Write it as safetensors, atomically; about 40 bytes a row."""
        n_numbers, names = len(NUMBERS), self.samples
        rows = [np.zeros((0, len(FEATURES)), np.float32), *(c.features for c in self.cycles)]
        features = np.concatenate(rows)
        one_hot = features[:, n_numbers:].reshape(-1, 2, len(TokenKind))
        kinds = one_hot.argmax(2)
        columns: dict[str, npt.NDArray[Any]] = {
            "attention": features[:, :N_EXACT],
            "numbers": features[:, N_EXACT:n_numbers],
            "token_kinds": kinds[:, 0],
            "segment_kinds": kinds[:, 1],
            "future": np.concatenate([np.zeros(0), *(c.future for c in self.cycles)]),
            "cycle_rows": np.array([len(c.future) for c in self.cycles]),
            "cycle_samples": np.array([names.index(c.sample) for c in self.cycles]),
        }
        write_arrays(
            path,
            {name: np.ascontiguousarray(columns[name], dtype) for name, dtype in DTYPES.items()},
            {
                "schema": SCHEMA,
                "features": ",".join(FEATURES),
                "samples": json.dumps(names),
                "settings": json.dumps(dict(self.settings)),
            },
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            ConfigError: The file is missing, damaged, no trace, or of other features.
        """
        tensors, meta = read_arrays(path, "the trace")
        if meta.get("schema") != SCHEMA or meta.get("features") != ",".join(FEATURES):
            msg = f"{str(path)!r} is no trace of this release; make it with `sidequest trace`"
            raise ConfigError(msg)
        try:
            return cls(
                settings=json.loads(meta["settings"]),
                cycles=_cycles(tensors, json.loads(meta["samples"])),
            )
        except (KeyError, IndexError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            msg = f"the trace {str(path)!r} cannot be read ({why}); make it again"
            raise ConfigError(msg) from error


def _cycles(tensors: Mapping[str, npt.NDArray[Any]], names: Sequence[str]) -> tuple[Cycle, ...]:
    """The cycles of a file's columns.

    Raises:
        KeyError: A column is missing.
        IndexError: A kind or a sample is not known.
        ValueError: Lengths, types or values are wrong.
    """
    columns = {name: tensors[name] for name in DTYPES}
    rows = columns["cycle_rows"]
    n = int(rows.sum())
    for name, dtype in DTYPES.items():
        is_long = len(columns[name]) == (len(rows) if name.startswith("cycle") else n)
        if columns[name].dtype != dtype or not is_long:
            msg = f"{name} has {len(columns[name])} values of {columns[name].dtype}"
            raise ValueError(msg)
    numbers = np.concatenate([columns["attention"], columns["numbers"]], axis=1)
    features = np.concatenate(
        [numbers, _one_hot(columns["token_kinds"]), _one_hot(columns["segment_kinds"])], axis=1
    ).astype(np.float32)
    future = columns["future"]
    if features.shape[1] != len(FEATURES) or not np.isfinite(features).all():
        msg = f"its numbers are not finite, or of shape {numbers.shape}"
        raise ValueError(msg)
    if not (np.isfinite(future).all() and (future >= 0).all() and (rows >= 0).all()):
        msg = "its attention is not finite, or negative"
        raise ValueError(msg)
    ends = np.cumsum(rows)
    return tuple(
        Cycle(names[of], features[end - length : end], future[end - length : end])
        for of, end, length in zip(columns["cycle_samples"], ends, rows, strict=True)
    )


def _one_hot(kinds: Bytes) -> npt.NDArray[np.floating]:
    return np.asarray(np.eye(len(TokenKind))[kinds])
