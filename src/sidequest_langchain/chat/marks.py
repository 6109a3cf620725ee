r"""Invisible marks in what a template is given, to find in its output what came from where.

Text of a message that spells a control token, and replies whose token ids are known, are put
between marks; the template moves, strips or drops them as it pleases, and what is left of the
marks tells. It must not know token ids.

    given     <L>The plan<R>           You type <[>EOS<]> to stop.
    rendered  ...assistant\n<L>The plan<R>EOS\n user\nYou type <[>EOS<]> to stop.EOS\n
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from sidequest_langchain.chat.messages import Piece, Turn

_RARE = range(0x20000, 0x2A6D0)
"""Rare Chinese characters. Those that a conversation holds are not used as marks in it. Templates
may print values as Python does, which would escape code points that are no characters."""
_IS_RARE = re.compile(f"[{chr(_RARE[0])}-{chr(_RARE[-1])}]")
_IS_ESCAPED = re.compile(r"\\ud8[0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
"""As JSON in ASCII has them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a reply stands in a rendered text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A piece, or a part of it, that was found in a rendered text."""

    span: Span
    turn: Turn
    piece: Piece


class Pen:
    """Writes pieces with marks around control text, and reads the marks back."""

    def __init__(
        self, *, structure: Iterable[str], special: Iterable[str], texts: Iterable[str]
    ) -> None:
        """Choose marks that occur in none of `texts`.

        Args:
            structure: Text of tokens that give a chat its structure.
            special: Those of them that are never text, not even the assistant's.
            texts: Everything that will be written.
        """
        used = {char for text in texts for char in _IS_RARE.findall(text)}
        used |= {json.loads(f'"{form}"') for text in texts for form in _IS_ESCAPED.findall(text)}
        self._free = (chr(code) for code in _RARE if chr(code) not in used)
        opens, closes = next(self._free), next(self._free)
        self._used = used | {opens, closes}
        self._structure, self._special = _any_of(structure), _any_of(special)
        self._marked = f"{opens}\\g<0>{closes}"
        either = _any_of({*structure, *special}).pattern
        first, last = _as_printed(opens), _as_printed(closes)
        self._pieces = re.compile(f"{first}({either}){last}|{first}|{last}")

    def write(self, turn: Turn, piece: Piece) -> str:
        """The text of `piece` with its control text marked.

        What the assistant said may hold the tags that its template gives a meaning (a think
        block), so there the special tokens alone are marked.
        """
        control = self._special if turn.role == "assistant" else self._structure
        return control.sub(self._marked, piece.text)

    def cut(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text, and whether each is control text that was marked.

        A mark that lost its partner is dropped, but still separates: the text on either side
        cannot join to a control token.
        """
        for _, part, is_control in self.cut_at(rendered):
            yield part, is_control

    def cut_at(self, rendered: str) -> Iterator[tuple[int, str, bool]]:
        """As `cut`, and where each part begins."""
        last = 0
        for match in self._pieces.finditer(rendered):
            if last < match.start():
                yield last, rendered[last : match.start()], False
            if match.group(1):
                yield match.start(1), match.group(1), True
            last = match.end()
        if last < len(rendered):
            yield last, rendered[last:], False

    def marks(self) -> Iterator[str]:
        """Marks for another rendering; they are in no text, and not those around control text."""
        return (chr(code) for code in _RARE if chr(code) not in self._used)

    def frame(self, texts: Sequence[str], *, is_inside: bool) -> Framed:
        """A frame of two marks around each text; see `Framed`."""
        marks = [(next(self._free), next(self._free)) for _ in texts]
        return Framed(texts, marks, is_inside=is_inside)


class Framed:
    """Texts in frames, and where they are found again in what was rendered from them."""

    def __init__(
        self, texts: Sequence[str], marks: Sequence[tuple[str, str]], *, is_inside: bool
    ) -> None:
        """Frame `texts`.

        Args:
            texts: Each gets a frame of its own.
            marks: The two marks of each frame.
            is_inside: Whether blanks at a text's ends stay outside of its frame: in a frame, a
                template that trims would find nothing to trim.
        """
        self._texts = texts
        self._marks = marks
        self._is_inside = is_inside
        self.framed = [self._around(text, *pair) for text, pair in zip(texts, marks, strict=True)]
        """The texts with their marks."""

    def read(self, marked: str) -> tuple[str, list[Span | None]]:
        """The rendered text without marks, and where each text stands in it as it is.

        One mark of a frame is enough: a template that takes a reply apart (to print its think
        block anew) may lose the other.
        """
        rendered, found = _without(marked, {mark for pair in self._marks for mark in pair})
        pairs = zip(self._texts, self._marks, strict=True)
        return rendered, [
            self._span(rendered, t, found.get(o), found.get(c)) for t, (o, c) in pairs
        ]

    def _around(self, text: str, opens: str, closes: str) -> str:
        return _around(text, self._core(text), opens, closes)

    def _core(self, text: str) -> tuple[int, int]:
        return _core(text, is_inside=self._is_inside)

    def _span(
        self, rendered: str, text: str, opens: list[int] | None, closes: list[int] | None
    ) -> Span | None:
        start, end = self._core(text)
        guesses = [at - start for at in opens or () if opens and len(opens) == 1]
        guesses += [at - end for at in closes or () if closes and len(closes) == 1]
        for guess in guesses:
            if guess >= 0 and text and rendered.startswith(text, guess):
                return Span(guess, guess + len(text))
        return None


