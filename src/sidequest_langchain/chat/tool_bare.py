"""Reads an answer that may be a call without any tags around it.

Two cases. Where the model's own syntax is such (Llama 3, Python style), it is a call as soon as
it names a tool that there is. Elsewhere small models forget the tags: then it is a call only if
the whole answer is one such object, alone or in a code fence. It must not know what came before.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from sidequest_langchain.chat.tool_block import BlockReader
from sidequest_langchain.chat.tool_calls import CallSink
from sidequest_langchain.chat.tool_events import is_sound
from sidequest_langchain.chat.tool_json import KEYS, CallObject
from sidequest_langchain.chat.tool_python import CallList
from sidequest_langchain.chat.tool_syntax import Syntax

_WRAPPERS = {
    "```json": "```",
    "```tool_call": "```",
    "```": "```",
    "<tools>": "</tools>",
    "": "",
}
"""What models put around a bare call, and how it ends."""
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
        self._item: CallObject | CallList | None = None
        self._seen = ""
        self._closing = ""
        self._rest = ""

    def read(self, text: str, *, is_last: bool) -> tuple[Verdict, str]:
        """Take more of the answer; what it is, and what is left to be read.

        An answer that is text is given back as a whole.
        """
        if self._block is not None:
            return self._read_block(text, is_last=is_last)
        self._seen += text
        self._rest += text
        if self._item is None and not self._finds_item():
            is_open = self._may_begin() and not is_last
            return (Verdict.OPEN, "") if is_open else (Verdict.TEXT, self._seen)
        if isinstance(self._item, CallList):
            return self._read_list(self._item, is_last=is_last)
        assert self._item is not None
        return self._read_object(self._item, is_last=is_last)

    def _finds_item(self) -> bool:
        """Whether the object, or the list, has begun."""
        text = self._seen.lstrip()
        for wrapper, closing in _WRAPPERS.items():
            rest = text[len(wrapper) :].lstrip()
            if text.startswith(wrapper) and rest[:1] == "{":
                self._item, self._closing, self._rest = CallObject(), closing, rest
        if text[:1] == "[" and self._syntax.style == "python":
            self._item, self._rest = CallList(), text
        return self._item is not None

    def _may_begin(self) -> bool:
        """Whether what was seen may come before an object."""
        text = self._seen.strip()
        return any(wrapper.startswith(text) for wrapper in _WRAPPERS)

    def _read_object(self, item: CallObject, *, is_last: bool) -> tuple[Verdict, str]:
        for i, char in enumerate(self._rest):
            if item.is_done:
                self._rest = self._rest[i:]
                break
            item.push(char)
            is_named = item.name is None or item.name in self._names
            if item.is_broken or not is_named or not KEYS.issuperset(item.keys):
                return Verdict.TEXT, self._seen
            if item.name is not None and self._syntax.style == "json" and not self._closing:
                self._sink.begin(item.name)
                self._sink.add(item.take_arguments())
                self._block = BlockReader(self._syntax, self._sink, item)
                return self._read_block(self._rest[i + 1 :], is_last=is_last)
        else:
            self._rest = ""
        return self._judge(item, is_last=is_last)

    def _judge(self, item: CallObject, *, is_last: bool) -> tuple[Verdict, str]:
        """Whether the object is the whole answer."""
        tail = self._rest.strip()
        if not is_last and (not item.is_done or self._closing.startswith(tail)):
            return Verdict.OPEN, ""
        arguments = item.take_arguments()
        is_whole = item.is_done and tail in ("", self._closing)
        if not is_whole or not item.gives_arguments or not is_sound(arguments):
            return Verdict.TEXT, self._seen
        self._sink.whole(item.name, arguments)
        return Verdict.CALLS, ""

    def _read_list(self, item: CallList, *, is_last: bool) -> tuple[Verdict, str]:
        rest = ""
        for i, char in enumerate(self._rest):
            if item.is_done or item.is_broken:
                rest = self._rest[i:]
                break
            item.push(char)
        self._rest = rest
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
