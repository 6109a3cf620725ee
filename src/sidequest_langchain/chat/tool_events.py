"""What is read in a reply, piece by piece, and how a call that is not sound is made plain.

It must not know how calls are written, nor LangChain's messages.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from langchain_core.utils.json import parse_partial_json


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins; `None` if it names none."""

    index: int
    name: str | None


@dataclass(frozen=True, slots=True)
class CallText:
    """More of the arguments of a call, as JSON text."""

    index: int
    text: str


ReplyEvent: TypeAlias = Said | Thought | CallBegun | CallText


def held(text: str, markers: Collection[str]) -> int:
    """Length of the longest tail of `text` that one of `markers` begins with."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for n_chars in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-n_chars:]) for marker in markers):
            return n_chars
    return 0


def is_sound(arguments: str) -> bool:
    """Whether `arguments` are a JSON object.

    Line ends inside of strings are let pass, as LangChain does; `NaN` and `Infinity` are no JSON.
    """
    try:
        return isinstance(json.loads(arguments, strict=False, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def spoiling(arguments: str) -> str:
    """What to add to arguments that are not sound, so that nobody takes them for a call.

    LangChain closes what is open in the arguments of a streamed call, and would run a call that
    was cut off in the middle. A bracket that closes nothing tells it not to.
    """
    for ending in ("", "]", "}", '"]', '"}', '\\"]', '\\"}'):
        if not _is_taken(arguments + ending):
            return ending
    return '"]}'


def unwrapped(value: Any) -> str:
    """The arguments of a call that were given whole, as JSON text.

    Some models write JSON inside of a JSON string; none at all is an empty object.
    """
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _is_taken(arguments: str) -> bool:
    """Whether LangChain reads `arguments` as those of a call."""
    if not arguments:
        return True
    try:
        return isinstance(parse_partial_json(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> NoReturn:
    msg = f"{name} is no JSON"
    raise ValueError(msg)
