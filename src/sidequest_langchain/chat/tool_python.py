"""Reads calls that are written as a list in Python: `[add(a=1, b=2), look_up(city="Oslo")]`.

It must not know what stands around the list, nor which tools there are. Nothing is run: the text
is parsed, and constants are taken from it.
"""

from __future__ import annotations

import ast
import json
from typing import Any

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}
"""How models that think of JSON write Python's words."""


class CallList:
    """One list, as far as it was read, letter by letter."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Name and arguments (JSON text) of each call, once the list is done."""
        self.is_done = False
        """Whether the list is complete and holds calls."""
        self.is_broken = False
        """Whether this can be no list of calls, whatever comes."""
        self._raw: list[str] = []
        self._head = ""
        self._has_head = False
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def raw(self) -> str:
        """Everything read."""
        return "".join(self._raw)

    @property
    def name(self) -> str | None:
        """The name of the first call, once it is known."""
        return self._head if self._has_head else None

    def push(self, char: str) -> None:
        """Take the next letter; there is none after the list is done or broken."""
        self._raw.append(char)
        if self._quote:
            self._in_string(char)
            return
        if not self._has_head:
            self._read_head(char)
        if char in "\"'":
            self._quote = char
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char in "])}":
            if not self._open or self._open.pop() != char:
                self.is_broken = True
            elif not self._open:
                self._end()

    def _read_head(self, char: str) -> None:
        if len(self._open) > 1 or char in "\"'":
            self.is_broken = True
        elif not self._open:
            self.is_broken = char != "["
        elif char == "(":
            self._has_head = True
            self.is_broken = not self._head.replace(".", "_").isidentifier()
        elif char.isidentifier() or char.isdigit() or char == ".":
            self._head += char
        elif self._head or not char.isspace():
            self.is_broken = True

    def _in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""

    def _end(self) -> None:
        try:
            tree = ast.parse(self.raw.strip(), mode="eval").body
            assert isinstance(tree, ast.List)
            self.calls = [_call(node) for node in tree.elts]
        except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
            self.is_broken = True
        else:
            self.is_done = True


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        msg = "not a call with named arguments"
        raise ValueError(msg)
    arguments = {str(word.arg): _constant(word.value) for word in node.keywords if word.arg}
    if len(arguments) < len(node.keywords):
        msg = "arguments that are unpacked or given twice"
        raise ValueError(msg)
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)


def _constant(node: ast.expr) -> Any:
    """The value that `node` spells.

    Raises:
        ValueError: It is more than a constant.
    """
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            msg = "a dict whose keys are no strings"
            raise ValueError(msg)
        return dict(zip(keys, map(_constant, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float | bool):
        msg = "a value that JSON does not have"
        raise ValueError(msg)
    return value
