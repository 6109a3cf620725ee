"""What a text may look like: grammars as plain frozen facts, to be put together.

They must not know how a text is held to them, nor any tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

from sidequest_langchain.errors import GrammarError


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text.

    Where it spells a special token of the model, that token is meant. Where it spells an added
    one that shows in texts, it may be that token or those that spell it; but text that leaves no
    choice is always in the tokens that the tokenizer makes of it.
    """

    text: str
    is_spelled: bool = False
    """Whether it is somebody's words, in which no special token is meant: it is spelled out."""


@dataclass(frozen=True, slots=True)
class Schema:
    """JSON that a schema allows, in one line, with the separators of `json.dumps`.

    Non-ASCII letters stand for themselves. Properties come in the schema's order, those it does
    not name after them. Formats that are unknown, or of no strings, are notes and hold nobody.
    """

    schema: str
    """The JSON text of a JSON schema; `"{}"` and `"true"` mean any JSON."""

    @classmethod
    def of(cls, schema: Mapping[str, Any] | bool) -> Schema:  # noqa: FBT001
        """The grammar of a schema; its keys keep their order, which is that of the text.

        Raises:
            GrammarError: It holds something that JSON cannot say.
        """
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            msg = f"the schema is no JSON: {error}; give it as json.loads would return it"
            raise GrammarError(msg) from error
        return cls(text)


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""Text that a regular expression matches from its first to its last character.

    Without look-around and back-references; `\\d`, `\\w` and `.` as in JSON schemas: digits and
    letters are ASCII, a dot is no newline.
    """

    regex: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts; special tokens that they name are spelled out."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Then:
    """One part after another."""

    parts: tuple[Grammar, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several parts."""

    parts: tuple[Grammar, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, several times."""

    part: Grammar
    at_least: int = 0
    at_most: int | None = None
    """`None`: as often as the model likes."""
    separator: str = ""
    """Text between two of them."""


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text in which none of some texts occurs, an empty one too.

    What follows it, if anything does, must begin with one of those: it ends there.
    """

    before: tuple[str, ...] = ()


Grammar: TypeAlias = Union[Text, Schema, Pattern, Choice, Then, OneOf, Repeat, FreeText]  # noqa: UP007
