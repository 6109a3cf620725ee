"""`with_structured_output`: a model bound to a shape, and a parser behind it.

It must not know how an answer is kept to its shape: the settings of a call do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, TypeAlias

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough

from sidequest_langchain.chat.shapes import Shape, shape_of
from sidequest_langchain.chat.structured_reading import AnswerParser

Method: TypeAlias = Literal["json_schema", "function_calling", "json_mode"]
_METHODS = ("json_schema", "function_calling", "json_mode")


def structured(
    model: BaseChatModel,
    schema: Any,
    *,
    method: str,
    include_raw: bool,
    strict: bool | None,
    given: Mapping[str, Any],
) -> Runnable[Any, Any]:
    """A runnable that answers in the shape of `schema`.

    Args:
        model: Answers; it is not changed.
        schema: As for `shape_of`; `None` in the method `"json_mode"` only.
        method: One of `Method`.
        include_raw: Whether the result is `{"raw", "parsed", "parsing_error"}`.
        strict: Handed on with the schema.
        given: Other arguments of the call to come; `tools` among them.

    Raises:
        ValueError: The arguments contradict each other.
    """
    has_tools = bool(given.get("tools"))
    _check(schema, method, strict=strict, include_raw=include_raw, has_tools=has_tools)
    shape = None if schema is None else shape_of(schema)
    bound = _bound(model, shape, dict(given), method=method, strict=strict)
    parser = AnswerParser(
        kind=None if shape is None else shape.kind,
        call=shape.name if shape is not None and method == "function_calling" else None,
        may_call=has_tools,
    )
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=_none)
    failed = RunnablePassthrough.assign(parsed=_none)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _bound(
    model: BaseChatModel,
    shape: Shape | None,
    given: dict[str, Any],
    *,
    method: str,
    strict: bool | None,
) -> Runnable[Any, Any]:
    """The model with the settings of calls that make it answer so."""
    if shape is None:
        traced = {"title": "answer", "type": "object", "properties": {}}
        given |= {"response_format": {"type": "json_object"}}
    elif method == "function_calling":
        given |= {"tool_choice": shape.name, "parallel_tool_calls": False, "strict": strict}
        given["tools"] = [shape.given]
        traced = shape.traced
    else:
        # A JSON object that happens to be wanted in some shape is best written in that shape.
        described: dict[str, Any] = {"name": shape.name, "schema": shape.schema}
        if strict is not None:
            described["strict"] = strict
        given |= {"response_format": {"type": "json_schema", "json_schema": described}}
        traced = shape.traced
    how = {"method": method} if strict is None else {"method": method, "strict": strict}
    given["ls_structured_output_format"] = {"kwargs": how, "schema": traced}
    tools = given.pop("tools", None)
    return model.bind_tools(tools, **given) if tools else model.bind(**given)


def _check(
    schema: Any, method: str, *, strict: bool | None, include_raw: bool, has_tools: bool
) -> None:
    if method not in _METHODS:
        msg = f"method must be one of {', '.join(_METHODS)}, found {method!r}"
    elif schema is None and method != "json_mode":
        msg = f"method {method!r} needs a schema; without one there is 'json_mode'"
    elif strict is not None and method == "json_mode":
        msg = "strict says how to follow a schema; 'json_mode' knows none, use 'json_schema'"
    elif has_tools and method != "json_schema":
        msg = f"tools go with method 'json_schema' only, found {method!r}"
    elif has_tools and not include_raw:
        msg = "an answer may be calls of tools, which the raw message tells: give include_raw=True"
    else:
        return
    raise ValueError(msg)


def _none(_: Any) -> None:
    return None
