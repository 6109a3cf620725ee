"""Reads an answer that may be calls without any tags around them.

Two cases. Where the model's own syntax is such (Llama 3, Python style), it is a call as soon as
it names a tool that there is. Elsewhere small models forget the tags: then the answer is calls
only if all of it is (`tool_row`). It must not know what came before.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from sidequest_langchain.chat.tool_block import BlockReader
from sidequest_langchain.chat.tool_calls import CallSink
from sidequest_langchain.chat.tool_json import KEYS, CallObject
from sidequest_langchain.chat.tool_python import CallList
from sidequest_langchain.chat.tool_row import CallRow
from sidequest_langchain.chat.tool_syntax import Syntax

_CUT = "it was cut off"
_NO_LIST = "it is no list of calls with named constants"


class Verdict(Enum):
    """What came of an answer's beginning."""

    OPEN = auto()
    TEXT = auto()
    CALLS = auto()


class BareReader:
    """Reads from the beginning of an answer until it is known what that is."""

    def __init__(self, syntax: Syntax, names: Collection[str], sink: CallSink) -> None:
        self._syntax = syntax
        self._names = names
        self._sink = sink
        self._block: BlockReader | None = None
        self._item: CallObject | CallList | CallRow | None = None
        self._seen = ""
        self._new = ""

    def read(self, text: str, *, is_last: bool) -> tuple[Verdict, str]:
        """Take more of the answer; what it is, and what is left to be read.

        An answer that is text is given back as a whole.
        """
        if self._block is not None:
            return self._read_block(text, is_last=is_last)
        self._seen += text
        self._new += text
        if self._item is None and not self._finds_item():
            return (Verdict.TEXT, self._seen) if is_last else (Verdict.OPEN, "")
        if isinstance(self._item, CallList):
            return self._read_list(self._item, is_last=is_last)
        if isinstance(self._item, CallObject):
            return self._read_object(self._item, is_last=is_last)
        assert self._item is not None
        return self._read_row(self._item, is_last=is_last)

    def _finds_item(self) -> bool:
        """Whether it has begun to be something."""
        text = self._seen.lstrip()
        if text[:1] == "[" and self._syntax.style == "python":
            self._item, self._new = CallList(), text
        elif text[:1] == "{" and self._syntax.style == "json":
            self._item, self._new = CallObject(), text
        elif text:
            self._item = CallRow(self._names)
        return self._item is not None

    def _read_object(self, item: CallObject, *, is_last: bool) -> tuple[Verdict, str]:
        """An object of a model that writes its calls so: up to the tool's name."""
        for i, char in enumerate(self._new):
            item.push(char)
            is_named = item.name is None or item.name in self._names
            if item.is_broken or not is_named or not KEYS.issuperset(item.keys):
                return Verdict.TEXT, self._seen
            if item.name is not None:
                self._sink.begin(item.name)
                self._sink.add(item.take_arguments())
                self._block = BlockReader(self._syntax, self._sink, item)
                return self._read_block(self._new[i + 1 :], is_last=is_last)
        self._new = ""
        return (Verdict.TEXT, self._seen) if is_last else (Verdict.OPEN, "")

    def _read_row(self, row: CallRow, *, is_last: bool) -> tuple[Verdict, str]:
        """An answer that may be objects and nothing else: known at its end."""
        row.read(self._new)
        self._new = ""
        # Calls that are dropped anyway need not be complete.
        is_enough = row.is_whole or len(row.calls) >= self._sink.n_most
        if row.is_text or (is_last and not is_enough):
            return Verdict.TEXT, self._seen
        if not is_last:
            return Verdict.OPEN, ""
        for name, arguments in row.calls:
            self._sink.whole(name, arguments)
        return Verdict.CALLS, ""

    def _read_list(self, item: CallList, *, is_last: bool) -> tuple[Verdict, str]:
        rest = ""
        for i, char in enumerate(self._new):
            if item.is_done or item.is_broken:
                rest = self._new[i:]
                break
            item.push(char)
        self._new = rest
        if item.name is not None and item.name not in self._names:
            return Verdict.TEXT, self._seen
        if item.is_done:
            for name, arguments in item.calls:
                self._sink.whole(name, arguments)
            return Verdict.CALLS, rest
        if item.name is None and (item.is_broken or is_last):
            return Verdict.TEXT, self._seen
        if not is_last:
            return Verdict.OPEN, ""
        self._sink.whole(item.name, item.raw + rest, _NO_LIST if item.is_broken else _CUT)
        return Verdict.CALLS, ""

    def _read_block(self, text: str, *, is_last: bool) -> tuple[Verdict, str]:
        assert self._block is not None
        is_over, rest = self._block.read(text, is_last=is_last)
        return (Verdict.CALLS if is_over else Verdict.OPEN), rest
