r"""Reads a reply while it arrives: what is thought, what is said, and which tools are called.

What may still become a call, or a tag, is held back; what is a call never shows as text. How the
reply is split into parts does not matter. It must not know LangChain's messages.

    thought -> lead -> text <-> block of calls
                  \-> a bare call, which is the whole answer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sidequest_langchain.chat.reasoning import Thinking
from sidequest_langchain.chat.tool_bare import BareReader, Verdict
from sidequest_langchain.chat.tool_block import BlockReader
from sidequest_langchain.chat.tool_calls import CallSink
from sidequest_langchain.chat.tool_events import (
    CallBegun,
    CallText,
    ReplyEvent,
    Said,
    Thought,
    held,
    is_sound,
)
from sidequest_langchain.chat.tool_syntax import Syntax


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a reply is to be read."""

    syntax: Syntax | None = None
    """`None`: it calls nothing."""
    thinking: Thinking | None = None
    is_thinking: bool = False
    """Whether it begins inside of a thought."""
    names: Collection[str] = ()
    """The tools there are; a bare object is a call only if it names one."""
    n_most_calls: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the reply is text and nothing else."""
        return self.syntax is None and self.thinking is None


class ReplyReader:
    """Reads one reply.

    Attributes:
        thoughts: Where thoughts stand in the reply, tags included: (start, end) in letters.
        calls: What came of its calls.
    """

    def __init__(self, reading: Reading) -> None:
        self.thoughts: list[tuple[int, int]] = []
        self.calls = CallSink(reading.n_most_calls)
        self._reading = reading
        self._buffer = ""
        self._n_fed = 0
        self._events: list[ReplyEvent] = []
        self._block: BlockReader | None = None
        self._bare: BareReader | None = None
        self._blanks = ""
        self._gap: str | None = None
        self._has_said = self._is_behind_calls = self._follows_thought = self._is_blank_thought = (
            False
        )
        self._thought_start = 0
        self._openings = [*reading.syntax.openings] if reading.syntax else []
        self._tags = [reading.thinking.opening] if reading.thinking else []
        self._state: Callable[[bool], bool] = self._text if reading.is_plain else self._lead
        if reading.is_thinking and reading.thinking:
            self._begin_thought(0)

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take more of the reply; what became certain with it."""
        if self._reading.is_plain:
            return [Said(text)] if text else []
        self._buffer += text
        self._n_fed += len(text)
        return self._run(is_last=False)

    def finish(self) -> list[ReplyEvent]:
        """The reply ends here: what was held back. A call that is not complete is no call."""
        return [] if self._reading.is_plain else self._run(is_last=True)

    def _run(self, *, is_last: bool) -> list[ReplyEvent]:
        self._events = []
        while self._state(is_last):
            pass
        if is_last:
            self._close()
        return self._events

    def _close(self) -> None:
        if self._state == self._thought:
            self.thoughts.append((self._thought_start, self._n_fed))
        elif self._blanks and self._gap is None:
            self._events.append(Said(self._blanks))

    # -- states: each says whether to go on ------------------------------------------------

    def _lead(self, is_last: bool) -> bool:  # noqa: FBT001
        """At the beginning of the answer: it may be a bare call."""
        syntax = self._reading.syntax
        if syntax is not None and self._reading.names:
            self._bare = self._bare or BareReader(syntax, self._reading.names, self.calls)
            verdict, self._buffer = self._bare.read(self._buffer, is_last=is_last)
            self._take_calls()
            if verdict is Verdict.OPEN:
                return False
            self._bare = None
            if verdict is Verdict.CALLS:
                self._end_block()
                return True
        self._state = self._text
        return True

    def _text(self, is_last: bool) -> bool:  # noqa: FBT001
        markers = [*self._tags, *self._openings]
        found = [(self._buffer.find(marker), marker) for marker in markers]
        at, marker = min(((i, m) for i, m in found if i >= 0), default=(-1, ""))
        if at < 0:
            n_held = 0 if is_last else held(self._buffer, markers)
            cut = len(self._buffer) - n_held
            self._say(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            return False
        start = self._n_fed - len(self._buffer) + at
        self._say(self._buffer[:at])
        self._buffer = self._buffer[at + len(marker) :]
        if marker in self._tags:
            self._begin_thought(start)
        else:
            assert self._reading.syntax is not None
            self._block = BlockReader(self._reading.syntax, self.calls)
            self._state = self._calls
        return True

    def _thought(self, is_last: bool) -> bool:  # noqa: FBT001
        assert self._reading.thinking is not None
        closing = self._reading.thinking.closing
        at = self._buffer.find(closing)
        cut = (
            at if at >= 0 else len(self._buffer) - (0 if is_last else held(self._buffer, [closing]))
        )
        self._think(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        if at < 0:
            return False
        self._buffer = self._buffer[len(closing) :]
        self.thoughts.append((self._thought_start, self._n_fed - len(self._buffer)))
        self._blanks, self._follows_thought = "", True
        self._state = self._text if self._has_said else self._lead
        return True

    def _calls(self, is_last: bool) -> bool:  # noqa: FBT001
        assert self._block is not None
        is_over, self._buffer = self._block.read(self._buffer, is_last=is_last)
        self._take_calls()
        if is_over:
            self._end_block()
        return is_over

    # -- what they do ----------------------------------------------------------------------

    def _take_calls(self) -> None:
        self._events += self.calls.take()

    def _end_block(self) -> None:
        self._block = None
        self._interrupt()
        self._follows_thought, self._is_behind_calls = False, True
        self._state = self._text

    def _interrupt(self) -> None:
        """What follows stands apart from what was said."""
        self._gap, self._blanks = self._gap or self._blanks, ""

    def _begin_thought(self, start: int) -> None:
        self._thought_start = start
        self._is_blank_thought = True
        self._interrupt()
        self._state = self._thought

    def _say(self, text: str) -> None:
        """Say `text`. Blanks wait for what comes: next to a call or a thought they are dropped."""
        if self._follows_thought:
            text = text.lstrip("\n")
            self._follows_thought = not text
        text = self._blanks + text
        body = text.rstrip()
        self._blanks = text[len(body) :]
        if not body:
            return
        if self._gap is not None and self._has_said and not body[0].isspace():
            body = self._gap + body
        elif self._is_behind_calls and not self._has_said:
            body = body.lstrip()
        self._gap, self._has_said = None, True
        self._events.append(Said(body))

    def _think(self, text: str) -> None:
        """Think `text`, without the line ends next to the tags."""
        if self._is_blank_thought:
            text = text.lstrip("\n")
        text = self._blanks + text
        body = text.rstrip("\n")
        self._blanks = text[len(body) :]
        if body:
            self._is_blank_thought = False
            self._events.append(Thought(body))


def arguments_read(text: str, reading: Reading) -> list[tuple[str | None, Any]]:
    """The calls in a whole reply: names and arguments, which are text if they are not sound."""
    reader = ReplyReader(reading)
    calls: list[tuple[str | None, Any]] = []
    for event in [*reader.feed(text), *reader.finish()]:
        if isinstance(event, CallBegun):
            calls.append((event.name, ""))
        elif isinstance(event, CallText):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return [
        (name, json.loads(arguments, strict=False) if is_sound(arguments) else arguments)
        for name, arguments in calls
    ]
