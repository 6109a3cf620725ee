"""Agents whose model is a tiny real one that says what a script has, call after call.

The script is told over the model's forward (see `tests.support.force`), so that everything else
about a call is the model's own. After the script's end it speaks for itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import tool

from sidequest_langchain import SideQuestChatModel
from tests.support.force import Row, force
from tests.support.tiny import END_ID

PLACES = ("Oslo", "Rome", "Paris", "Lisbon", "Hanzi", "Oslo again", "Rome again")


def told_of(place: str) -> str:
    """What the tool says: no two alike, and long enough to be worth clearing."""
    return " ".join(f"{place} {i} trip days" for i in range(12))


@tool
def look(place: str) -> str:
    """Look a place up."""
    return told_of(place)


def call(place: str, number: int = 0) -> str:
    """How the model calls the tool, in the form of the template `TOOLS`."""
    arguments = json.dumps({"name": "look", "arguments": {"place": place}})
    return f"\n<tool_call>\n{arguments}\n</tool_call>"


class Script:
    """What the model says, call after call, for one stream of calls after another."""

    def __init__(self, model: SideQuestChatModel, texts: Sequence[str]) -> None:
        tokenizer = model.engine.tokenizer
        self._waiting = [[*tokenizer.encode(text), END_ID] for text in texts]
        self._newline = tokenizer.encode("\n")[-1]
        self._now: list[int] = []
        self._start = 0

    def __call__(self, row: Row) -> int | None:
        i = row.position - self._start
        if 0 < i < len(self._now) and self._now[i - 1] == row.token_id:
            return self._now[i]
        # Every prompt ends with the line end behind `assistant`.
        if row.token_id == self._newline:
            self._now = self._waiting.pop(0) if self._waiting else []
            self._start = row.position
            return self._now[0] if self._now else None
        return None

    @property
    def n_left(self) -> int:
        """Replies that were not said yet."""
        return len(self._waiting)


@contextmanager
def saying(model: SideQuestChatModel, *texts: str) -> Iterator[Script]:
    """Have the model say these texts, a call each; afterwards what it likes."""
    script = Script(model, texts)
    with force(model.engine._core.adapter.model, script):
        yield script


def answers(messages: Sequence[BaseMessage]) -> list[AIMessage]:
    """The model's messages."""
    return [message for message in messages if isinstance(message, AIMessage)]


def told(message: BaseMessage) -> dict[str, Any]:
    """What a reply tells of its call."""
    found: dict[str, Any] = message.response_metadata["sidequest"]
    return found
