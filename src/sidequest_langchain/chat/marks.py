r"""Invisible marks in what a template is given, to find in its output what came from where.

Text of a message that spells a control token, and replies whose token ids are known, are put
between marks; the template moves, strips or drops them as it pleases, and what is left of the
marks tells. It must not know token ids.

    given     <L>The plan<R>           You type <[>EOS<]> to stop.
    rendered  ...assistant\n<L>The plan<R>EOS\n user\nYou type <[>EOS<]> to stop.EOS\n
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sidequest_langchain.chat.messages import Piece, Turn

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points that no text uses but by private agreement."""
_IS_PRIVATE = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}]")


@dataclass(frozen=True, slots=True)
class Span:
    """Where a reply stands in a rendered text."""

    start: int
    end: int


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
        used = {char for text in texts for char in _IS_PRIVATE.findall(text)}
        self._free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        opens, closes = next(self._free), next(self._free)
        self._structure, self._special = _any_of(structure), _any_of(special)
        self._marked = f"{opens}\\g<0>{closes}"
        either = _any_of({*structure, *special}).pattern
        self._pieces = re.compile(f"{opens}({either}){closes}|[{opens}{closes}]")

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
        parts = self._pieces.split(rendered)
        for i, part in enumerate(parts):
            if part:
                yield part, i % 2 == 1

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
        found: dict[str, list[int]] = {}
        parts = []
        last = n_before = 0
        own = {mark for pair in self._marks for mark in pair}
        for match in _IS_PRIVATE.finditer(marked):
            if match.group() not in own:
                continue
            parts.append(marked[last : match.start()])
            found.setdefault(match.group(), []).append(match.start() - n_before)
            last, n_before = match.end(), n_before + 1
        rendered = "".join([*parts, marked[last:]])
        pairs = zip(self._texts, self._marks, strict=True)
        return rendered, [
            self._span(rendered, t, found.get(o), found.get(c)) for t, (o, c) in pairs
        ]

    def _around(self, text: str, opens: str, closes: str) -> str:
        start, end = self._core(text)
        return (
            f"{text[:start]}{opens}{text[start:end]}{closes}{text[end:]}" if start < end else text
        )

    def _core(self, text: str) -> tuple[int, int]:
        if not self._is_inside:
            return 0, len(text)
        return len(text) - len(text.lstrip()), len(text.rstrip())

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


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of `texts`, the longest first; it finds nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
