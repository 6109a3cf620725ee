"""The groups of settings: what is protected, how much stays by length, where rows go, the guard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sidequest_langchain.config.checks import (
    Settings,
    as_path,
    check_count,
    check_flag,
    check_number,
)
from sidequest_langchain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Protection(Settings):
    """Rows that no policy may take out of memory.

    Protected rows may still be packed (INT8, INT4), unless they are sinks, or in the recent
    window, or `precise` is set. Releasing a whole idle segment is not eviction: it is exact.

    Raises:
        ConfigError: A value is out of range.
    """

    n_sink: int = 4
    """First tokens of every path."""
    recent_window: int = 50
    """Last tokens of every running path and of every idle one."""
    system: bool = True
    """System messages, tool schemas included."""
    question: bool = True
    """What the user said."""
    delimiters: bool = True
    """Control tokens of the chat template."""
    marked: bool = True
    """The texts of `protect_text`."""
    protect_text: tuple[str, ...] = ()
    """Texts whose every occurrence in a prompt is kept, as it is written there. What the model
    writes itself is not searched."""
    newest_tool_call: bool = True
    ends: float = 0.1
    """Share of the budget at each end of the prompt of the running paths together."""
    precise: bool = False
    """Whether all protected rows keep full precision."""
    weights: Mapping[int | str, float] | tuple[tuple[int | str, float], ...] = ()
    """Factors on the importance of tokens, by id or by text (each token of the text), kept as
    pairs. `math.inf` protects. For example logical connectives: `{" not": 2.0, " unless": 2.0}`."""

    def __post_init__(self) -> None:
        check_count("n_sink", self.n_sink, least=0)
        check_count("recent_window", self.recent_window, least=0)
        check_number("ends", self.ends, most=0.45)
        for field in fields(self):
            if isinstance(field.default, bool):
                check_flag(field.name, getattr(self, field.name))
        object.__setattr__(self, "weights", _pairs(self.weights))
        object.__setattr__(self, "protect_text", _texts(self.protect_text))
        if self.protect_text and not self.marked:
            msg = "protect_text is given, but marked=False protects none of it: leave marked out"
            raise ConfigError(msg)


def _texts(given: Any) -> tuple[str, ...]:
    # One string alone would be taken for as many texts as it has letters.
    if not isinstance(given, (tuple, list)) or not all(isinstance(t, str) and t for t in given):
        msg = f"protect_text must be texts that are not empty, as ('Never fly.',), found {given!r}"
        raise ConfigError(msg)
    return tuple(dict.fromkeys(given))


def _pairs(weights: Any) -> tuple[tuple[int | str, float], ...]:
    try:
        given = weights.items() if isinstance(weights, Mapping) else weights
        pairs = {token: weight for token, weight in given}  # noqa: C416 - checks the shape
    except (TypeError, ValueError):
        msg = (
            "weights must map token ids or texts to factors, such as {' not': 2.0}, found "
            f"{weights!r}"
        )
        raise ConfigError(msg) from None
    for token, weight in pairs.items():
        if isinstance(token, str):
            if not token:
                msg = "weights has a factor for an empty text; name a text or a token id"
                raise ConfigError(msg)
        else:
            check_count("a token id in weights", token, least=0)
        check_number(f"the weight of {token!r}", weight, most=math.inf)
    # In one order, so that equal settings print alike and find the same engine.
    return tuple(
        (token, float(pairs[token])) for token in sorted(pairs, key=lambda t: (str(type(t)), t))
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Schedule(Settings):
    """How much stays as a sequence grows, and how bold the policy is.

    For every further `every` tokens after the first `full_until`, a share `loss` less of the rows
    is kept, down to `floor`. Stages: early, before `early_until` tokens, nothing is done while
    the budget holds; late, from `late_from` on, idle branches go before anything on a running
    path is evicted.

    Raises:
        ConfigError: A value is out of range, or the late stage begins before the early one ends.
    """

    full_until: int = 1000
    every: int = 1000
    loss: float = 0.05
    """0: no limit by length."""
    floor: float = 0.35
    early_until: int = 512
    late_from: int = 8000

    def __post_init__(self) -> None:
        check_count("full_until", self.full_until, least=0)
        check_count("every", self.every)
        check_number("loss", self.loss, most=1.0)
        check_number("floor", self.floor, above=0.0, most=1.0)
        check_count("early_until", self.early_until, least=0)
        check_count("late_from", self.late_from)
        if self.early_until >= self.late_from:
            msg = (
                f"early_until ({self.early_until}) must be less than late_from ({self.late_from}):"
                " the stages follow one another"
            )
            raise ConfigError(msg)

    @property
    def has_limit(self) -> bool:
        """Whether it limits what stays."""
        return self.loss > 0 and self.floor < 1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tiers(Settings):
    """Where rows may go before they are lost.

    Raises:
        ConfigError: A value is out of range, or a disk tier has no folder, or a folder no size.
    """

    int8: bool = True
    int4: bool = True
    cpu_bytes: int = 0
    disk_bytes: int = 0
    archive_folder: Path | str | None = None

    def __post_init__(self) -> None:
        check_flag("int8", self.int8)
        check_flag("int4", self.int4)
        check_count("cpu_bytes", self.cpu_bytes, least=0)
        check_count("disk_bytes", self.disk_bytes, least=0)
        folder = as_path("archive_folder", self.archive_folder)
        object.__setattr__(self, "archive_folder", folder)
        if self.disk_bytes and folder is None:
            msg = f"disk_bytes is {self.disk_bytes}, but archive_folder is not set: name a folder"
            raise ConfigError(msg)
        if folder is not None and not self.disk_bytes:
            msg = (
                f"archive_folder is {str(folder)!r}, but disk_bytes is 0: say how much it may hold"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Guard(Settings):
    """When a lossy act is rolled back.

    Raises:
        ConfigError: A value is out of range, or a divergence is limited but never measured.
    """

    max_kl: float | None = 0.1
    """Most divergence (nats) of the next-token distribution over the canary tokens, after
    against before; `None` (or infinity) is no limit."""
    max_mass: float | None = None
    """Most attention mass that one cycle may remove; `None` is no limit."""
    canary_tokens: int = 8
    """Last tokens of a running path that are run again to measure it; 0 measures nothing."""

    def __post_init__(self) -> None:
        if self.max_kl is not None:
            check_number("max_kl", self.max_kl, above=0.0, most=math.inf)
            if math.isinf(self.max_kl):
                object.__setattr__(self, "max_kl", None)
        if self.max_mass is not None:
            check_number("max_mass", self.max_mass, above=0.0, most=1.0)
        check_count("canary_tokens", self.canary_tokens, least=0)
        if self.max_kl is not None and not self.canary_tokens:
            msg = (
                f"max_kl is {self.max_kl}, but canary_tokens is 0, so that nothing is measured: "
                "give canary tokens, or max_kl=None"
            )
            raise ConfigError(msg)
