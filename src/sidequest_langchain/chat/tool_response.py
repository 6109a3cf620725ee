"""Reads a reply as its tokenizer's response template says; it must not know messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sidequest_langchain.chat.tool_events import ReplyEvent
from sidequest_langchain.chat.tool_reading import Reading, ReplyReader
from sidequest_langchain.engine.response_parsing import ResponseStream

_THOUGHT = ("thinking", "reasoning", "reasoning_content")
_CALLS = "tool_calls"
_UNREADABLE = "it is not what the tokenizer's response template says"


class ResponseReader(ReplyReader):
    """Reads one reply; see `ReplyReader`."""

    def __init__(self, reading: Reading, begin: Callable[[], ResponseStream]) -> None:
        """Make a reader.

        Args:
            reading: Which tools there are.
            begin: Begins to read, also again behind what could not be read.
        """
        super().__init__(reading)
        self._begin = begin
        self._stream = begin()
        self._body = ""
        self._n_read = 0

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take more of the reply; what became certain with it."""
        self._events = []
        for char in text:  # an error then costs no more than the region it is in
            self._n_read += 1
            self._body += char
            self._take(lambda char=char: self._stream.feed(char))  # type: ignore[misc]
        return self._events

    def finish(self) -> list[ReplyEvent]:
        """The reply ends here: what was held back."""
        self._events = []
        self._take(lambda: self._stream.finish())
        self._n_fed = self._n_read
        self._close()
        return self._events

    def _take(self, read: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            events = read()
        except (ValueError, TypeError, KeyError):
            self._call(None, self._body, _UNREADABLE)
            self._stream, self._body = self._begin(), ""
            return
        for event in events:
            self._handle(event)

    def _handle(self, event: Mapping[str, Any]) -> None:
        kind, field = event["type"], event["field"]
        if field in _THOUGHT:
            if kind == "region_open":
                self._begin_thought(self._n_read)
            elif kind == "region_chunk":
                self._think(event["text"])
            else:
                self.thoughts.append((self._thought_start, self._n_read))
                self._blanks, self._follows_thought, self._state = "", True, self._text
        elif field != _CALLS:
            if kind == "region_chunk":
                self._say(event["text"])
        elif kind == "region_open":
            self._body = ""
        elif kind == "region_close":
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                self._tell(call)

    def _tell(self, call: Any) -> None:
        inner = call.get("function", call) if isinstance(call, Mapping) else {}
        name, arguments = inner.get("name"), inner.get("arguments", {})
        if not isinstance(name, str):
            self._call(None, json.dumps(call, ensure_ascii=False, default=str), _UNREADABLE)
            return
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        self._call(name, text, "")

    def _call(self, name: str | None, arguments: str, problem: str) -> None:
        if self._reading.syntax is None:  # there are no tools: it is text
            self._say(self._body)
            return
        self.calls.whole(name, arguments, problem)
        self._take_calls()
        self._end_block()
