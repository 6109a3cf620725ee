"""Makes a JSON schema ready for llguidance, and says what it cannot hold a text to.

It must not know tokenizers or matching.
"""

from __future__ import annotations

import json
from typing import Any

from sidequest_langchain.errors import GrammarError

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of strings that are held to; the others are notes, as JSON Schema has it."""

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, spaced as `json.dumps` and the chat templates of models do it."""

_OF_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_OF_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def json_rule(text: str) -> str:
    """The rule for JSON that a schema allows.

    Raises:
        GrammarError: The text is no JSON schema, or no JSON fits it.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"a schema must be JSON text: {error}; found {_short(text)}"
        raise GrammarError(msg) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        allowed = "allows nothing" if schema is False else f"is {_short(text)}"
        msg = f"a JSON schema must be an object or true; this one {allowed}"
        raise GrammarError(msg)
    ready = {**_without_notes(schema), "x-guidance": _SPACING}
    return f"%json {json.dumps(ready)}"


def _without_notes(schema: Any) -> Any:
    """A schema without the formats that hold nobody; what is no schema stays as it is."""
    if not isinstance(schema, dict):
        return schema
    _refuse_counting(schema)
    found = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key in _OF_MANY and isinstance(value, list):
            value = [_without_notes(each) for each in value]
        elif key in _OF_ONE:
            value = _without_notes(value)
        elif key in _BY_NAME and isinstance(value, dict):
            value = {name: _without_notes(each) for name, each in value.items()}
        found[key] = value
    return found


def _refuse_counting(schema: dict[str, Any]) -> None:
    """Keys that no schema names are not held apart, and two of one name are one.

    Raises:
        GrammarError: Several of them are asked for.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    n_named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > n_named + 1:
        msg = (
            f"minProperties {least} asks for {least - n_named} keys that `required` does not name, "
            "and nothing keeps a text from naming one of them twice; name them, or leave it out"
        )
        raise GrammarError(msg)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
