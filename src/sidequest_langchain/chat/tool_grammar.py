"""Grammars of answers that must call tools, or have a form.

It must not know how text is held to a grammar, nor messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sidequest_langchain.chat.forms import AnswerForm
from sidequest_langchain.chat.reasoning import Thinking
from sidequest_langchain.chat.shapes import closed
from sidequest_langchain.chat.tool_syntax import Syntax
from sidequest_langchain.chat.tools import Described, name_of, schema_of
from sidequest_langchain.engine.grammar import (
    Choice,
    FreeText,
    Grammar,
    OneOf,
    Pattern,
    Repeat,
    Schema,
    Text,
    Then,
)


def calls_of(syntax: Syntax, tools: Sequence[Described], *, n_most: int | None) -> Grammar:
    """Calls of `tools`: at least one, `n_most` at most, each with arguments of its schema.

    Args:
        syntax: One with JSON in it.
        tools: At least one. An argument that a schema does not name is not given, unless the
            schema says `additionalProperties`.
        n_most: `None` is as many as the model likes.
    """
    calls = tuple(_call(syntax, tool) for tool in tools)
    one = calls[0] if len(calls) == 1 else OneOf(calls)
    if n_most == 1:
        return one
    return Repeat(one, at_least=1, at_most=n_most, separator=syntax.separator)


def of_form(form: AnswerForm) -> Grammar:
    """Text of a form."""
    if form.kind == "schema":
        return Schema(form.options[0])
    if form.kind == "regex":
        return Pattern(form.options[0])
    return Choice(form.options)


def after_thought(grammar: Grammar, thinking: Thinking | None, *, lead: str) -> Grammar:
    """`grammar` behind what an answer begins with.

    Args:
        grammar: The answer.
        thinking: The tags of a thought that the prompt has opened, which must be closed first.
        lead: What the template prints before an answer without a thought.
    """
    if thinking is not None:
        closing = f"{thinking.closing}\n\n"
        return Then((FreeText(before=(thinking.closing,)), Text(closing), grammar))
    return Then((Text(lead), grammar)) if lead else grammar


def _call(syntax: Syntax, tool: Described) -> Grammar:
    name = json.dumps(name_of(tool), ensure_ascii=False)[1:-1]
    parts = (
        Text(syntax.before),
        Text(name, is_spelled=True),
        Text(syntax.between),
        Schema.of(closed(dict(schema_of(tool)))),
        *((Text(syntax.after),) if syntax.after else ()),
    )
    return Then(parts)
