"""Messages to the token ids that are fed: template, known replies, control text.

It must not know the engine's state beyond the replies it remembers, nor how text is generated.

    messages -> turns -> rendered text -> parts -> ids
                                          template and messages: encoded
                                          replies of ours:       the ids that were generated
                                          control text in them:  encoded as plain text
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_core.messages import BaseMessage

from sidequest_langchain.chat.encoder import SectionEncoder
from sidequest_langchain.chat.fitting import fitted
from sidequest_langchain.chat.marks import Pen, Span
from sidequest_langchain.chat.messages import Piece, Turn, turns_of
from sidequest_langchain.chat.template import Traits, Write, message_of, probe, strings_in
from sidequest_langchain.engine.replies import Reply
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import MessageError, TemplateError

ControlTokens: TypeAlias = Literal["text", "parse"]
Tools: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is fed for a list of messages."""

    ids: tuple[int, ...]
    superseded: tuple[str, ...] = ()
    """Calls whose replies this prompt holds in another rendering than when they were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A piece of a turn that is a reply of ours, and where the rendered text has it."""

    call_id: str
    reply: Reply
    span: Span | None


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
            find_reply: The reply with a call id, if it is remembered.
            name: The model's, for messages to the user.
            control_tokens: Whether control tokens spelled out in messages are plain `"text"`, or
                become structure (`"parse"`).
        """
        self._tokenizer = tokenizer
        self._find_reply = find_reply
        self._name = name or tokenizer.name
        self._has_plain_text = control_tokens == "text"
        self._encoder = SectionEncoder(tokenizer)
        self._traits: dict[bool, Traits] = {}

    def assemble(self, messages: Sequence[BaseMessage], tools: Tools | None = None) -> Prompt:
        """The prompt for `messages`; it opens the assistant's turn.

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
        turns = fitted(turns_of(messages), traits)
        if turns[-1].tool_calls:
            msg = (
                "the last message calls tools and nothing answers; run the tools and add their "
                "ToolMessages"
            )
            raise MessageError(msg)
        rendering = _Rendering(self._tokenizer, turns, tools, traits, is_plain=self._has_plain_text)
        known = self._known_replies(rendering)
        ids = list(self._encoded(rendering, known))
        if not ids:
            msg = "messages render to no token at all; give a message with text"
            raise MessageError(msg)
        return Prompt(ids=tuple(ids), superseded=_superseded(rendering, known))

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

    def _known_replies(self, rendering: _Rendering) -> list[_Known]:
        found = []
        for turn in rendering.turns:
            for piece in turn.pieces:
                reply = self._find_reply(piece.call_id) if piece.call_id else None
                # An edited copy keeps the id, so the text decides.
                if reply is not None and piece.text and reply.text == piece.text:
                    found.append((turn, piece, reply))
        spans = rendering.spans([(turn, piece) for turn, piece, _ in found])
        return [
            _Known(call_id=str(piece.call_id), reply=reply, span=span)
            for (_, piece, reply), span in zip(found, spans, strict=True)
        ]

    def _encoded(self, rendering: _Rendering, known: list[_Known]) -> Iterator[int]:
        at, rest, is_first = 0, "", True
        for one in known:
            if one.span is None or one.span.start < at:
                continue
            head = self._tokenizer.decode(one.reply.token_ids)
            if not head or not one.reply.text.startswith(head):
                continue
            for ids in self._pieces(rendering, rest, at, one.span.start, is_first=is_first):
                is_first = False
                yield from ids
            yield from one.reply.token_ids
            # A stop string may have cut inside of a token: the rest of the text is encoded.
            at, rest, is_first = one.span.end, one.reply.text[len(head) :], False
        for ids in self._pieces(rendering, rest, at, len(rendering.text), is_first=is_first):
            yield from ids

    def _pieces(
        self, rendering: _Rendering, rest: str, start: int, end: int, *, is_first: bool
    ) -> Iterator[list[int]]:
        for text, is_control in rendering.cut(rest + rendering.text[start:end]):
            if is_control:
                yield self._tokenizer.encode(text, control_tokens=False, follows_text=not is_first)
            else:
                yield self._encoder.encode(text, follows_text=not is_first)
            is_first = False
