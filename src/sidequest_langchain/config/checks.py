"""Checks that settings share: each refuses by name, saying what was asked and what was found."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from sidequest_langchain.errors import ConfigError


class Settings:
    """Base of frozen settings: prints only what differs from the defaults."""

    __slots__ = ()

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in changed(self).items())
        return f"{type(self).__name__}({given})"


def changed(settings: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, by name, in order."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    defaults = {f.name: f.default for f in fields(settings)}
    return {
        name: value
        for name, value in values.items()
        # 1 == True and 0 == 0.0: two settings that print alike must be alike.
        if value != defaults[name] or type(value) is not type(defaults[name])
    }


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Refuse what is no whole number, or less than `least`.

    Raises:
        ConfigError: As said.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be a whole number, found {value!r}"
        raise ConfigError(msg)
    if value < least:
        msg = f"{name} must be at least {least}, found {value}"
        raise ConfigError(msg)


def check_number(
    name: str, value: object, *, above: float | None = None, least: float = 0.0, most: float
) -> None:
    """Refuse what is no number from `least` (or above `above`) to `most`.

    Raises:
        ConfigError: As said.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        msg = f"{name} must be a number, found {value!r}"
        raise ConfigError(msg)
    is_too_small = value < least if above is None else value <= above
    if is_too_small or value > most:
        lower = f"at least {least:g}" if above is None else f"above {above:g}"
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        msg = f"{name} must be {lower}{upper}, found {value!r}"
        raise ConfigError(msg)


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither `True` nor `False`.

    Raises:
        ConfigError: As said.
    """
    if not isinstance(value, bool):
        msg = f"{name} is True or False, found {value!r}"
        raise ConfigError(msg)


def as_path(name: str, value: object) -> Path | None:
    """A path given as text or as a path; `None` stays.

    Raises:
        ConfigError: It is something else, or empty.
    """
    if value is None or (isinstance(value, Path) and value != Path()):
        return value
    if not isinstance(value, str) or not value:
        msg = f"{name} must be a path, found {value!r}"
        raise ConfigError(msg)
    return Path(value)
