"""What a chat template can take, found out once by trying it on small conversations.

It must not know token ids or LangChain's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from sidequest_langchain.chat.messages import Piece, ToolCall, Turn
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import TemplateError
from sidequest_langchain.kinds import TokenKind

Write: TypeAlias = Callable[[Turn, Piece], str]
"""How a piece of a turn is written into the template's input; marks may be put around it."""

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "sq_probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What one chat template renders without loss."""

    has_system: bool
    """A system message at the beginning."""
    has_late_system: bool
    """System messages anywhere, and several of them."""
    has_runs: bool
    """Several messages of one role in a row."""
    has_tool_role: bool
    """Messages of role `tool`."""
    has_tool_calls: bool
    """Tool calls of an assistant message, given as a field."""
    has_tools: bool
    """The tools that are given."""
    has_argument_text: bool
    """Arguments of a tool call are wanted as JSON text, not as a mapping."""
    has_any_ids: bool
    """Ids of tool calls of any length; else (Mistral's) of nine letters and digits."""
    opening: str
    """What opens the assistant's turn at the end of a prompt."""


def message_of(turn: Turn, *, has_argument_text: bool = False, write: Write | None = None) -> Any:
    """`turn` as the dict that chat templates read."""
    pieces = [piece.text if write is None else write(turn, piece) for piece in turn.pieces]
    message: dict[str, Any] = {"role": turn.role, "content": "".join(pieces)}

    def put(value: Any, kind: TokenKind | None = None) -> Any:
        return value if write is None else written(value, turn, write, kind)

    extras: dict[str, Any] = {
        "reasoning_content": put(turn.reasoning, TokenKind.THOUGHT) or None,
        "tool_call_id": put(turn.tool_call_id),
        "name": put(turn.name),
        "tool_calls": [
            {
                "type": "function",
                "id": put(call.call_id),
                "function": {
                    "name": put(call.name, TokenKind.TOOL_CALL),
                    "arguments": put(
                        arguments_text(call) if has_argument_text else call.arguments,
                        TokenKind.TOOL_CALL,
                    ),
                },
            }
            for call in turn.tool_calls
        ]
        or None,
    }
    return message | {key: value for key, value in extras.items() if value is not None}


def written(value: Any, turn: Turn, write: Write, kind: TokenKind | None = None) -> Any:
    """`value` with every string in it written as a piece of `turn`, keys as structure."""
    if isinstance(value, str):
        return write(turn, Piece(value, kind=kind))
    if isinstance(value, Mapping):
        return {
            written(key, turn, write): written(item, turn, write, kind)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [written(item, turn, write, kind) for item in value]
    return value


def schema_written(value: Any, turn: Turn, write: Write, kind: TokenKind | None = None) -> Any:
    """A tool's description, written; its names and descriptions alone are text of a kind.

    Templates compare other strings (`"type": "object"`) with words of their own.
    """
    if isinstance(value, Mapping):
        kinds = dict.fromkeys(("name", "description"), TokenKind.SYSTEM)
        return {
            written(key, turn, write): schema_written(item, turn, write, kinds.get(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [schema_written(item, turn, write) for item in value]
    return written(value, turn, write, kind)


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as JSON; letters beyond ASCII stay as they are."""
    return json.dumps(call.arguments, ensure_ascii=False)


def probe(tokenizer: ChatTokenizer, *, has_tools: bool = False) -> Traits:
    """Find out what the template can take.

    Args:
        tokenizer: Renders with the template.
        has_tools: Whether tools are given: then another template, or part of it, is used.

    Raises:
        TemplateError: There is no template, or it fails on a single user message.
    """
    user, answer = _turn("user", "Sq-one"), _turn("assistant", "Sq-two")
    call = ToolCall(name="sq_call", arguments={"at": "Sq-here"}, call_id="sq000call")
    calling = Turn(role="assistant", pieces=(Piece(""),), tool_calls=(call,))
    result = Turn(role="tool", pieces=(Piece("Sq-found"),), tool_call_id=call.call_id)
    more, rule, late = _turn("user", "Sq-more"), _turn("system", "Sq-rule"), _turn("system", "Sq-b")
    tools = [PROBE_TOOL] if has_tools else None

    shows = partial(_shows, tokenizer, tools)
    opening = _opening(tokenizer, user, tools)
    has_runs = shows("", user, more) and shows("", user, answer, _turn("assistant", "Sq-and"))
    has_mapping = shows(call.name, user, calling)
    has_text = not has_mapping and shows(call.name, user, calling, has_argument_text=True)
    long = replace(calling, tool_calls=(replace(call, call_id="call_0123456789"),))
    asking = calling if has_mapping or has_text else answer
    return Traits(
        has_system=shows("", rule, user),
        has_late_system=has_runs
        and shows("", rule, late, user)
        and shows("", rule, user, answer, late, more)
        and shows("", user, late),
        has_runs=has_runs,
        has_tool_role=shows("", user, asking, result, has_argument_text=has_text),
        has_tool_calls=has_mapping or has_text,
        has_tools=tools is not None and _shows_tools(tokenizer, user, tools),
        has_argument_text=has_text,
        has_any_ids=shows(call.name, user, long, has_argument_text=has_text)
        or not (has_mapping or has_text),
        opening=opening,
    )


def _shows(
    tokenizer: ChatTokenizer,
    tools: list[dict[str, Any]] | None,
    wanted: str,
    *turns: Turn,
    has_argument_text: bool = False,
) -> bool:
    """Whether the rendered turns hold each of their texts once, and `wanted`."""
    messages = [message_of(turn, has_argument_text=has_argument_text) for turn in turns]
    try:
        text = tokenizer.render(messages, tools=tools)
    except TemplateError:
        return False
    return wanted in text and all(text.count(t.text) == 1 for t in turns if t.text)


def _shows_tools(tokenizer: ChatTokenizer, user: Turn, tools: list[dict[str, Any]]) -> bool:
    try:
        return str(tools[0]["function"]["name"]) in tokenizer.render(
            [message_of(user)], tools=tools
        )
    except TemplateError:
        return False


def _turn(role: str, text: str) -> Turn:
    return Turn(role=role, pieces=(Piece(text),))


def _opening(tokenizer: ChatTokenizer, user: Turn, tools: list[dict[str, Any]] | None) -> str:
    messages = [message_of(user)]
    asked = tokenizer.render(messages, tools=tools)
    try:
        told = tokenizer.render(messages, tools=tools, add_generation_prompt=False)
    except TemplateError:
        return ""
    return asked.removeprefix(told) if asked.startswith(told) else ""
