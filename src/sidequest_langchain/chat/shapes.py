"""The shape an answer shall have: from whatever LangChain calls a schema to one JSON schema.

It must not know a model, nor how an answer is kept to its shape.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic
import pydantic.v1
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from typing_extensions import is_typeddict

_NAMELESS = "answer"
"""What a schema without a title is called."""
_BARE = (pydantic.BaseModel, pydantic.v1.BaseModel)
"""Classes without a schema."""
_ALWAYS_IN_PART = ("allOf", "not", "if", "then", "else", "dependentSchemas", "$ref")
_BESIDE_PROPERTIES = ("anyOf", "oneOf")
"""Below and beside these an object may be described in part: what one place does not name,
another may."""

_NAMES = ("properties", "$defs", "definitions", "patternProperties")
"""Below these, keys are names of the user's."""
_VALUES = ("enum", "const", "default", "examples")
"""Below these are values, which may look like schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What `with_structured_output` was given, understood."""

    name: str
    schema: dict[str, Any]
    """JSON schema; an object holds the properties it names and no others, unless it says so."""
    kind: type | None
    """The pydantic class that answers become; `None`: they stay plain JSON values."""
    given: Any
    """What was given, as `bind_tools` takes it."""

    @property
    def traced(self) -> dict[str, Any]:
        """The form in which tracers want it."""
        return convert_to_openai_tool(self.given)


def shape_of(given: Any) -> Shape:
    """Understand a schema.

    Args:
        given: A pydantic class (v2 or v1), a TypedDict, a JSON schema, a tool in the form of
            OpenAI's or Anthropic's, or OpenAI's `{"name", "schema"}`.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(given, type) and is_basemodel_subclass(given) and given not in _BARE:
        return _of_class(given)
    if is_typeddict(given):
        schema = convert_to_json_schema(given)
        return Shape(name=schema["title"], schema=closed(schema), kind=None, given=given)
    if isinstance(given, Mapping):
        return _of_mapping(dict(given))
    msg = (
        "a schema must be a pydantic class, a TypedDict, a JSON schema or a tool's schema, "
        f"found {given!r}"
    )
    raise ValueError(msg)


def closed(schema: Any) -> Any:
    """A copy of a JSON schema whose objects hold no properties but those they name.

    An object that names none, or that says `additionalProperties` itself, stays as it is.
    """
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return copy.deepcopy(schema)
    names_some = isinstance(schema.get("properties"), Mapping)
    in_part = [*_ALWAYS_IN_PART, *(_BESIDE_PROPERTIES if names_some else ())]
    made = {
        key: copy.deepcopy(value) if key in in_part else _closed_below(key, value)
        for key, value in schema.items()
    }
    if names_some and not any(key in schema for key in in_part):
        made.setdefault("additionalProperties", False)
    return made


def without_titles(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic gives to everything: they say nothing."""
    if isinstance(schema, list):
        return [without_titles(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: {name: without_titles(part) for name, part in value.items()}
        if key in _NAMES and isinstance(value, Mapping)
        else value
        if key in _VALUES
        else without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }


def _closed_below(key: str, value: Any) -> Any:
    if key in _NAMES:
        is_names = isinstance(value, Mapping)
        return {name: closed(part) for name, part in value.items()} if is_names else value
    if key in _VALUES:
        return copy.deepcopy(value)
    return closed(value)


def _of_class(given: type) -> Shape:
    schema: dict[str, Any]
    if issubclass(given, pydantic.BaseModel):
        schema = given.model_json_schema()
    else:
        assert issubclass(given, pydantic.v1.BaseModel)
        schema = given.schema()
    name = str(schema.get("title") or given.__name__)
    return Shape(name=name, schema=closed(schema), kind=given, given=given)


def _of_mapping(given: dict[str, Any]) -> Shape:
    name, schema = _named(given)
    if not isinstance(schema, dict):
        msg = f"the schema of {name!r} must be a JSON schema (a dict), found {schema!r}"
        raise ValueError(msg)
    tool = given if _is_tool(given) else _as_tool(name, given, schema)
    return Shape(name=name, schema=closed(schema), kind=None, given=tool)


def _named(given: dict[str, Any]) -> tuple[str, Any]:
    """The name and the JSON schema in any of the forms of a dict."""
    inner = given.get("json_schema", given.get("function"))
    if given.get("type") in ("json_schema", "function") and isinstance(inner, dict):
        return _named(inner)
    for key in ("parameters", "input_schema", "schema"):
        if "name" in given and key in given:
            return str(given["name"]), given[key]
    if set(given) <= {"name", "description", "strict"} and "name" in given:
        return str(given["name"]), {"type": "object", "properties": {}}  # a tool without arguments
    return str(given.get("title") or _NAMELESS), given


def _is_tool(given: dict[str, Any]) -> bool:
    return given.get("type") == "function" or ("name" in given and "schema" not in given)


def _as_tool(name: str, given: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema in a form that tracers and `bind_tools` take."""
    if "title" in given and "properties" in given:
        return given
    described = given.get("json_schema", given).get("description") or schema.get("description")
    function = {"name": name, "parameters": schema}
    if described:
        function["description"] = described
    return {"type": "function", "function": function}
