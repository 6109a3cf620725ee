"""Tools as a call names them: their descriptions in one form, and which of them must be called.

It must not know a template, a tokenizer, or how a call is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool, convert_runnable_to_tool
from langchain_core.utils.function_calling import convert_to_openai_tool

from sidequest_langchain.errors import RequestError

Described: TypeAlias = dict[str, Any]
"""A tool in the form of OpenAI: `{"type": "function", "function": {"name", ...}}`."""

_MODES: dict[object, Literal["auto", "none", "required"]] = {
    None: "auto",
    False: "auto",
    True: "required",
    "auto": "auto",
    "none": "none",
    "any": "required",
    "required": "required",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """Whether an answer may, must or may not call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The one tool that must be called; `None`: any of them."""

    @property
    def as_given(self) -> Any:
        """In the form of OpenAI."""
        if self.name is None:
            return self.mode
        return {"type": "function", "function": {"name": self.name}}


def described(tools: Sequence[Any] | None, *, strict: bool | None = None) -> tuple[Described, ...]:
    """Descriptions of `tools`, in their order; the same tool given twice is one.

    Args:
        tools: Pydantic classes (v2 or v1), TypedDicts, functions, LangChain tools, runnables, or
            dicts: a JSON schema with a title, or a tool in the form of OpenAI, Anthropic or
            Bedrock.
        strict: As in OpenAI's form; handed on to the template. Forced calls follow their schema
            in any case.

    Raises:
        RequestError: One of them is none of these, or two that differ have one name.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence | None):
        msg = f"tools must be a list of tools, found {tools!r}"
        raise RequestError(msg)
    found: dict[str, Described] = {}
    for tool in tools or ():
        one = _described(tool, strict)
        other = found.setdefault(name_of(one), one)
        if _without_notes(schema_of(other)) != _without_notes(schema_of(one)):
            msg = (
                f"several tools are named {name_of(one)!r} and take different arguments; a call "
                "could not tell them apart: rename"
            )
            raise RequestError(msg)
    return tuple(found.values())


def name_of(tool: Described) -> str:
    """The name a call must give."""
    return str(tool["function"]["name"])


def schema_of(tool: Described) -> Mapping[str, Any]:
    """JSON schema of the arguments: an object."""
    given: Mapping[str, Any] = tool["function"].get("parameters") or {}
    return {"properties": {}} | dict(given) | {"type": "object"}


def chosen(tool_choice: Any, tools: Sequence[Described]) -> Choosing:
    """What `tool_choice` means for `tools`.

    Args:
        tool_choice: `None`, `False` or `"auto"`: calls are up to the model. `True`, `"any"` or
            `"required"`: one of the tools. A name, or a dict in the form of OpenAI or Anthropic:
            that tool. `"none"`: none.
        tools: Those of the call.

    Raises:
        RequestError: It is something else, or a tool that the call does not have.
    """
    choosing = _chosen(tool_choice)
    known = [name_of(tool) for tool in tools]
    if choosing.name is not None and choosing.name not in known:
        of_these = f"the tools are {', '.join(map(repr, known))}" if known else "there are no tools"
        msg = f"tool_choice={tool_choice!r} names a tool that was not given; {of_these}"
        raise RequestError(msg)
    if choosing.mode == "required" and not known:
        msg = (
            f"tool_choice={tool_choice!r} asks for a call, but there are no tools; give tools=[...]"
        )
        raise RequestError(msg)
    return choosing


def _chosen(given: Any) -> Choosing:
    if isinstance(given, Mapping):
        kind, function = given.get("type"), given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else given.get("name")
        if isinstance(name, str):
            return Choosing(mode="required", name=name)
        if kind in ("auto", "none", "any", "required"):
            return Choosing(mode=_MODES[kind])
    elif given is None or isinstance(given, bool) or (isinstance(given, str) and given in _MODES):
        return Choosing(mode=_MODES[given])
    elif isinstance(given, str):
        return Choosing(mode="required", name=given)
    msg = (
        "tool_choice must be 'auto', 'none', 'any', 'required', True, False, a tool's name or "
        f"{{'type': 'function', 'function': {{'name': ...}}}}, found {given!r}"
    )
    raise RequestError(msg)


def _described(tool: Any, strict: bool | None) -> Described:  # noqa: FBT001
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        # Already described; a `strict` of the call's own is not repeated.
        tool = tool["function"]
    if isinstance(tool, Mapping):
        tool = dict(tool)
        strict = None if "strict" in tool else strict
    try:
        if isinstance(tool, Runnable) and not isinstance(tool, BaseTool):
            tool = convert_runnable_to_tool(tool)
        found: Described = convert_to_openai_tool(tool, strict=strict)
    except Exception as error:  # other people's classes and functions
        msg = (
            f"{tool!r} cannot be made a tool: {error}; give a pydantic class, a TypedDict, a "
            "function with types and a docstring, a LangChain tool, or a dict with a name and "
            "a JSON schema"
        )
        raise RequestError(msg) from error
    function = found.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        msg = f"{tool!r} is no tool that this model could call; give one with a name and a schema"
        raise RequestError(msg)
    _check_arguments(name, found["function"].get("parameters"))
    return found


def _check_arguments(name: str, schema: Any) -> None:
    """The arguments of a call are an object.

    Raises:
        RequestError: The schema is none, or of something else.
    """
    is_schema = schema is None or isinstance(schema, Mapping)
    kinds = (schema or {}).get("type", "object") if is_schema else None
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        msg = (
            f"the arguments of the tool {name!r} must be a JSON schema of an object, found "
            f"{schema!r}; give {{'type': 'object', 'properties': {{...}}}}"
        )
        raise RequestError(msg)


def _without_notes(schema: Any) -> Any:
    """A schema without what holds nobody: titles and descriptions."""
    if isinstance(schema, list):
        return [_without_notes(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: {name: _without_notes(part) for name, part in value.items()}
        if key == "properties" and isinstance(value, Mapping)
        else _without_notes(value)
        for key, value in schema.items()
        if key not in ("title", "description")
    }
