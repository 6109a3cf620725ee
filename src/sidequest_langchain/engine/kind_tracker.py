"""The kind of each token that a model generates: an answer, a thought, a call of a tool.

It must not know chat templates or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.kinds import TokenKind


@dataclass(frozen=True, slots=True)
class Markers:
    """What opens and closes text of one kind inside of what the model says."""

    kind: TokenKind
    opening: str
    closing: str | None
    """`None`: it lasts to the end of the turn."""


MARKERS = (
    Markers(TokenKind.THOUGHT, "<think>", "</think>"),
    Markers(TokenKind.THOUGHT, "[THINK]", "[/THINK]"),
    Markers(TokenKind.TOOL_CALL, "<tool_call>", "</tool_call>"),
    Markers(TokenKind.TOOL_CALL, "<function_call>", "</function_call>"),
    Markers(TokenKind.TOOL_CALL, "[TOOL_CALLS]", None),
    Markers(TokenKind.TOOL_CALL, "<|python_tag|>", None),
    Markers(TokenKind.TOOL_CALL, "<|tool_call|>", None),
)
"""As the templates of open models have them."""

TAGS = frozenset(tag for marks in MARKERS for tag in (marks.opening, marks.closing) if tag)
SAID = frozenset({TokenKind.ANSWER, TokenKind.THOUGHT, TokenKind.TOOL_CALL, TokenKind.DELIMITER})
"""Kinds of tokens in the model's own turn."""

_TAGS = frozenset(tag.encode() for tag in TAGS)
_OPENINGS = tuple((marks.opening.encode(), marks) for marks in MARKERS)
_LONGEST = max(map(len, _TAGS))
_LAST_BYTES = frozenset(tag[-1:] for tag in _TAGS)
_MOST_LOOKED_BACK = 64
"""Tokens at the end of a prompt of unknown kinds that may have opened a block."""


class KindTracker:
    """Tells kinds token by token; markers count as part of the block they open or close.

    Markers are found by their bytes, however the tokenizer splits them. A token's kind is final
    when it is told: of an opening marker spelled by several tokens, the ones before the last
    are told as what they seemed to be until then.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._block: Markers | None = None
        self._tail = b""

    def read_prompt(self, prompt_ids: Sequence[int], kinds: bytes = b"") -> None:
        """Begin after a prompt, which may have left a block open (`<think>` at its end).

        Args:
            prompt_ids: The prompt.
            kinds: Those of its tokens; empty if they are unknown.
        """
        first = len(prompt_ids)
        least = 0 if kinds else first - _MOST_LOOKED_BACK
        while first > max(0, least) and self._is_said(first - 1, prompt_ids, kinds):
            first -= 1
        for token_id in prompt_ids[first:]:
            self.push(token_id)

    def push(self, token_id: int) -> TokenKind:
        """The kind of the next token."""
        piece = self._tokenizer.token_bytes(token_id)
        self._tail += piece
        kind = self._kind
        if any(last in piece for last in _LAST_BYTES):
            while self._cross():
                kind = self._kind if kind is TokenKind.ANSWER else kind
        self._tail = self._tail[-_LONGEST:]
        return kind

    @property
    def _kind(self) -> TokenKind:
        return TokenKind.ANSWER if self._block is None else self._block.kind

    def _cross(self) -> bool:
        """Enter or leave a block whose marker is in the tail; whether there was one."""
        if self._block is not None:
            closing = self._block.closing
            _, found, rest = self._tail.partition(closing.encode()) if closing else (b"", b"", b"")
            if not found:
                return False
            self._block, self._tail = None, rest
            return True
        places = [(self._tail.find(opening), opening, marks) for opening, marks in _OPENINGS]
        found_at = [place for place in places if place[0] >= 0]
        if not found_at:
            return False
        at, opening, self._block = min(found_at, key=lambda place: place[0])
        self._tail = self._tail[at + len(opening) :]
        return True

    def _is_said(self, place: int, prompt_ids: Sequence[int], kinds: bytes) -> bool:
        if kinds and kinds[place] not in SAID:
            return False
        token_id = prompt_ids[place]
        special = self._tokenizer.is_special(token_id)
        return not special or self._tokenizer.token_bytes(token_id) in _TAGS
