"""The calls of one reply, while they are read; it must not know how they are written."""

from __future__ import annotations

import math

from sidequest_langchain.chat.tool_events import (
    CallBegun,
    CallText,
    ReplyEvent,
    is_sound,
    spoiling,
)


class CallSink:
    """Takes calls one after the other.

    Attributes:
        n_most: How many are taken; the others are dropped.
        n_begun: Calls so far, sound or not, without those beyond the most that may be.
        problems: Why a call is not sound, by its index.
    """

    def __init__(self, n_most: int | None = None) -> None:
        self.n_begun = 0
        self.problems: dict[int, str] = {}
        self.n_most = math.inf if n_most is None else n_most
        self._events: list[ReplyEvent] = []
        self._index = -1
        self._is_kept = False
        self._arguments: list[str] = []
        self._new: list[str] = []

    def begin(self, name: str | None) -> None:
        """A call begins."""
        self._flush()
        self._index += 1
        self._is_kept = self._index < self.n_most
        self._arguments = []
        if self._is_kept:
            self.n_begun += 1
            self._events.append(CallBegun(self._index, name))

    def add(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._arguments.append(text)
        if self._is_kept:
            self._new.append(text)

    def end(self, problem: str = "") -> None:
        """The call that began last ends.

        Args:
            problem: Why it is not sound, whatever its arguments are.
        """
        arguments = "".join(self._arguments)
        if not problem and not is_sound(arguments):
            problem = "its arguments are no JSON object"
        if problem:
            self.add(spoiling(arguments))
            if self._is_kept:
                self.problems[self._index] = problem

    def whole(self, name: str | None, arguments: str, problem: str = "") -> None:
        """A call that is there at once."""
        self.begin(name)
        self.add(arguments)
        self.end(problem)

    def take(self) -> list[ReplyEvent]:
        """What happened since this was last asked."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        text, self._new = "".join(self._new), []
        if text:
            self._events.append(CallText(self._index, text))
