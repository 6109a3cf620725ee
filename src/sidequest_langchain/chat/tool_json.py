"""Reads one call that is written as a JSON object, letter by letter, as it arrives.

    {"name": "add", "arguments": {"a": 1}}      also `parameters`, and both inside of `function`

It must not know what stands around the object, nor which tools there are. No letter is looked at
twice and none is looked ahead to: how a reply is split into parts cannot matter.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from sidequest_langchain.chat.tool_events import unwrapped

_WRAPPER = "function"
_ROLES = {
    "name": "name",
    _WRAPPER: "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "args": "arguments",
}
KEYS = frozenset({*_ROLES, "type", "id"})
"""Keys of an object that is a call."""
_BLANK = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


class CallObject:
    """One object, as far as it was read.

    Attributes:
        name: The tool's name, once it is known.
        keys: The keys seen.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.keys: list[str] = []
        self._at = _At.START
        self._depth = 0
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._n_taken = 0
        self._text: list[str] = []
        self._open: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    @property
    def raw(self) -> str:
        """Everything read."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """JSON text of the arguments that was read since this was last asked."""
        new = "".join(self._arguments[self._n_taken :])
        self._n_taken = len(self._arguments)
        return new

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    @property
    def is_broken(self) -> bool:
        """Whether this can be no call, or none that is sound, whatever comes."""
        return self._at is _At.BROKEN

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments are complete."""
        return self._at is _At.AFTER and self._has_arguments

    @property
    def gives_arguments(self) -> bool:
        """Whether it speaks of arguments at all."""
        return "arguments" in map(_ROLES.get, self.keys)

    def push(self, char: str) -> None:
        """Take the next letter; there is none after the object is done or broken."""
        self._raw.append(char)
        if self._at is _At.IN_KEY:
            self._in_key(char)
        elif self._at is _At.IN_VALUE:
            self._in_value(char)
        elif char in _BLANK:
            return
        elif self._at is _At.START:
            self._enter(char)
        elif self._at is _At.KEY:
            self._key(char)
        elif self._at is _At.COLON:
            self._at = _At.VALUE if char == ":" else _At.BROKEN
        elif self._at is _At.VALUE:
            self._value(char)
        else:
            self._after(char)

    # -- between values --------------------------------------------------------------------

    def _enter(self, char: str) -> None:
        self._at = _At.KEY if char == "{" else _At.BROKEN
        self._depth += 1

    def _key(self, char: str) -> None:
        if char == '"':
            self._text, self._at = [char], _At.IN_KEY
        elif char == "}" and not self._text:
            self._leave()
        else:
            self._at = _At.BROKEN

    def _in_key(self, char: str) -> None:
        self._text.append(char)
        if self._ends_string(char):
            key = str(_loaded("".join(self._text)))
            role = _ROLES.get(key)
            is_second = role is not None and role in map(_ROLES.get, self.keys)
            self._at = _At.BROKEN if is_second else _At.COLON
            self.keys.append(key)

    def _after(self, char: str) -> None:
        if char == ",":
            self._at = _At.KEY
        elif char == "}":
            self._leave()
        else:
            self._at = _At.BROKEN

    def _leave(self) -> None:
        self._depth -= 1
        self._at = _At.AFTER if self._depth else _At.DONE
        if self.is_done and self.name is None:
            self._at = _At.BROKEN
        if self.is_done and not self._arguments:
            self._arguments.append("{}")

    # -- values ----------------------------------------------------------------------------

    @property
    def _has_arguments(self) -> bool:
        return _ROLES.get(self.keys[-1]) == "arguments"

    def _value(self, char: str) -> None:
        if char == "{" and self.keys[-1] == _WRAPPER and self._depth == 1:
            self.keys[-1] = "type"  # it names nothing; what is in it does
            self._text = []
            self._enter(char)
            return
        if char in ",:}]":
            self._at = _At.BROKEN
            return
        self._at, self._text, self._open = _At.IN_VALUE, [], []
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        is_first = not self._text
        is_plain = not (is_first or self._open or self._is_in_string)
        if is_plain and char in _BLANK + ",}]":  # the end of a number or a word
            self._end()
            if self._at is _At.AFTER and char not in _BLANK:
                self._after(char)
            return
        self._text.append(char)
        if self._has_arguments and (self._open or char == "{") and self._text[0] == "{":
            self._arguments.append(char)
        if self._is_in_string:
            if self._ends_string(char) and not self._open:
                self._end()
        elif char == '"':
            self._is_in_string = True
            if not is_first and not self._open:
                self._at = _At.BROKEN
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char in "}]":
            if self._open.pop() != char:
                self._at = _At.BROKEN
            elif not self._open:
                self._end()

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
            return True
        return False

    def _end(self) -> None:
        """A value is complete."""
        self._at = _At.AFTER
        key, text = self.keys[-1], "".join(self._text)
        if self._has_arguments:
            if not text.startswith("{"):
                value = _loaded(text)
                self._arguments.append(text if value is _NOTHING else unwrapped(value))
        elif _ROLES.get(key) == "name":
            value = _loaded(text)
            if isinstance(value, str) and value:
                self.name = value
            else:
                self._at = _At.BROKEN


_NOTHING = object()


def _loaded(text: str) -> object:
    try:
        value: object = json.loads(text, strict=False)
    except ValueError:
        return _NOTHING
    return value
