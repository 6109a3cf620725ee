r"""How a model writes its calls, found out from how its chat template prints one.

    tagged   <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>   Hermes, Qwen
    mistral  [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
    json     {"name": "add", "parameters": {"a": 1}}                             Llama 3
    python   [add(a=1)]                                                          Llama 4

It must not know replies, nor LangChain's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sidequest_langchain.chat.messages import Piece, ToolCall, Turn
from sidequest_langchain.chat.reasoning import Thinking
from sidequest_langchain.chat.template import PROBE_TOOL, Traits, message_of
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import TemplateError

Style = Literal["tagged", "mistral", "json", "python"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """One way to write calls. A call is `before`, its name, `between`, its arguments, `after`."""

    style: Style
    openings: tuple[str, ...] = ()
    """Texts that begin calls wherever they stand; without any, an answer is calls or text."""
    closing: str = ""
    """Ends what an opening began; `''`: the calls end by themselves."""
    before: str = ""
    between: str = '", "arguments": '
    after: str = "}"
    separator: str = "\n"
    """Between two calls."""
    lead: str = ""
    """What the template prints before any answer that comes without a thought."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that gives calls their structure, where it may be a token of its own."""
        more = ("[ARGS]", "[CALL_ID]") if self.style == "mistral" else ()
        return (*self.openings, *((self.closing,) if self.closing else ()), *more)


HERMES = Syntax(
    style="tagged",
    openings=("<tool_call>",),
    closing="</tool_call>",
    before='<tool_call>\n{"name": "',
    after="}\n</tool_call>",
)
"""What models without a tool template of their own are told to write."""
PLAIN = Syntax(style="json", before='{"name": "')

_NAME, _ID = "sq_probe", "sq000call"
_ARGUMENTS = {"at": "Sq-here"}
_JSON_HEAD = re.compile(r'\{\s*("type":\s*"function",\s*)?("function":\s*\{\s*)?"name":\s*"\Z')
_PYTHON_TAG = "<|python_tag|>"


def syntax_of(tokenizer: ChatTokenizer, traits: Traits, thinking: Thinking | None) -> Syntax:
    """The syntax that a template's model was trained on.

    Args:
        tokenizer: Renders with the template.
        traits: Of the template where tools are given.
        thinking: The tags it thinks between.

    Returns:
        What the template prints, if that is one of the styles known; else what it speaks of, or
        `HERMES`.
    """
    parts = _printed(tokenizer, traits) if traits.has_tool_calls and traits.has_tools else None
    if parts is None:
        return _spoken_of(tokenizer.template_text)
    head, between, after = parts
    lead = _empty_thought(head, thinking)
    found = _classified(head.removeprefix(lead), between, after)
    if found is None:
        return replace(_spoken_of(tokenizer.template_text), lead=lead)
    return replace(found, lead=lead)


def _printed(tokenizer: ChatTokenizer, traits: Traits) -> tuple[str, str, str] | None:
    """What stands before the name, between name and arguments, and after them."""
    user = Turn(role="user", pieces=(Piece("Sq-one"),))
    answer = Turn(role="assistant", pieces=(Piece("Sq-two"),))
    call = ToolCall(name=_NAME, arguments=_ARGUMENTS, call_id=_ID)
    calling = Turn(role="assistant", pieces=(Piece(""),), tool_calls=(call,))

    def rendered(*turns: Turn, is_asking: bool = False) -> str:
        messages: list[dict[str, Any]] = [
            message_of(turn, has_argument_text=traits.has_argument_text) for turn in turns
        ]
        return tokenizer.render(messages, tools=[PROBE_TOOL], add_generation_prompt=is_asking)

    try:
        asked, called = rendered(user, is_asking=True), rendered(user, calling)
        told = rendered(user, answer)
    except TemplateError:
        return None
    if not called.startswith(asked) or _NAME not in called[len(asked) :]:
        return None
    head, rest = called[len(asked) :].split(_NAME, 1)
    between, arguments, after = _split_at_arguments(rest)
    if not arguments:
        return None
    return head, between, after.removesuffix(told.rpartition("Sq-two")[2])


def _split_at_arguments(rest: str) -> tuple[str, str, str]:
    for text in (json.dumps(_ARGUMENTS), json.dumps(_ARGUMENTS, separators=(",", ":"))):
        if text in rest:
            return rest.partition(text)
    found = re.search(r"""at=["']Sq-here["']""", rest)
    return (rest[: found.start()], found.group(), rest[found.end() :]) if found else (rest, "", "")


def _empty_thought(head: str, thinking: Thinking | None) -> str:
    if thinking is None:
        return ""
    tags = f"{re.escape(thinking.opening)}\\s*{re.escape(thinking.closing)}\\s*"
    found = re.match(rf"\s*{tags}", head)
    return found.group() if found else ""


def _classified(head: str, between: str, after: str) -> Syntax | None:
    if "[TOOL_CALLS]" in head:
        is_list = _JSON_HEAD.search(head) is not None
        if not is_list:  # `[TOOL_CALLS]add[ARGS]{"a": 1}`
            whole = {"before": head, "between": between, "after": "", "separator": ""}
        else:
            whole = {"before": head, "between": between, "after": "}]", "separator": ""}
        return Syntax(style="mistral", openings=("[TOOL_CALLS]",), **whole)
    if between == "(":
        return Syntax(style="python", before="[", between="(", after=")]")
    found = _JSON_HEAD.search(head)
    if found is None:
        return None
    n_braces = found.group().count("{")
    opening, closing = head[: found.start()].strip(), _after_braces(after, n_braces).strip()
    if opening and closing:
        return Syntax(
            style="tagged",
            openings=(opening,),
            closing=closing,
            before=head,
            between=between,
            after=after,
        )
    openings = (opening or _PYTHON_TAG,)
    return Syntax(
        style="json", openings=openings, before=head, between=between, after=after, separator="; "
    )


def _after_braces(after: str, n_braces: int) -> str:
    for _ in range(n_braces):
        after = after.lstrip().removeprefix("}")
    return after


def _spoken_of(source: str) -> Syntax:
    """The syntax of a template that prints no calls of its own, by the words in it."""
    if "[TOOL_CALLS]" in source:
        return Syntax(
            style="mistral",
            openings=("[TOOL_CALLS]",),
            before='[TOOL_CALLS] [{"name": "',
            after="}]",
            separator="",
        )
    if _PYTHON_TAG in source and "<tool_call>" not in source:
        return replace(PLAIN, openings=(_PYTHON_TAG,), between='", "parameters": ')
    return HERMES


def listed(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told of its tools, if its template has no place for them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call tools. These are their descriptions, each in a line of its own:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "To call one, answer with its name and its arguments as JSON between tags, like this:\n"
        '<tool_call>\n{"name": "the tool\'s name", "arguments": {"argument": "value"}}\n'
        "</tool_call>\n"
        "The result comes in the next message. If no tool is needed, answer in your own words."
    )
