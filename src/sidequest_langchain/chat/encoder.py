"""Ids of the parts of a prompt, remembered: a conversation is encoded once, then only what is new.

It must not know messages or templates.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from sidequest_langchain.engine.tokenizer import ChatTokenizer

_MOST_CHARS = 4_000_000


class SectionEncoder:
    """Encodes text as its tokenizer does; the least recently used parts are forgotten."""

    def __init__(self, tokenizer: ChatTokenizer, *, n_most_chars: int = _MOST_CHARS) -> None:
        self._tokenizer = tokenizer
        self._n_most_chars = n_most_chars
        self._n_chars = 0
        self._known: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self._ends: dict[tuple[str, bool], Sequence[int]] = {}
        self._lock = threading.Lock()

    def encode(self, text: str, *, follows_text: bool) -> list[int]:
        """Ids of `text`; see `ChatTokenizer.encode`."""
        ids: list[int] = []
        for section in self._tokenizer.sections(text):
            ids += self._section(section, follows_text or bool(ids))
        return ids

    def ends(self, text: str, *, follows_text: bool) -> list[int]:
        """Where each token that `encode` makes of `text` ends in it, in characters."""
        ends: list[int] = []
        start = 0
        for section in self._tokenizer.sections(text):
            here = self._ends_in(section, follows_text or bool(ends))
            ends += [start + end for end in here]
            start += len(section)
        return ends

    def _ends_in(self, section: str, follows_text: bool) -> Sequence[int]:  # noqa: FBT001
        ids = self._section(section, follows_text)
        key = (section, follows_text)
        with self._lock:
            known = self._ends.get(key)
        if known is None:
            known = array("I", self._tokenizer.ends_of(section, ids, follows_text=follows_text))
            with self._lock:
                if key in self._known:
                    self._ends[key] = known
        return known

    def _section(self, section: str, follows_text: bool) -> tuple[int, ...]:  # noqa: FBT001
        key = (section, follows_text)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        ids = tuple(self._tokenizer.encode(section, follows_text=follows_text))
        with self._lock:
            if key not in self._known:
                self._known[key] = ids
                self._n_chars += len(section)
            while self._n_chars > self._n_most_chars and len(self._known) > 1:
                old, _ = self._known.popitem(last=False)
                self._ends.pop(old, None)
                self._n_chars -= len(old[0])
        return ids
