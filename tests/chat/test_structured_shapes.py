"""From whatever LangChain calls a schema to one JSON schema, closed."""

from __future__ import annotations

import copy
from typing import Annotated, Literal

import pydantic
import pydantic.v1
import pytest
from langchain_core.utils.function_calling import convert_to_json_schema
from typing_extensions import TypedDict

from sidequest_langchain.chat.shapes import closed, shape_of


class Leg(pydantic.BaseModel):
    """One leg of a trip."""

    city: str = pydantic.Field(description="where to")
    days: int


class LegV1(pydantic.v1.BaseModel):
    city: str
    days: int


class LegDict(TypedDict):
    """One leg of a trip."""

    city: Annotated[str, ..., "where to"]
    days: Annotated[int, ..., "how long"]


PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
BARE = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"]}
FORMS = {
    "pydantic": (Leg, "Leg"),
    "pydantic v1": (LegV1, "LegV1"),
    "TypedDict": (LegDict, "LegDict"),
    "JSON schema": ({"title": "Leg", **BARE}, "Leg"),
    "JSON schema without a title": (BARE, "answer"),
    "OpenAI tool": ({"type": "function", "function": {"name": "Leg", "parameters": BARE}}, "Leg"),
    "OpenAI function": ({"name": "Leg", "description": "d", "parameters": BARE}, "Leg"),
    "Anthropic tool": ({"name": "Leg", "input_schema": BARE}, "Leg"),
    "OpenAI json_schema": ({"name": "Leg", "schema": BARE, "strict": True}, "Leg"),
    "OpenAI response_format": (
        {"type": "json_schema", "json_schema": {"name": "Leg", "schema": BARE}},
        "Leg",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_schema(form):
    given, name = FORMS[form]
    before = copy.deepcopy(given)
    shape = shape_of(given)
    assert (shape.name, shape.kind) == (
        name,
        given if isinstance(given, type) and name in ("Leg", "LegV1") else None,
    )
    assert {key: part["type"] for key, part in shape.schema["properties"].items()} == {
        "city": "string",
        "days": "integer",
    }
    assert sorted(shape.schema["required"]) == ["city", "days"]
    assert shape.schema["additionalProperties"] is False
    assert given == before


@pytest.mark.parametrize("form", FORMS)
def test_tracers_get_the_schema_by_its_name(form):
    shape = shape_of(FORMS[form][0])
    traced = convert_to_json_schema(shape.traced)
    assert traced["title"] == shape.name
    assert set(traced["properties"]) == {"city", "days"}


@pytest.mark.parametrize("given", [Leg, LegV1, LegDict, {"title": "Leg", **BARE}])
def test_tracers_get_what_langchain_would_make_of_it(given):
    assert convert_to_json_schema(shape_of(given).traced) == convert_to_json_schema(given)


def test_a_tool_without_arguments_is_an_empty_object():
    shape = shape_of({"type": "function", "function": {"name": "stop", "description": "d"}})
    assert shape.schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_class_may_have_a_title_of_its_own():
    class Named(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(title="other_name")
        x: int

    assert shape_of(Named).name == "other_name"


@pytest.mark.parametrize("given", [int, 5, "Leg", [Leg], print, dict])
def test_what_is_no_schema_is_refused(given):
    with pytest.raises(ValueError, match=r"a schema must be .* found"):
        shape_of(given)


def test_a_schema_that_is_none_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"'Leg' must be a JSON schema.*'text'"):
        shape_of({"name": "Leg", "parameters": "text"})


# -- closing -----------------------------------------------------------------------------


def _object(**more):
    return {"type": "object", "properties": {"a": {"type": "string"}}, **more}


CLOSED = _object(additionalProperties=False)


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (_object(), CLOSED),
        (_object(additionalProperties=True), _object(additionalProperties=True)),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array", "items": _object()}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [_object(), {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"A": _object()}, "$ref": "#/$defs/A"}, None),
        ({"allOf": [_object(), _object()]}, {"allOf": [_object(), _object()]}),
        (_object(anyOf=[_object()]), _object(anyOf=[_object()])),
        (True, True),
    ],
)
def test_objects_that_name_their_properties_hold_no_others(schema, made):
    if made is None:
        made = {"$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}
    before = copy.deepcopy(schema)
    assert closed(schema) == made
    assert schema == before


def test_names_of_the_users_are_no_keywords():
    """Properties called as keywords are, and values that look like schemas."""
    schema = {
        "type": "object",
        "properties": {
            "properties": {"type": "object", "properties": {"enum": _object()}},
            "default": {"enum": [_object()], "default": _object(), "const": _object()},
        },
    }
    made = closed(schema)
    assert made["properties"]["properties"]["properties"]["enum"] == CLOSED
    assert made["properties"]["default"] == schema["properties"]["default"]
    assert "additionalProperties" not in made["properties"]


def test_a_class_that_holds_itself_stays_finite():
    class Tree(pydantic.BaseModel):
        name: str
        kind: Literal["a", "b"] = "a"
        below: list[Tree] = []

    Tree.model_rebuild(_types_namespace={"Tree": Tree})
    shape = shape_of(Tree)
    assert shape.schema["$defs"]["Tree"]["additionalProperties"] is False
    assert shape.name == "Tree"
