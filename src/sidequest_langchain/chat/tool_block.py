"""Reads the calls that stand between an opening and its closing, or after an opening alone.

    <tool_call>  {"name": ...}  </tool_call>
    [TOOL_CALLS] [{"name": ...}, {"name": ...}]
    [TOOL_CALLS] add[ARGS]{"a": 1}
    <|python_tag|> {"name": ...}; {"name": ...}

It must not know what stands around the block.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from sidequest_langchain.chat.tool_calls import CallSink
from sidequest_langchain.chat.tool_events import held
from sidequest_langchain.chat.tool_json import CallObject
from sidequest_langchain.chat.tool_syntax import Syntax

_BETWEEN = " \t\r\n,;"
_CUT = "it was cut off"
_NO_JSON = "it is no JSON object with a name and arguments"
_BESIDE = "there is more than a call between its tags"


class BlockReader:
    """Reads one block, without its opening."""

    def __init__(self, syntax: Syntax, sink: CallSink, item: CallObject | None = None) -> None:
        """Begin to read.

        Args:
            syntax: Its closing, if it has one.
            sink: Takes the calls.
            item: A first call that was begun to be read, and told to the sink.
        """
        self._syntax = syntax
        self._sink = sink
        self._item = item
        self._is_told = item is not None
        self._is_in_list = False
        self._name = ""
        self._buffer = ""
        self._is_over = False
        self._state: Callable[[bool], bool] = self._start if item is None else self._object

    def read(self, text: str, *, is_last: bool) -> tuple[bool, str]:
        """Take `text`, which begins with what was left the last time.

        Returns:
            Whether the block is over, and what of `text` is left to be read.
        """
        self._buffer = text
        while not self._is_over and self._state(is_last):
            pass
        if is_last and not self._is_over:
            self._cut()
        return self._is_over, self._buffer

    # -- states: each says whether to go on ------------------------------------------------

    def _start(self, is_last: bool) -> bool:  # noqa: FBT001
        """Before a call."""
        self._buffer = self._buffer.lstrip(_BETWEEN)
        if not self._buffer or self._closes(is_last):
            return False
        char = self._buffer[0]
        if char == "[" and not self._is_in_list and not self._syntax.closing:
            self._is_in_list, self._buffer = True, self._buffer[1:]
        elif char == "]" and self._is_in_list:
            self._is_in_list, self._buffer, self._state = False, self._buffer[1:], self._after
        elif self._syntax.style == "mistral" and char != "{" and not self._is_in_list:
            self._state = self._named
        else:
            self._item, self._is_told, self._state = CallObject(), False, self._object
        return True

    def _object(self, is_last: bool) -> bool:  # noqa: FBT001
        item = self._item
        assert item is not None
        for i, char in enumerate(self._buffer):
            item.push(char)
            self._tell(item)
            if item.is_done or item.is_broken or (self._name and item.has_arguments):
                self._buffer = self._buffer[i + 1 :]
                if item.is_broken:
                    self._break(item)
                else:
                    self._sink.end()
                    self._item, self._name, self._state = None, "", self._after
                return True
        self._buffer = ""
        return False

    def _named(self, is_last: bool) -> bool:  # noqa: FBT001
        """A name that stands before its arguments."""
        at = self._buffer.find("{")
        if at < 0:
            return False
        self._name = self._buffer[:at].split("[", 1)[0].strip()
        self._item, self._is_told, self._state = CallObject(), False, self._object
        for char in f'{{"name": {json.dumps(self._name)}, "arguments": ':
            self._item.push(char)
        self._buffer = self._buffer[at:]
        return True

    def _after(self, is_last: bool) -> bool:  # noqa: FBT001
        """After a call."""
        self._buffer = text = self._buffer.lstrip()
        if not text or self._closes(is_last):
            return False
        if text[0] in ",;{" or (self._is_in_list and text[0] == "]"):
            self._state = self._start
        elif self._syntax.closing:
            self._state = self._beside
        else:
            self._is_over = True
        return True

    def _beside(self, is_last: bool) -> bool:  # noqa: FBT001
        """After a call, where its closing should stand: it may yet come."""
        closing = self._buffer.find(self._syntax.closing)
        openings = [self._buffer.find(opening) for opening in self._syntax.openings]
        opening = min((at for at in openings if at >= 0), default=-1)
        if closing >= 0 and (opening < 0 or closing < opening):
            self._sink.add(self._buffer[:closing])
            self._sink.end(_BESIDE)
            self._buffer = self._buffer[closing + len(self._syntax.closing) :]
            self._is_over = True
        elif opening >= 0 or is_last:
            self._is_over = True
        return False

    def _broken(self, is_last: bool) -> bool:  # noqa: FBT001
        """In what cannot be read: up to the closing it is kept as it is."""
        closing = self._syntax.closing
        at = self._buffer.find(closing) if closing else -1
        n_held = 0 if is_last or not closing else held(self._buffer, [closing])
        cut = at if at >= 0 else len(self._buffer) - n_held
        self._sink.add(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        if at >= 0 or is_last:
            self._buffer = self._buffer[len(closing) :]
            self._sink.end(_NO_JSON)
            self._is_over = True
        return False

    # -- what they do ----------------------------------------------------------------------

    def _closes(self, is_last: bool) -> bool:  # noqa: FBT001
        """Whether the closing stands here, or may yet."""
        closing, text = self._syntax.closing, self._buffer
        if not closing:
            return False
        if text.startswith(closing):
            self._buffer = text[len(closing) :]
            self._is_over = True
            return True
        return closing.startswith(text) and not is_last

    def _tell(self, item: CallObject) -> None:
        if item.name is None:
            return
        if not self._is_told:
            self._is_told = True
            self._sink.begin(item.name)
        self._sink.add(item.take_arguments())

    def _break(self, item: CallObject) -> None:
        if not self._is_told:
            self._sink.begin(None)
            self._sink.add(item.raw)
        else:
            self._sink.add(item.raw[-1])
        self._item, self._state = None, self._broken

    def _cut(self) -> None:
        """The reply ends inside of the block."""
        self._is_over = True
        item, rest = self._item, self._buffer
        self._buffer = ""
        if item is not None and self._is_told:
            self._sink.end(_CUT)
        elif item is not None or rest.strip():
            self._sink.whole(None, (item.raw if item is not None else "") + rest, _CUT)
