"""Reads an answer that is JSON objects in a row and nothing else: calls without their tags.

    {"name": "add", "arguments": {"a": 1}}
    {"name": "look_up", "arguments": {"city": "Oslo"}}

also with commas between them, in a list, in one fence, or each in a fence of its own. All of it
is calls or none of it: every object names a tool that there is and gives arguments that are
sound. It must not know what came before.
"""

from __future__ import annotations

from collections.abc import Collection

from sidequest_langchain.chat.tool_events import is_sound
from sidequest_langchain.chat.tool_json import KEYS, CallObject

_WRAPPERS = {
    "```json": "```",
    "```tool_call": "```",
    "```": "```",
    "<tools>": "</tools>",
}
"""What models put around bare calls, and how it ends."""
_BLANK = " \t\r\n"


class CallRow:
    """Reads from the beginning of an answer; no letter of an object is looked at twice.

    Attributes:
        calls: Names and arguments of the objects that are complete.
        is_text: Whether this can be no row of calls, whatever comes.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.calls: list[tuple[str | None, str]] = []
        self.is_text = False
        self._names = names
        self._item: CallObject | None = None
        self._rest = ""
        self._wrapper_end = ""
        self._is_in_list = self._is_parted = False

    @property
    def is_whole(self) -> bool:
        """Whether all of it is calls, were it to end here. A fence may stay open."""
        is_open = self._item is not None or self._is_in_list or self._is_parted
        return bool(self.calls) and not (is_open or self.is_text or self._rest)

    def read(self, text: str) -> None:
        """Take more of the answer."""
        self._rest += text
        while not self.is_text and self._rest:
            goes_on = self._between() if self._item is None else self._in_object(self._item)
            if not goes_on:
                return

    def _in_object(self, item: CallObject) -> bool:
        for i, char in enumerate(self._rest):
            item.push(char)
            is_named = item.name is None or item.name in self._names
            if item.is_broken or not is_named or not KEYS.issuperset(item.keys):
                self.is_text = True
                return False
            if item.is_done:
                self._rest = self._rest[i + 1 :]
                return self._take(item)
        self._rest = ""
        return False

    def _take(self, item: CallObject) -> bool:
        arguments = item.take_arguments()
        self.is_text = not item.gives_arguments or not is_sound(arguments)
        self.calls.append((item.name, arguments))
        self._item, self._is_parted = None, False
        return not self.is_text

    def _between(self) -> bool:
        """Before, between and behind the objects."""
        self._rest = text = self._rest.lstrip(_BLANK)
        if text[:1] == "{":
            self._item = CallObject()
            return True
        marks = self._marks()
        if any(mark != text and mark.startswith(text) for mark in marks):
            return False  # it may yet become one, or a longer one
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is None:
            self.is_text = True
            return False
        self._rest = text[len(mark) :]
        self._pass(mark)
        return True

    def _marks(self) -> list[str]:
        """What may stand here beside an object, longer ones first."""
        if self._is_parted:
            return []
        parting = [",", ";"] if self.calls else []
        if self._is_in_list:
            return [*parting, "]"]
        around = [self._wrapper_end] if self._wrapper_end else list(_WRAPPERS)
        return [*parting, *around, "["]

    def _pass(self, mark: str) -> None:
        if mark in (",", ";"):
            self._is_parted = True
        elif mark in ("[", "]"):
            self._is_in_list = mark == "["
        else:
            self._wrapper_end = "" if self._wrapper_end else _WRAPPERS[mark]
