"""Ids to text while they are generated: only text that can no longer change leaves it.

It must not know the engine, sampling or messages.

    ids    | settled ......... | anchor | pending |     pending: its last character is open
    text   | emitted ............. | held |             held: may become a stop string
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from sidequest_langchain.engine.tokenizer import ChatTokenizer


class Detokenizer:
    """The text of one sample, token by token.

    The chunks join to `decode(all ids)`, cut right before the stop string that is complete
    first. A token costs the decoding of the few tokens around it, whatever the length so far.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: tuple[str, ...] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._shown = shown
        self._ids: list[int] = []
        self._anchor: list[int] = []
        self._pending: list[int] = []
        self._settled: list[tuple[int, int]] = [(0, 0)]
        """(ids, characters) after which decoding may start afresh."""
        self._held = ""
        self._chunks: list[str] = []
        self.is_stopped = False
        """Whether a stop string was completed; `text` ends right before it."""

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    def push(self, token_id: int) -> str:
        """Take the next token; the text that became certain with it, often `''`."""
        if self.is_stopped:
            return ""
        self._ids.append(token_id)
        if self._is_hidden(token_id):
            return ""
        self._pending.append(token_id)
        if self._tokenizer.leaves_open(self._pending):
            return ""
        return self._emit(self._settle())

    def finish(self) -> str:
        """The ids end here: whatever was held back."""
        if self.is_stopped:
            return ""
        tail = self._emit(self._settle())
        if self._held:
            tail += self._held
            self._chunks.append(self._held)
            self._held = ""
        return tail

    def kept_ids(self) -> tuple[int, ...]:
        """The longest head of the ids whose text is a prefix of `text`.

        A token that reaches past a stop string is not in it: what a later prompt holds of this
        reply is the text before the stop.
        """
        text = self.text
        at = len(self._settled) - 1
        while self._settled[at][1] > len(text):
            at -= 1
        n_ids, n_chars = self._settled[at]
        beyond = self._settled[at + 1][0] if at + 1 < len(self._settled) else len(self._ids)
        start = self._fresh_start(at)
        n_known = len(self._decode(self._ids[start:n_ids]))
        for end in range(beyond, n_ids, -1):
            added = self._decode(self._ids[start:end])[n_known:]
            if text.startswith(added, n_chars):
                return tuple(self._ids[:end])
        return tuple(self._ids[:n_ids])

    def _fresh_start(self, at: int) -> int:
        """Where to start decoding so that what follows point `at` is not taken for a beginning."""
        start = self._settled[max(at - 1, 0)][0]
        while start and not self._decode(self._ids[start : self._settled[at][0]]):
            at -= 1
            start = self._settled[max(at - 1, 0)][0]
        return start

    def _is_hidden(self, token_id: int) -> bool:
        return token_id not in self._shown and self._tokenizer.is_special(token_id)

    def _decode(self, ids: list[int]) -> str:
        return decoded(self._tokenizer, ids, self._shown)

    def _settle(self) -> str:
        """The text that the pending tokens add; they become the anchor of the next ones."""
        if not self._pending:
            return ""
        # Decoders treat the start of a text in their own way (a space is stripped): the tokens
        # before are decoded along, so that this is no start.
        known = self._decode(self._anchor) if self._anchor else ""
        added = self._decode(self._anchor + self._pending)[len(known) :]
        self._anchor, self._pending = self._pending, []
        self._settled.append((len(self._ids), self._settled[-1][1] + len(added)))
        return added

    def _emit(self, added: str) -> str:
        text = self._held + added
        cut = _first_stop(text, self._stop)
        if cut is None:
            cut = len(text) - _n_held(text, self._stop)
            self._held = text[cut:]
        else:
            self.is_stopped = True
            self._held = ""
        if cut:
            self._chunks.append(text[:cut])
        return text[:cut]


def decoded(tokenizer: ChatTokenizer, ids: Sequence[int], shown: Set[int]) -> str:
    """Text of `ids`, with those special tokens that are `shown`, and no others."""
    if not shown:
        return tokenizer.decode(ids)
    visible = [i for i in ids if i in shown or not tokenizer.is_special(i)]
    return tokenizer.decode(visible, skip_special=False)


def _first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the stop string that is complete first begins.

    First in the order of the text's characters, so that the split into tokens has no say.
    """
    found = [(text.find(string) + len(string), text.find(string)) for string in stop]
    ends = [point for point in found if point[1] >= 0]
    return min(ends)[1] if ends else None


def _n_held(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that a stop string begins with."""
    longest = max((len(string) for string in stop), default=1) - 1
    for n_chars in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-n_chars:]) for string in stop):
            return n_chars
    return 0
