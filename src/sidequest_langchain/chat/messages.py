"""LangChain messages as turns of a conversation: plain text and facts, one object per turn.

It must not know a template or a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from sidequest_langchain.errors import MessageError
from sidequest_langchain.kinds import TokenKind

_TEXT_BLOCKS = frozenset({"text", "text-plain", "input_text", "output_text"})
_REASONING_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking"})
_CALL_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "function_call"})
_RESULT_BLOCK = "tool_result"
_KIND_OF_ROLE = {
    "system": TokenKind.SYSTEM,
    "developer": TokenKind.SYSTEM,
    "user": TokenKind.QUESTION,
    "assistant": TokenKind.ANSWER,
    "tool": TokenKind.TOOL_RESULT,
    "function": TokenKind.TOOL_RESULT,
    "ipython": TokenKind.TOOL_RESULT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The tool call that a tool's message answers."""

    tool_call_id: str | None = None
    name: str | None = None
    """The tool's, from the message or from the call itself."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text that one message brought into a turn."""

    text: str
    call_id: str | None = None
    """The model call whose reply this is, if the message says so."""
    kind: TokenKind | None = None
    """What it is, whatever turn it ends up in; `None` for structure."""
    source: Source | None = None
    """Of a tool's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool that the assistant asked for."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn, as templates know it."""

    role: str
    pieces: tuple[Piece, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """The turns that `messages` stand for, in order.

    Raises:
        MessageError: There are none, or one has no text form.
    """
    if not messages:
        msg = "messages is an empty list; give at least one message"
        raise MessageError(msg)
    called: dict[str | None, str] = {}
    turns = []
    for message in messages:
        for turn in _turns_of(message, called):
            called |= {call.call_id: call.name for call in turn.tool_calls}
            turns.append(turn)
    return turns


def reply_id(message: BaseMessage) -> str | None:
    """The id of the model call that `message` is the reply of, if it says one.

    The message's own id is that of the call; where LangChain put another one in its place
    (streamed events of version 3), the metadata still has it.
    """
    ours = message.response_metadata.get("sidequest")
    if isinstance(ours, Mapping) and isinstance(ours.get("call_id"), str):
        return str(ours["call_id"])
    return message.id


def _turns_of(message: BaseMessage, called: Mapping[str | None, str]) -> Iterator[Turn]:
    if isinstance(message, AIMessage):
        yield _assistant(message)
    elif isinstance(message, ToolMessage | FunctionMessage):
        call_id = getattr(message, "tool_call_id", None)
        yield _result(_text_of(message), call_id, called, name=message.name)
    else:
        yield from _results_in(message, called)
        text = _text_of(message)
        if text or not _has_results(message):
            role = _role_of(message)
            piece = Piece(text, kind=_KIND_OF_ROLE.get(role, TokenKind.OTHER))
            yield Turn(role=role, pieces=(piece,), name=message.name)


def _result(
    text: str, call_id: str | None, called: Mapping[str | None, str], *, name: str | None = None
) -> Turn:
    source = Source(tool_call_id=call_id, name=name or (called.get(call_id) if call_id else None))
    piece = Piece(text, kind=TokenKind.TOOL_RESULT, source=source)
    return Turn(role="tool", pieces=(piece,), tool_call_id=call_id, name=name)


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    msg = (
        f"a {type(message).__name__} cannot be part of a prompt; give system, human, AI and "
        "tool messages"
    )
    raise MessageError(msg)


def _assistant(message: AIMessage) -> Turn:
    calls = [
        ToolCall(name=call["name"], arguments=call["args"], call_id=call["id"])
        for call in message.tool_calls
    ]
    known = {call.call_id for call in calls}
    for block in _blocks(message, {"tool_use"}):
        if block.get("id") not in known:
            arguments = block.get("input") or {}
            name, call_id = str(block.get("name")), block.get("id")
            calls.append(ToolCall(name=name, arguments=arguments, call_id=call_id))
    for call in calls:
        _check_arguments(call)
    return Turn(
        role="assistant",
        pieces=(Piece(_text_of(message), reply_id(message), kind=TokenKind.ANSWER),),
        reasoning=_reasoning_of(message),
        tool_calls=tuple(calls),
        name=message.name,
    )


def _check_arguments(call: ToolCall) -> None:
    """Templates print what they are given: some fail on what is no JSON, some make it up.

    Raises:
        MessageError: The arguments of a call are no JSON object.
    """
    given: Any = call.arguments
    try:
        is_json = isinstance(given, Mapping) and bool(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        is_json = False
    if not is_json:
        msg = (
            f"the arguments of a call of {call.name!r} are no JSON object: {given!r}; "
            "give them as json.loads would return them"
        )
        raise MessageError(msg)


def _reasoning_of(message: AIMessage) -> str:
    given = message.additional_kwargs.get("reasoning_content")
    if isinstance(given, str):
        return given
    blocks = _blocks(message, _REASONING_BLOCKS)
    return "".join(str(b.get("reasoning") or b.get("thinking") or "") for b in blocks)


def _results_in(message: BaseMessage, called: Mapping[str | None, str]) -> Iterator[Turn]:
    """Anthropic's form of tool messages: results as blocks of a human message."""
    for block in _blocks(message, {_RESULT_BLOCK}):
        text = _joined(_listed(block.get("content")), type(message).__name__)
        yield _result(text, block.get("tool_use_id"), called)


def _has_results(message: BaseMessage) -> bool:
    return any(True for _ in _blocks(message, {_RESULT_BLOCK}))


def _blocks(message: BaseMessage, kinds: Collection[str]) -> Iterator[Mapping[str, Any]]:
    for block in _listed(message.content):
        if isinstance(block, Mapping) and str(block.get("type")) in kinds:
            yield block


def _text_of(message: BaseMessage) -> str:
    """All text of a message; blocks are joined as they are, with nothing in between."""
    return _joined(_listed(message.content), type(message).__name__)


def _joined(blocks: Sequence[Any], where: str) -> str:
    return "".join(_text_in(block, where) for block in blocks)


def _text_in(block: Any, where: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text" if "text" in block else None)
    if kind in _TEXT_BLOCKS:
        return str(block.get("text") or "")
    if kind in _CALL_BLOCKS or kind in _REASONING_BLOCKS or kind == _RESULT_BLOCK:
        return ""
    msg = (
        f"a {where} holds a block of type {kind!r}, but this model reads text only; leave the "
        "block out, or describe it in text"
    )
    raise MessageError(msg)


def _listed(content: Any) -> Sequence[Any]:
    if content is None:
        return ()
    return (content,) if isinstance(content, str) else content
