"""Turns rewritten to what a chat template can take, with as little change as it allows.

It must not know tokens, templates' text or LangChain's messages. The same turns always give the
same result, and more turns at the end never change how the earlier ones are rewritten: a longer
conversation begins as the shorter one did.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidequest_langchain.chat.messages import Piece, Turn
from sidequest_langchain.chat.template import Traits
from sidequest_langchain.chat.tool_syntax import listed
from sidequest_langchain.kinds import TokenKind

_GAP = Piece("\n\n")
"""Between the texts of several messages that become one turn."""


def fitted(turns: list[Turn], traits: Traits) -> list[Turn]:
    """`turns` as a template with these traits can render them.

    * ids of tool calls become short ones where a template counts their letters;
    * tool calls and results become text in the assistant's and the user's turns;
    * a system message, and later ones, become part of the next user turn;
    * turns of one role in a row become one.
    """
    result: Iterable[Turn] = turns
    if not traits.has_any_ids:
        result = map(_with_short_ids, result)
    if not traits.has_tool_calls:
        result = map(_with_calls_as_text, result)
    if not traits.has_tool_role:
        result = map(_with_results_as_text, result)
    if not traits.has_late_system:
        result = _with_system_in_front(list(result), has_system=traits.has_system)
    if not traits.has_runs:
        result = _with_runs_joined(result)
    return list(result)


def with_tools_told(turns: list[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """`turns` with the tools told in the system's words: for templates without a place for them."""
    told = Piece(listed(tools), kind=TokenKind.SYSTEM)
    if turns[0].role != "system":
        return [Turn(role="system", pieces=(told,)), *turns]
    pieces = (*turns[0].pieces, _GAP, told) if turns[0].text else (told,)
    return [replace(turns[0], pieces=pieces), *turns[1:]]


def _with_short_ids(turn: Turn) -> Turn:
    calls = tuple(replace(call, call_id=_short(call.call_id)) for call in turn.tool_calls)
    asked = _short(turn.tool_call_id) if turn.role == "tool" else turn.tool_call_id
    return replace(turn, tool_calls=calls, tool_call_id=asked)


def _short(call_id: str | None) -> str:
    """An id of nine letters and digits, the same for the same id."""
    given = call_id or ""
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    return hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:9]


def with_form_told(turns: list[Turn], told: str) -> list[Turn]:
    """`turns` with words on the form of the answer behind the last question.

    Behind the question and not in front of the conversation, so that prompts which ask for
    different forms still share all that comes before.
    """
    piece = Piece(told, kind=TokenKind.SYSTEM)
    last = next((i for i in reversed(range(len(turns))) if turns[i].role == "user"), None)
    if last is None:
        return [*turns, Turn(role="user", pieces=(piece,))]
    turn = turns[last]
    pieces = (*turn.pieces, _GAP, piece) if turn.text else (piece,)
    return [*turns[:last], replace(turn, pieces=pieces), *turns[last + 1 :]]


def _with_calls_as_text(turn: Turn) -> Turn:
    if not turn.tool_calls:
        return turn
    calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    texts = [f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls]
    gap = "\n" if turn.text else ""
    pieces = (*turn.pieces, Piece(gap + "\n".join(texts), kind=TokenKind.TOOL_CALL))
    return replace(turn, pieces=pieces, tool_calls=())


def _with_results_as_text(turn: Turn) -> Turn:
    if turn.role != "tool":
        return turn
    pieces = (Piece("<tool_response>\n"), *turn.pieces, Piece("\n</tool_response>"))
    return Turn(role="user", pieces=pieces)


def _with_system_in_front(turns: list[Turn], *, has_system: bool) -> Iterator[Turn]:
    """System turns joined to what may hold them.

    The leading ones become one, if there may be one. Others go into the next user turn, or into
    one of their own where none follows.
    """
    n_leading = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if has_system and n_leading:
        yield _joined(turns[:n_leading])
        turns = turns[n_leading:]
    held: list[Turn] = []
    for turn in turns:
        if turn.role == "system":
            held.append(replace(turn, role="user"))
        elif held and turn.role == "user":
            yield _joined([*held, turn])
            held = []
        else:
            if held:
                yield _joined(held)
                held = []
            yield turn
    if held:
        yield _joined(held)


def _with_runs_joined(turns: Iterable[Turn]) -> Iterator[Turn]:
    run: list[Turn] = []
    for turn in turns:
        if run and (turn.role != run[-1].role or turn.role not in ("user", "assistant")):
            yield _joined(run)
            run = []
        run.append(turn)
    if run:
        yield _joined(run)


def _joined(turns: list[Turn]) -> Turn:
    """One turn with the texts of all; empty ones leave no gap."""
    if len(turns) == 1:
        return turns[0]
    pieces: list[Piece] = []
    for turn in turns:
        if turn.text:
            pieces += [_GAP, *turn.pieces] if pieces else turn.pieces
    return replace(
        turns[-1],
        pieces=tuple(pieces) or turns[-1].pieces,
        reasoning="\n\n".join(turn.reasoning for turn in turns if turn.reasoning),
        tool_calls=tuple(call for turn in turns for call in turn.tool_calls),
        name=None,
    )
