"""How one model, with its template, thinks, calls tools and keeps to a form.

It must not know messages, nor how text is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sidequest_langchain.chat.messages import Turn
from sidequest_langchain.chat.reasoning import Thinking, thinking_of
from sidequest_langchain.chat.settings import CallSettings
from sidequest_langchain.chat.template import Traits
from sidequest_langchain.chat.tool_grammar import after_thought, calls_of, of_form
from sidequest_langchain.chat.tool_reading import Reading, ReplyReader, arguments_read
from sidequest_langchain.chat.tool_response import ResponseReader
from sidequest_langchain.chat.tool_syntax import PLAIN, Syntax, syntax_of
from sidequest_langchain.chat.tools import Described, name_of
from sidequest_langchain.engine.grammar import Grammar, OneOf
from sidequest_langchain.engine.response_parsing import (
    ResponseStream,
    response_template_of,
    special_ids_of,
)
from sidequest_langchain.engine.tokenizer import ChatTokenizer

N_MOST_IN_UNION = 8
"""Most calls of an answer that is held to be calls or text of a form: small models repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one call is to be answered and read."""

    reading: Reading
    grammar: Grammar | None = None
    """What the answer is held to."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are text of the answer."""
    begin: Callable[[], ResponseStream] | None = None
    """Begins to read an answer as the tokenizer's response template says, if it has one."""

    def reader(self) -> ReplyReader:
        """Reads one answer."""
        if self.begin is not None:
            return ResponseReader(self.reading, self.begin)
        return ReplyReader(self.reading)

    @property
    def is_plain(self) -> bool:
        """Whether an answer is text and nothing else."""
        return self.begin is None and self.reading.is_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a model's template tells about its answers."""

    syntax: Syntax
    thinking: Thinking | None
    thinking_ids: frozenset[int]
    call_ids: frozenset[int]
    """Special tokens among the tags of thoughts, and of calls: decoding would skip them."""
    response_template: Any = None
    """What the tokenizer declares of its replies."""

    @property
    def shown(self) -> frozenset[int]:
        """Every special token that may be text of an answer."""
        return self.thinking_ids | self.call_ids

    def is_reading_of(self, text: str, turn: Turn) -> bool:
        """Whether a reply with this text calls what `turn` calls: the turn was not edited."""
        names = frozenset(call.name for call in turn.tool_calls)
        read = arguments_read(
            text, Reading(syntax=self.syntax, thinking=self.thinking, names=names)
        )
        return read == [(call.name, dict(call.arguments)) for call in turn.tool_calls]

    def plan(self, settings: CallSettings, opened: str) -> Plan:
        """How a call with these settings is answered.

        Args:
            settings: The call's.
            opened: What the prompt has of the assistant's turn already.
        """
        thinking = self.thinking
        is_thinking = thinking is not None and thinking.is_open_in(opened)
        tools = settings.tools_told
        forced = _forced(settings)
        # A list of calls in Python cannot be held to JSON schemas: there JSON is forced.
        is_python = self.syntax.style == "python"
        held = replace(PLAIN, lead=self.syntax.lead) if is_python else self.syntax
        grammar: Grammar | None = None
        if forced:
            n_most = None if settings.parallel_tool_calls else 1
            grammar = calls_of(held, forced, n_most=n_most)
        elif settings.form is not None:
            grammar = of_form(settings.form)
            if tools:
                n_most = 1 if settings.parallel_tool_calls is False else N_MOST_IN_UNION
                grammar = OneOf((calls_of(held, tools, n_most=n_most), grammar))
        if grammar is not None:
            opens = thinking if is_thinking else None
            grammar = after_thought(grammar, opens, lead=self.syntax.lead)
        return Plan(
            reading=Reading(
                syntax=(held if grammar is not None else self.syntax) if tools else None,
                thinking=thinking,
                is_thinking=is_thinking,
                names=frozenset(map(name_of, tools)),
                n_most_calls=1 if settings.parallel_tool_calls is False else None,
            ),
            grammar=grammar,
            shown=self.thinking_ids | (self.call_ids if tools else frozenset()),
            begin=None
            if self.response_template is None
            else partial(ResponseStream, self.response_template, opened, tools),
        )


def dialect_of(tokenizer: ChatTokenizer, traits: Traits) -> Dialect:
    """Find a model's dialect out.

    Args:
        tokenizer: Renders with its template.
        traits: Of the template where tools are given.
    """
    thinking = thinking_of(tokenizer)
    syntax = syntax_of(tokenizer, traits, thinking)
    tags = (thinking.opening, thinking.closing) if thinking is not None else ()
    declared = response_template_of(tokenizer)
    return Dialect(
        syntax=syntax,
        thinking=thinking,
        thinking_ids=_special(tokenizer, tags) if declared is None else special_ids_of(tokenizer),
        call_ids=_special(tokenizer, syntax.markers),
        response_template=declared,
    )


def _forced(settings: CallSettings) -> tuple[Described, ...]:
    """The tools one of which must be called."""
    if settings.choosing.mode != "required":
        return ()
    name = settings.choosing.name
    return tuple(tool for tool in settings.tools if name in (None, name_of(tool)))


def _special(tokenizer: ChatTokenizer, texts: tuple[str, ...]) -> frozenset[int]:
    spelled = [tokenizer.encode(text) for text in texts]
    return frozenset(ids[0] for ids in spelled if len(ids) == 1 and tokenizer.is_special(ids[0]))
