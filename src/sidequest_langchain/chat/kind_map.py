r"""What each character of a rendered conversation is, and from it what each token is.

It must not know how text is encoded: it is told where tokens end.

    rendered  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYo
    pieces                      QQ                                           TT              AA
    blocks                                                      TTTTTTTTTTTTTTTTTTTTT
    the rest is DELIMITER
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from sidequest_langchain.chat.marks import Span, Trace
from sidequest_langchain.chat.messages import Source
from sidequest_langchain.chat.rendering import OF_TOOLS, Rendering
from sidequest_langchain.engine.kind_tracker import MARKERS, SAID, TAGS
from sidequest_langchain.kinds import TokenKind

_BY_PROTECTION = (
    TokenKind.OTHER,
    TokenKind.TOOL_RESULT,
    TokenKind.THOUGHT,
    TokenKind.ANSWER,
    TokenKind.TOOL_CALL,
    TokenKind.DELIMITER,
    TokenKind.QUESTION,
    TokenKind.SYSTEM,
    TokenKind.MARKED,
)
"""A token that holds characters of several kinds is of the last of them in this order."""
_RANKS = bytes.maketrans(bytes(_BY_PROTECTION), bytes(range(len(_BY_PROTECTION))))
_KINDS = bytes.maketrans(bytes(range(len(_BY_PROTECTION))), bytes(_BY_PROTECTION))

_DELIMITERS = re.compile(rb"%c+" % TokenKind.DELIMITER)
_HEADER = re.compile(
    r"\s*(system|developer|user|assistant|model|tool|function|ipython)[ \t]*(?::|\n+|\Z)"
)
_TAG = re.compile("|".join(map(re.escape, sorted(TAGS, key=len, reverse=True))))
_OPENED = {marks.opening: marks for marks in MARKERS}
_PAINTED = bytes([TokenKind.DELIMITER, TokenKind.ANSWER])


class KindMap:
    """The kinds of one rendering's characters; made anew for each prompt.

    Where the template changes more than it is told to, so that pieces cannot be traced, control
    tokens are `DELIMITER`, and everything else is `OTHER`.
    """

    def __init__(
        self, rendering: Rendering, special: Iterable[str], marked: Sequence[str] = ()
    ) -> None:
        """Map a rendering.

        Args:
            rendering: The rendered conversation.
            special: Text of tokens that are never text: they part the template's structure.
            marked: Strings whose every occurrence is `MARKED`.
        """
        self._text = rendering.text
        self._kinds = bytearray([TokenKind.DELIMITER]) * len(self._text)
        self._cut = rendering.cut
        self._edges: dict[int, TokenKind] = {}
        self._results: list[tuple[Span, Source]] = []
        parts = sorted({*special} - TAGS, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, parts)) or "(?!)")
        traces = rendering.trace()
        if traces is None:
            self._tell_control_alone(rendering)
        else:
            self._lay(traces)
            for start, end, is_system in self._stretches():
                self._fill(start, end, is_system=is_system)
                self._find_blocks(start, end)
        for string in marked:
            for form in rendering.written(string) if string else ():
                self._mark(form)
        self._ranks = bytearray(len(self._text))
        for start, part, _ in rendering.cut_at(self._text):  # what is between them is no text
            end = start + len(part)
            self._ranks[start:end] = self._kinds[start:end].translate(_RANKS)

    def of_tokens(self, ends: Sequence[int]) -> bytes:
        """The kind of each token, given where it ends in the text."""
        ranks = bytearray()
        at = 0
        for end in ends:
            # Of several tokens that spell one character, all but the first are empty.
            ranks.append(max(self._ranks[min(at, end - 1) : end], default=0) if end else 0)
            at = max(at, end)
        return bytes(ranks.translate(_KINDS))

    def results_in(self, ends: Sequence[int]) -> Iterator[tuple[int, int, Source]]:
        """Each tool's result: its first token, the one after its last, and what it answers.

        Args:
            ends: Where each token ends in the text; ascending.
        """
        for span, source in self._results:
            first, last = bisect_right(ends, span.start), bisect_right(ends, span.end)
            if last < len(ends) and (last == 0 or ends[last - 1] < span.end):
                last += 1  # a token that reaches beyond
            if first < last:
                yield first, last, source

    # -- from pieces to characters ---------------------------------------------------------

    def _tell_control_alone(self, rendering: Rendering) -> None:
        self._kinds[:] = bytes([TokenKind.OTHER]) * len(self._kinds)
        for start, part, is_control in rendering.cut_at(self._text):
            for found in self._special.finditer(part) if not is_control else ():
                self._paint(start + found.start(), start + found.end(), TokenKind.DELIMITER)

    def _lay(self, traces: Iterable[Trace]) -> None:
        """Lay the pieces down, the longest first: one may stand inside of another."""
        for trace in sorted(traces, key=lambda t: t.span.start - t.span.end):
            start, end, kind = trace.span.start, trace.span.end, trace.piece.kind
            assert kind is not None
            self._paint(start, end, kind)
            if trace.turn is OF_TOOLS or kind is TokenKind.TOOL_CALL:
                self._edges |= {start: kind, end: kind}
            if trace.piece.source is not None:
                self._results.append((trace.span, trace.piece.source))
        self._results.sort(key=lambda result: result[0].start)

    def _stretches(self) -> Iterator[tuple[int, int, bool]]:
        """What is between control tokens, without role names; and whether it is the system's."""
        is_system, last = False, 0
        cuts = [m.span() for m in self._special.finditer(self._text) if self._is_free(m.start())]
        for start, end in [*cuts, (len(self._text), len(self._text))]:
            header = _HEADER.match(self._text, last, start)
            if header and self._is_free(last, header.end()):
                is_system = header.group(1) in ("system", "developer")
                last = header.end()
            if last < start:
                yield last, start, is_system
            control = self._text[start:end].lower()
            if last < start or "system" in control:
                is_system = "system" in control and "/" not in control
            last = end

    def _fill(self, start: int, end: int, *, is_system: bool) -> None:
        """Structure between two parts of the system's text, or around it, belongs to it."""
        for gap in _DELIMITERS.finditer(self._kinds, start, end):
            first, last = gap.span()
            around = {
                *([self._kinds[first - 1]] if first > start else ()),
                *([self._kinds[last]] if last < end else ()),
            }
            if around == {TokenKind.SYSTEM} or (is_system and not around):
                self._paint(first, last, TokenKind.SYSTEM)
            else:
                self._fill_paragraphs(first, last)

    def _fill_paragraphs(self, first: int, last: int) -> None:
        """The rest of the paragraph around a schema or a call: its braces, names of fields."""
        before, after = self._edges.get(first), self._edges.get(last)
        gap = self._text[first:last]
        if before is not None:
            self._paint(first, first + len(gap.partition("\n\n")[0].rstrip()), before)
        if after is not None:
            tail = gap.rpartition("\n\n")[2].lstrip()
            self._paint(last - len(tail), last, after)

    def _find_blocks(self, start: int, end: int) -> None:
        """Thoughts and calls between tags, in what the assistant said and around it."""
        at = start
        while found := _TAG.search(self._text, at, end):
            at = found.end()
            if self._kinds[found.start()] not in SAID:
                continue
            marks = _OPENED.get(found.group())
            if marks is None:  # closed, and never opened: the template took the opening
                first = self._kinds.find(TokenKind.ANSWER, start, found.start())
                kind = next(m.kind for m in MARKERS if m.closing == found.group())
                if first >= 0:
                    self._paint_block(first, at, kind)
                continue
            closing = marks.closing or ""
            closes = self._text.find(closing, at, end) if closing else -1
            if closes < 0:  # up to where the assistant stopped
                closes = max(at, 1 + self._kinds.rfind(TokenKind.ANSWER, at, end))
                closing = ""
            has_text = any(part.strip() for part, _ in self._cut(self._text[at:closes]))
            at = closes + len(closing)
            if has_text:  # an empty block is the template's: it says that there is none
                self._paint_block(found.start(), at, marks.kind)

    def _paint_block(self, start: int, end: int, kind: TokenKind) -> None:
        table = bytes.maketrans(_PAINTED, bytes([kind]) * len(_PAINTED))
        self._kinds[start:end] = self._kinds[start:end].translate(table)

    def _mark(self, string: str) -> None:
        at = self._text.find(string)
        while at >= 0:
            self._paint(at, at + len(string), TokenKind.MARKED)
            at = self._text.find(string, at + 1)

    def _paint(self, start: int, end: int, kind: TokenKind) -> None:
        self._kinds[start:end] = bytes([kind]) * (end - start)

    def _is_free(self, start: int, end: int | None = None) -> bool:
        """Whether no piece has these characters, or the one at `start`."""
        here = self._kinds[start : start + 1 if end is None else end]
        return all(kind == TokenKind.DELIMITER for kind in here)
