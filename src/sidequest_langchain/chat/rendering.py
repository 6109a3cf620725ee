"""One conversation as the template renders it, and where in that text its pieces stand.

It must not know token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from sidequest_langchain.chat.marks import Pen, Span, Trace, Tracer
from sidequest_langchain.chat.messages import Piece, Turn
from sidequest_langchain.chat.template import Traits, Write, message_of, schema_written
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import TemplateError

OF_TOOLS = Turn(role="tool", pieces=())
"""The turn that the tools' descriptions are said to be pieces of."""


class Rendering:
    """What the template makes of `turns`.

    Raises:
        TemplateError: The template refuses them.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        traits: Traits,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        is_control_text_plain: bool,
    ) -> None:
        self.turns = turns
        self.traits = traits
        self._tokenizer = tokenizer
        self._tools = tools
        texts: list[str] = []

        def collect(_: Turn, piece: Piece) -> str:
            texts.append(piece.text)
            return piece.text

        self._messages(collect)
        self._pen = Pen(
            structure=tokenizer.control_text if is_control_text_plain else (),
            special=tokenizer.special_tokens if is_control_text_plain else (),
            texts=texts,
        )
        self.text = self._render(self._pen.write)
        """The rendered text; control text in messages is marked (see `cut`)."""

    def write(self, turn: Turn, piece: Piece) -> str:
        """The piece as `text` has it, if the template took it as it is."""
        return self._pen.write(turn, piece)

    def cut(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of (a part of) `text`, and whether each is control text of a message."""
        return self._pen.cut(text)

    def cut_at(self, text: str) -> Iterator[tuple[int, str, bool]]:
        """As `cut`, and where each part begins."""
        return self._pen.cut_at(text)

    def trace(self) -> list[Trace] | None:
        """Where every piece of a kind stands in `text`, or what is left of it.

        The conversation is rendered again, as for `spans`; `None` if nothing can be told.
        """
        for has_extras in (True, False):
            for is_inside in (False, True):
                tracer = Tracer(self._pen, is_inside=is_inside, has_extras=has_extras)
                try:
                    found = tracer.read(self._render(tracer.write))
                except TemplateError:
                    continue
                if found is not None and found[0] == self.text:
                    return found[1]
        return None

    def written(self, text: str) -> Set[str]:
        """`text` as a piece may have it in `self.text`, whoever says it."""
        roles = ("user", "assistant")
        turns = [Turn(role=role, pieces=()) for role in roles]
        return {text, *(self._pen.write(turn, Piece(text)) for turn in turns)}

    def spans(self, pieces: Sequence[tuple[Turn, Piece]]) -> list[Span | None] | None:
        """Where in `text` each piece stands as it is; `None` for one that was changed.

        The conversation is rendered again, with marks. If these change more than they add, the
        template looks into the texts, and nothing can be told: `None` for all.
        """
        texts = [self._pen.write(turn, piece) for turn, piece in pieces]
        for is_inside in (False, True):
            framed = self._pen.frame(texts, is_inside=is_inside)
            by_piece = {id(p): text for (_, p), text in zip(pieces, framed.framed, strict=True)}
            try:
                marked = self._render(
                    lambda turn, piece, known=by_piece: (
                        known.get(id(piece))  # type: ignore[misc]
                        or self._pen.write(turn, piece)
                    )
                )
            except TemplateError:
                continue
            rendered, spans = framed.read(marked)
            if rendered == self.text:
                return spans
        return None

    def _render(self, write: Write) -> str:
        messages, tools = self._messages(write)
        is_open = self.turns[-1].role == "assistant"
        return self._tokenizer.render(messages, tools=tools, continue_final_message=is_open)

    def _messages(self, write: Write) -> tuple[list[Any], list[Any] | None]:
        has_text = self.traits.has_argument_text
        messages = [message_of(t, has_argument_text=has_text, write=write) for t in self.turns]
        tools = [schema_written(tool, OF_TOOLS, write) for tool in self._tools or ()]
        return messages, tools or None
