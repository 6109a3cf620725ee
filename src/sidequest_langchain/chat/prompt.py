"""Messages to the token ids that are fed: the template, replies of ours, control text.

It must not know how text is generated, nor the engine beyond the replies it remembers.

    messages -> turns -> rendered text -> parts -> ids
                                          template and messages   encoded
                                          replies of ours         the ids that were generated
                                          control text in them    encoded as plain text
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_core.messages import BaseMessage

from sidequest_langchain.chat.encoder import SectionEncoder
from sidequest_langchain.chat.fitting import fitted
from sidequest_langchain.chat.marks import Span
from sidequest_langchain.chat.messages import Piece, Turn, turns_of
from sidequest_langchain.chat.rendering import Rendering
from sidequest_langchain.chat.template import Traits, probe
from sidequest_langchain.engine.replies import Reply
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import MessageError, TemplateError

ControlTokens: TypeAlias = Literal["text", "parse"]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
_MOST_HEADS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is fed for a list of messages."""

    ids: tuple[int, ...]
    superseded: tuple[str, ...] = ()
    """Calls whose replies this prompt holds in another rendering than when they were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A reply of ours that the conversation holds, and where the rendered text has it."""

    turn: Turn
    call_id: str
    reply: Reply
    span: Span | None
    """`None` if the template changed it."""


class PromptAssembler:
    """Makes prompts for one tokenizer with its template. Safe to use from many threads."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        find_reply: Callable[[str], Reply | None],
        name: str = "",
        control_tokens: ControlTokens = "text",
    ) -> None:
        """Make an assembler.

        Args:
            tokenizer: Renders and encodes.
            find_reply: The reply of a call, if it is remembered.
            name: The model's, for messages to the user.
            control_tokens: Whether control tokens spelled out in messages are plain `"text"`, or
                become structure (`"parse"`).
        """
        self._tokenizer = tokenizer
        self._find_reply = find_reply
        self._name = name or tokenizer.name
        self._is_control_text_plain = control_tokens == "text"
        self._encoder = SectionEncoder(tokenizer)
        self._traits: dict[bool, Traits] = {}
        self._heads: dict[str, tuple[Reply, str]] = {}

    def assemble(self, messages: Sequence[BaseMessage], tools: Tools | None = None) -> Prompt:
        """The prompt for `messages`. It opens the assistant's turn at its end.

        If the last message is an AI message, its turn is left open instead: the model continues
        it.

        Args:
            messages: The conversation.
            tools: OpenAI-style descriptions of tools, for the template.

        Raises:
            MessageError: A message has no text form, or there is nothing to answer.
            TemplateError: There is no template, or it refuses these messages.
        """
        traits = self._traits_for(bool(tools))
        turns = turns_of(messages)
        if turns[-1].tool_calls:
            msg = (
                "the last message calls tools and no message answers; run the tools and add "
                "their ToolMessages"
            )
            raise MessageError(msg)
        rendering = Rendering(
            self._tokenizer,
            traits,
            fitted(turns, traits),
            tools,
            is_control_text_plain=self._is_control_text_plain,
        )
        known = self._known_replies(rendering)
        ids = tuple(self._encoded(rendering, known))
        if not ids:
            msg = "the messages render to no token at all; give a message with text"
            raise MessageError(msg)
        return Prompt(ids=ids, superseded=tuple(_superseded(rendering, known)))

    def _traits_for(self, has_tools: bool) -> Traits:  # noqa: FBT001
        if not self._tokenizer.has_template:
            msg = (
                f"the model {self._name!r} has no chat template (a base model?); pass "
                "chat_template=... with the format it was trained on, or use an instruct model"
            )
            raise TemplateError(msg)
        if has_tools not in self._traits:
            self._traits[has_tools] = probe(self._tokenizer, has_tools=has_tools)
        return self._traits[has_tools]

    def _known_replies(self, rendering: Rendering) -> list[_Known]:
        found: list[tuple[Turn, Piece, Reply]] = []
        for turn in rendering.turns:
            for piece in turn.pieces:
                reply = self._find_reply(piece.call_id) if piece.call_id and piece.text else None
                # An edited copy of a message keeps its id: the text decides.
                if reply is not None and reply.text == piece.text:
                    found.append((turn, piece, reply))
        spans = rendering.spans([(turn, piece) for turn, piece, _ in found]) if found else []
        return [
            _Known(turn=turn, call_id=str(piece.call_id), reply=reply, span=span)
            for (turn, piece, reply), span in zip(found, spans or [], strict=False)
        ]

    def _encoded(self, rendering: Rendering, known: Sequence[_Known]) -> list[int]:
        """The ids of the rendered text, with the generated ids in place of known replies."""
        text, at, rest = rendering.text, 0, ""
        ids: list[int] = []
        for one in known:
            head = self._head_of(one)
            if one.span is None or one.span.start < at or not head:
                continue
            self._encode(ids, rendering, rest + text[at : one.span.start])
            ids += one.reply.token_ids
            # A stop string may have cut a token in two: what of it is text follows as text.
            rest = rendering.write(one.turn, Piece(one.reply.text[len(head) :]))
            at = one.span.end
        self._encode(ids, rendering, rest + text[at:])
        return ids

    def _encode(self, ids: list[int], rendering: Rendering, text: str) -> None:
        """Append the ids of a part of the rendered text."""
        for part, is_control in rendering.cut(text):
            if is_control:
                ids += self._tokenizer.encode(part, control_tokens=False, follows_text=bool(ids))
            else:
                ids += self._encoder.encode(part, follows_text=bool(ids))

    def _head_of(self, known: _Known) -> str:
        """The head of a reply that its ids decode to; `''` if they decode to something else."""
        reply, seen = self._heads.get(known.call_id, (None, ""))
        if reply is not known.reply:
            seen = self._tokenizer.decode(known.reply.token_ids)
            seen = seen if known.reply.text.startswith(seen) else ""
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            self._heads[known.call_id] = (known.reply, seen)
        return seen


def _superseded(rendering: Rendering, known: Sequence[_Known]) -> Iterator[str]:
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
        if is_stale:
            yield one.call_id
