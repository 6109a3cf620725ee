"""The form a call wants its answer in: a JSON schema, a regular expression or a choice.

It must not know how text is kept to a form, nor that tools may be called instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sidequest_langchain.chat.shapes import closed, without_titles
from sidequest_langchain.errors import RequestError

_FORMATS = "{'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}"  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What the whole text of an answer must be."""

    kind: Literal["schema", "regex", "choice"]
    options: tuple[str, ...]
    """One JSON schema, as text; one regular expression; or the strings to choose from."""
    shown: str = ""
    """A JSON schema as the model is shown it."""

    def told(self, *, may_call: bool) -> str | None:
        """The form in words; `None`: the question itself must say it.

        Args:
            may_call: Whether an answer may be tool calls instead.
        """
        if not self.shown:
            return None
        lead = "Unless you call a tool, respond" if may_call else "Respond"
        return f"{lead} only with a JSON object that matches this JSON schema:\n{self.shown}"


def form_of(given: Mapping[str, Any]) -> AnswerForm | None:
    """The form that the arguments `response_format`, `regex` and `choice` of a call ask for.

    Raises:
        RequestError: One of them has no meaning, or several are given.
    """
    forms = {
        "response_format": _of_format(given.get("response_format")),
        "regex": _of_regex(given.get("regex")),
        "choice": _of_choice(given.get("choice")),
    }
    asked = {name: form for name, form in forms.items() if form is not None}
    if len(asked) > 1:
        msg = f"an answer has one form, but {' and '.join(asked)} are given; give one of them"
        raise RequestError(msg)
    return next(iter(asked.values()), None)


def _of_format(given: Any) -> AnswerForm | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerForm(kind="schema", options=('{"type": "object"}',))
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if isinstance(schema, Mapping | bool):
            try:
                # Keys keep their order: it is the order in which an answer gives its properties.
                kept, shown = closed(schema), without_titles(schema)
                return AnswerForm(
                    kind="schema",
                    options=(json.dumps(kept, ensure_ascii=False),),
                    shown=json.dumps(shown, ensure_ascii=False) if shown else "",
                )
            except (TypeError, ValueError) as error:
                msg = f"the schema of response_format is no JSON: {error}"
                raise RequestError(msg) from error
    msg = f"response_format must be {_FORMATS}, found {given!r}"
    raise RequestError(msg)


def _of_regex(given: Any) -> AnswerForm | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        msg = f"regex must be a regular expression, found {given!r}"
        raise RequestError(msg)
    return AnswerForm(kind="regex", options=(given,))


def _of_choice(given: Any) -> AnswerForm | None:
    if given is None:
        return None
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(isinstance(one, str) and one for one in given):
        msg = f"choice must be a list of strings that are not empty, found {given!r}"
        raise RequestError(msg)
    return AnswerForm(kind="choice", options=tuple(dict.fromkeys(given)))