class Tracer:
    """Frames every piece of a kind while it is written, and finds what became of it."""

    def __init__(self, pen: Pen, *, is_inside: bool, has_extras: bool) -> None:
        """Make a tracer for one rendering.

        Args:
            pen: Writes the pieces.
            is_inside: As for `Framed`.
            has_extras: Whether what is not a turn's own text (reasoning, calls, tools) is framed.
        """
        self._pen = pen
        self._is_inside = is_inside
        self._has_extras = has_extras
        self._marks = pen.marks()
        self._framed: list[tuple[Turn, Piece, str, str, str]] = []
        self._is_short = False

    def write(self, turn: Turn, piece: Piece) -> str:
        """The piece in a frame of its own; structure without one."""
        text = self._pen.write(turn, piece)
        start, end = _core(text, is_inside=self._is_inside)
        is_own = self._has_extras or any(own is piece for own in turn.pieces)
        if piece.kind is None or start >= end or not is_own:
            return text
        opens, closes = next(self._marks, ""), next(self._marks, "")
        if not closes:
            self._is_short = True
            return text
        self._framed.append((turn, piece, text, opens, closes))
        return _around(text, (start, end), opens, closes)

    def read(self, marked: str) -> tuple[str, list[Trace]] | None:
        """The rendered text without marks, and what stands where in it.

        A piece printed twice is found twice. Where a template took a piece apart and lost one of
        its marks, as much is found next to the other one as is still as it was. `None` if there
        were more pieces than marks.
        """
        if self._is_short:
            return None
        own = {mark for *_, opens, closes in self._framed for mark in (opens, closes)}
        rendered, found = _without(marked, own)
        traces = [
            Trace(span, turn, piece)
            for turn, piece, text, opens, closes in self._framed
            for span in self._spans(rendered, text, found.get(opens, []), found.get(closes, []))
            if span.start < span.end
        ]
        return rendered, traces

    def _spans(
        self, rendered: str, text: str, opens: list[int], closes: list[int]
    ) -> Iterator[Span]:
        first, last = _core(text, is_inside=self._is_inside)
        core, lead, tail = text[first:last], text[:first], text[last:]
        pairs = list(zip(opens, closes, strict=False))
        if len(opens) != len(closes) or any(start > end for start, end in pairs):
            # Blanks at the lost end may be the template's own.
            pairs = [
                (at, at + len(_same_head(rendered[at : at + len(core)], core).rstrip()))
                for at in opens
            ]
            for at in closes:
                before = rendered[max(0, at - len(core)) : at]
                same = _same_head(before[::-1], core[::-1])
                pairs.append((at - len(same.rstrip()), at))
        for start, end in pairs:
            n_lead = len(lead) if lead and rendered.endswith(lead, 0, start) else 0
            n_tail = len(tail) if tail and rendered.startswith(tail, end) else 0
            yield Span(start - n_lead, end + n_tail)


def _core(text: str, *, is_inside: bool) -> tuple[int, int]:
    """What of `text` is framed."""
    if not is_inside:
        return 0, len(text)
    return len(text) - len(text.lstrip()), len(text.rstrip())


def _around(text: str, core: tuple[int, int], opens: str, closes: str) -> str:
    start, end = core
    return f"{text[:start]}{opens}{text[start:end]}{closes}{text[end:]}" if start < end else text


def _without(marked: str, own: Set[str]) -> tuple[str, dict[str, list[int]]]:
    """`marked` without the marks `own`, and where each of them stood."""
    found: dict[str, list[int]] = {}
    parts = []
    last = n_before = 0
    for match in _IS_RARE.finditer(marked):
        if match.group() not in own:
            continue
        parts.append(marked[last : match.start()])
        found.setdefault(match.group(), []).append(match.start() - n_before)
        last, n_before = match.end(), n_before + 1
    return "".join([*parts, marked[last:]]), found


def _same_head(text: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(text, other, strict=False))
    n_same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    return text[:n_same]


def _as_printed(mark: str) -> str:
    """A pattern of a mark, as text or as JSON in ASCII."""
    return f"(?:{mark}|{re.escape(json.dumps(mark)[1:-1])})"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of `texts`, the longest first; it finds nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
