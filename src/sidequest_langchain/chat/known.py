"""Replies of ours that a conversation holds, and where its rendering has them as they were made.

A reply that is nothing but text is found by its marks. One that thinks or calls tools is taken
apart in its message, and the template puts it together again: it is found where it was made, if
the rendering is still the same up to there. It must not know LangChain's messages.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sidequest_langchain.chat.dialect import Dialect
from sidequest_langchain.chat.marks import Span
from sidequest_langchain.chat.messages import Piece, Turn
from sidequest_langchain.chat.rendering import Rendering
from sidequest_langchain.engine.detokenizer import decoded
from sidequest_langchain.engine.replies import Reply
from sidequest_langchain.engine.tokenizer import ChatTokenizer

_MOST = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A reply of ours that the conversation holds."""

    turn: Turn
    call_id: str
    reply: Reply
    span: Span | None
    """Where the rendered text has it; `None` if the template changed it."""
    head: str
    """The head of the reply that its ids decode to; `''` if they decode to something else."""
    is_in_place: bool = False
    """Whether the rendering is the same up to it as when it was made."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The rendered prompt of a reply: how long it was, and a digest of it.

    And the same of it without what opens the assistant's turn, which a template may drop later.
    """

    n_chars: int
    digest: bytes
    n_before: int
    digest_before: bytes


class ReplyFinder:
    """Finds replies for one tokenizer with its template. Safe to use from many threads."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        find_reply: Callable[[str], Reply | None],
        dialect: Callable[[], Dialect],
    ) -> None:
        self._tokenizer = tokenizer
        self._find_reply = find_reply
        self._dialect = dialect
        self._heads: dict[str, tuple[Reply, str]] = {}
        self._places: OrderedDict[str, tuple[_Place, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, call_id: str, prompt: str, opening: str) -> None:
        """Note what was rendered for a call that is about to be made.

        Where a call has two renderings (one with results of tools that are cleared), both count.
        """
        before = prompt.removesuffix(opening)
        place = _Place(len(prompt), _digest(prompt), len(before), _digest(before))
        with self._lock:
            self._places[call_id] = (*self._places.get(call_id, ()), place)
            while len(self._places) > _MOST:
                self._places.popitem(last=False)

    def known_in(self, rendering: Rendering) -> list[Known]:
        """The replies that `rendering` may hold, in order."""
        found = [
            (turn, piece, reply)
            for turn in rendering.turns
            for piece in turn.pieces
            for reply in [self._find_reply(piece.call_id) if piece.call_id else None]
            if reply is not None and reply.text
        ]
        # An edited copy of a message keeps its id: the text decides.
        said = [one for one in found if one[2].text == one[1].text]
        can_be_told = {id(one[1]) for one in said}  # by marks, if the template leaves them alone
        spans = rendering.spans([(turn, piece) for turn, piece, _ in said]) if said else []
        by_piece = {id(one[1]): span for one, span in zip(said, spans or [], strict=False)}
        known: list[Known] = []
        at = 0
        for one in found:
            if id(one[1]) in by_piece:
                new: Known | None = self._of_text(one, by_piece[id(one[1])])
            else:
                new = self._in_place(rendering, one, None if id(one[1]) in can_be_told else at)
                if new is None and any(other.span is None for other in known):
                    new = self._behind_stale(one)
            if new is not None:
                known.append(new)
                at = new.span.end if new.span is not None else at
        return known

    def superseded(self, rendering: Rendering, known: Sequence[Known]) -> Iterator[str]:
        """Replies from the first one on that is not rendered as it was when it was made.

        Changed, or behind another opening of the assistant's turn (a think block that is dropped
        later). What was computed after such a reply began with its old rendering, too.
        """
        is_stale = False
        text, opening = rendering.text, rendering.traits.opening
        for one in known:
            is_stale = is_stale or one.span is None
            if one.span is not None and not text.endswith(opening, 0, one.span.start):
                is_stale = True
            if is_stale and not one.is_in_place:
                yield one.call_id

    def _of_text(self, found: tuple[Turn, Piece, Reply], span: Span | None) -> Known:
        turn, piece, reply = found
        call_id = str(piece.call_id)
        return Known(
            turn=turn, call_id=call_id, reply=reply, span=span, head=self._head_of(call_id, reply)
        )

    def _in_place(
        self, rendering: Rendering, found: tuple[Turn, Piece, Reply], at: int | None
    ) -> Known | None:
        """A reply that is rendered right behind its own prompt; `None` if nothing can be told.

        If its prompt is not known (a thread that came back from a disk), it is the first one from
        `at` on that stands at the beginning of an assistant's turn; `None`: it is not looked for.
        """
        turn, piece, reply = found
        if not turn.tool_calls and not reply.text.rstrip().endswith(piece.text.rstrip()):
            return None  # edited: what was said may only be how it begins
        call_id, text = str(piece.call_id), rendering.text
        places = self._places.get(call_id, ())
        for place in places:
            is_here = text.startswith(reply.text, place.n_chars)
            if is_here and _digest(text[: place.n_chars]) == place.digest:
                span = Span(place.n_chars, place.n_chars + len(reply.text))
                return replace(self._of_text(found, span), is_in_place=True)
        if not self._dialect().is_reading_of(reply.text, turn):
            return None
        if any(_digest(text[: place.n_before]) == place.digest_before for place in places):
            return self._of_text(found, None)
        opening = rendering.traits.opening
        start = text.find(opening + reply.text, at) if opening and at is not None else -1
        if start < 0:
            return None
        start += len(opening)
        return self._of_text(found, Span(start, start + len(reply.text)))

    def _behind_stale(self, found: tuple[Turn, Piece, Reply]) -> Known | None:
        """A reply that was made behind another one which is rendered otherwise now.

        Its prompt is another one than then, too, so that its place tells nothing.
        """
        turn, piece, reply = found
        is_ours = reply.text != piece.text and self._dialect().is_reading_of(reply.text, turn)
        return self._of_text(found, None) if is_ours else None

    def _head_of(self, call_id: str, reply: Reply) -> str:
        known, seen = self._heads.get(call_id, (None, ""))
        if known is not reply:
            ways = (self._dialect().shown, frozenset[int]())
            heads = (decoded(self._tokenizer, reply.token_ids, shown) for shown in ways)
            seen = next((head for head in heads if reply.text.startswith(head)), "")
            if len(self._heads) >= _MOST:
                self._heads.clear()
            self._heads[call_id] = (reply, seen)
        return seen


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
