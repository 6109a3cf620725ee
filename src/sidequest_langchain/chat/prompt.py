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

from sidequest_langchain.chat.dialect import Dialect, dialect_of
from sidequest_langchain.chat.encoder import SectionEncoder
from sidequest_langchain.chat.fitting import fitted, with_form_told, with_tools_told
from sidequest_langchain.chat.kind_map import KindMap
from sidequest_langchain.chat.known import Known, ReplyFinder
from sidequest_langchain.chat.messages import Piece, turns_of
from sidequest_langchain.chat.rendering import Rendering
from sidequest_langchain.chat.template import Traits, probe
from sidequest_langchain.engine.replies import Reply
from sidequest_langchain.engine.request import ToolResultSpan
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
    text: str = ""
    """What was rendered, with marks."""
    opened: str = ""
    """What of it is the beginning of the assistant's turn."""
    kinds: bytes = b""
    """A `TokenKind` for each of `ids`; empty if it was not asked for."""
    tool_results: tuple[ToolResultSpan, ...] = ()
    """Where the results of tools stand in `ids`, in order; none if kinds were not asked for."""


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
        self._name = name or tokenizer.name
        self._is_control_text_plain = control_tokens == "text"
        self._encoder = SectionEncoder(tokenizer)
        self._traits: dict[bool, Traits] = {}
        self._dialect: Dialect | None = None
        self._replies = ReplyFinder(tokenizer, find_reply, lambda: self.dialect)

    @property
    def dialect(self) -> Dialect:
        """How the model thinks and calls tools, as its template shows.

        Raises:
            TemplateError: There is no template, or it fails on a single user message.
        """
        if self._dialect is None:
            self._dialect = dialect_of(self._tokenizer, self._traits_for(has_tools=True))
        return self._dialect

    def remember(self, call_id: str, prompt: Prompt) -> None:
        """Note that `prompt` is fed for a call, so that its reply is found again later."""
        self._replies.remember(call_id, prompt.text, prompt.opened)

    def assemble(
        self,
        messages: Sequence[BaseMessage],
        tools: Tools | None = None,
        *,
        with_kinds: bool = False,
        marked: Sequence[str] = (),
        told: str | None = None,
    ) -> Prompt:
        """The prompt for `messages`. It opens the assistant's turn at its end.

        If the last message is an AI message, its turn is left open instead: the model continues
        it.

        Args:
            messages: The conversation.
            tools: OpenAI-style descriptions of tools, for the template.
            with_kinds: Whether to tell what each token is. The ids are the same; it costs one
                more rendering, and a second encoding of text that is new.
            marked: Strings whose every occurrence is of the kind `MARKED`, as they are rendered.
            told: Words on the form of the answer, to stand behind the last question.

        Raises:
            MessageError: A message has no text form, or there is nothing to answer.
            TemplateError: There is no template, or it refuses these messages.
        """
        traits = self._traits_for(has_tools=bool(tools))
        turns = turns_of(messages)
        if tools and not traits.has_tools:
            turns, tools = with_tools_told(turns, tools), None
            traits = self._traits_for(has_tools=False)
        if told:
            turns = with_form_told(turns, told)
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
        known = self._replies.known_in(rendering)
        ids, ends = self._encoded(rendering, known, with_ends=with_kinds)
        if not ids:
            msg = "the messages render to no token at all; give a message with text"
            raise MessageError(msg)
        superseded = tuple(self._replies.superseded(rendering, known))
        text, opened = rendering.text, traits.opening
        if not text.endswith(opened):
            opened = turns[-1].text
        if not with_kinds:
            return Prompt(ids=tuple(ids), superseded=superseded, text=text, opened=opened)
        kind_map = KindMap(rendering, self._tokenizer.special_tokens, marked)
        return Prompt(
            ids=tuple(ids),
            superseded=superseded,
            text=text,
            opened=opened,
            kinds=kind_map.of_tokens(ends),
            tool_results=tuple(
                ToolResultSpan(
                    first=first, last=last, tool_call_id=source.tool_call_id, name=source.name
                )
                for first, last, source in kind_map.results_in(ends)
            ),
        )

    def _traits_for(self, *, has_tools: bool) -> Traits:
        if not self._tokenizer.has_template:
            msg = (
                f"the model {self._name!r} has no chat template (a base model?); pass "
                "chat_template=... with the format it was trained on, or use an instruct model"
            )
            raise TemplateError(msg)
        if has_tools not in self._traits:
            self._traits[has_tools] = probe(self._tokenizer, has_tools=has_tools)
        return self._traits[has_tools]

    def _encoded(
        self, rendering: Rendering, known: Sequence[Known], *, with_ends: bool
    ) -> tuple[list[int], list[int]]:
        """The ids of the rendered text, with the generated ids in place of known replies.

        And where each of them ends in the rendered text, if that is asked for.
        """
        text, at, rest = rendering.text, 0, ""
        ids: list[int] = []
        ends: list[int] = []
        for one in known:
            if one.span is None or one.span.start < at or not one.head:
                continue
            before = rest + text[at : one.span.start]
            if with_ends:
                ends += self._ends(rendering, before, at - len(rest), follows_text=bool(ids))
                said = text[one.span.start : one.span.end]
                within = self._tokenizer.spelled_ends(said, one.reply.token_ids)
                ends += [one.span.start + end for end in within]
            self._encode(ids, rendering, before)
            ids += one.reply.token_ids
            # A stop string may have cut a token in two: what of it is text follows as text.
            rest = rendering.write(one.turn, Piece(one.reply.text[len(one.head) :]))
            at = one.span.end
        if with_ends:
            before = rest + text[at:]
            ends += self._ends(rendering, before, at - len(rest), follows_text=bool(ids))
        self._encode(ids, rendering, rest + text[at:])
        return ids, ends

    def _encode(self, ids: list[int], rendering: Rendering, text: str) -> None:
        """Append the ids of a part of the rendered text."""
        for part, is_control in rendering.cut(text):
            if is_control:
                ids += self._tokenizer.encode(part, control_tokens=False, follows_text=bool(ids))
            else:
                ids += self._encoder.encode(part, follows_text=bool(ids))

    def _ends(
        self, rendering: Rendering, text: str, start: int, *, follows_text: bool
    ) -> Iterator[int]:
        """Where each token that `_encode` makes of `text` ends, if the text stands at `start`."""
        for offset, part, is_control in rendering.cut_at(text):
            if is_control:
                ids = self._tokenizer.encode(part, control_tokens=False, follows_text=follows_text)
                within: Sequence[int] = [len(part)] * len(ids)
            else:
                within = self._encoder.ends(part, follows_text=follows_text)
            follows_text = follows_text or bool(within)
            yield from (start + offset + end for end in within)
