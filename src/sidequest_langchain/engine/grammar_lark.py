"""Writes a grammar in the Lark dialect that llguidance reads.

It must not know tokenizers beyond the names of their special tokens, nor matching.

That library cuts a text into lexemes, each as long as it can be, and never takes a cut back:
free text before "<tool_call>" would swallow its first letters and then be stuck. So whatever is
regular and stands in a row becomes one lexeme, and what may end in several places is joined with
what comes after it, alternative by alternative:

    FreeText  OneOf("<a>" json, "<b>" json)   ->   FREE"<a>" json | FREE"<b>" json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from llguidance import regex_to_lark

from sidequest_langchain.engine.grammar_parts import (
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
from sidequest_langchain.engine.grammar_schema import json_rule
from sidequest_langchain.errors import GrammarError

PartsT = TypeVar("PartsT", bound=Choice | OneOf)

_ANY = "/(?s:.*)/"
_NOTHING = '""'


@dataclass(frozen=True, slots=True)
class _Token:
    """One special token."""

    token_id: int


_Part: TypeAlias = Grammar | _Token


def lark_of(grammar: Grammar, special: Mapping[str, int], *, first: str = "") -> str:
    """The Lark text of a grammar; `start` is its first rule.

    Args:
        grammar: What the text shall look like.
        special: The special tokens by their texts.
        first: Comes before everything.

    Raises:
        GrammarError: It cannot be said.
    """
    return _Writer(special).write(Then((Text(first), grammar)))


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        names = sorted((name for name in special if name), key=len, reverse=True)
        self._special = special
        self._cut = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._names: dict[str, str] = {}
        """Names of rules and terminals, by what they stand for."""

    def write(self, grammar: Grammar) -> str:
        start = self._sequence(self._flat(grammar))
        rules = [f"{name}: {body}" for body, name in self._names.items()]
        return "\n".join([f"start: {start}", *rules])

    # -- parts in a row ------------------------------------------------------------------

    def _flat(self, part: _Part) -> list[_Part]:
        """A part as a row of parts, none of them a `Then`, each special token on its own."""
        if isinstance(part, Then):
            return [piece for each in part.parts for piece in self._flat(each)]
        if isinstance(part, Text) and not part.is_spelled:
            return self._pieces(part.text)
        return [part]

    def _pieces(self, text: str) -> list[_Part]:
        cut = self._cut
        found = [text] if cut is None else cut.split(text)
        return [
            _Token(self._special[piece]) if is_special else Text(piece)
            for piece, is_special in zip(found, [False, True] * len(found), strict=False)
            if piece
        ]

    def _sequence(self, parts: Sequence[_Part]) -> str:
        """The expression of parts in a row."""
        n_run = next((i for i, p in enumerate(parts) if not self._is_regular(p)), len(parts))
        run, after = list(parts[:n_run]), parts[n_run:]
        head = [self._terminal(run)] if run else []
        if not after:
            return head[0] if head else _NOTHING
        part, rest = after[0], after[1:]
        if any(_is_open(each) for each in run):
            self._check_end(run, part)
            if isinstance(part, OneOf):
                return self._any_of([[*run, each, *rest] for each in _checked(part).parts])
            if isinstance(part, Repeat):
                return self._unrolled(run, _bounded(part), rest)
        if isinstance(part, OneOf) and rest and self._ends_free(part):
            whole = self._any_of([[each, *rest] for each in part.parts])
            return " ".join([*head, whole])
        tail = [self._sequence(rest)] if rest else []
        return " ".join([*head, self._single(part), *tail])

    def _any_of(self, rows: Sequence[Sequence[_Part]]) -> str:
        flat = [[piece for part in row for piece in self._flat(part)] for row in rows]
        return f"( {' | '.join(map(self._sequence, flat))} )"

    def _unrolled(self, run: list[_Part], repeat: Repeat, rest: Sequence[_Part]) -> str:
        """A run joined with the first turn of a repeat, or with what follows it."""
        least, most = repeat.at_least, repeat.at_most
        rows: list[list[_Part]] = []
        if most != 0:
            again = Repeat(
                Then((Text(repeat.separator), repeat.part)),
                max(least - 1, 0),
                None if most is None else most - 1,
            )
            rows.append([*run, repeat.part, *([] if most == 1 else [again]), *rest])
        if least == 0:
            rows.append([*run, *rest])
        return self._any_of(rows)

    def _single(self, part: _Part) -> str:
        """The expression of one part that is not regular."""
        if isinstance(part, _Token):
            return f"<[{part.token_id}]>"
        if isinstance(part, Schema):
            return self._named(json_rule(part.schema), "json")
        if isinstance(part, OneOf):
            return self._any_of([[each] for each in _checked(part).parts])
        assert isinstance(part, Repeat)
        _bounded(part)
        if part.at_most != 1 and self._ends_free(part):
            msg = (
                "free text at the end of a repeated part would run on into the next one; put it "
                "at the part's beginning"
            )
            raise GrammarError(msg)
        one = self._named(self._sequence(self._flat(part.part)), "part")
        separator = self._sequence(self._pieces(part.separator)) if part.separator else ""
        return _repeated(one, separator, part)

    # -- what is regular: one lexeme -----------------------------------------------------

    def _is_regular(self, part: _Part) -> bool:
        if isinstance(part, (Then, OneOf)):
            return all(map(self._is_regular, part.parts))
        if isinstance(part, Repeat):
            return self._is_regular(part.part) and self._is_plain(part.separator)
        if isinstance(part, Text):
            return part.is_spelled or self._is_plain(part.text)
        return isinstance(part, (Choice, Pattern, FreeText))

    def _is_plain(self, text: str) -> bool:
        return self._cut is None or self._cut.search(text) is None

    def _terminal(self, run: Sequence[_Part]) -> str:
        return self._named(" ".join(map(self._regular, run)), "TEXT")

    def _regular(self, part: _Part) -> str:
        if isinstance(part, Text):
            return json.dumps(part.text)
        if isinstance(part, Pattern):
            return f"({_regex(part.regex)})"
        if isinstance(part, FreeText):
            return self._free(part)
        if isinstance(part, Then):
            return f"({' '.join(map(self._regular, part.parts)) or _NOTHING})"
        if isinstance(part, Choice):
            return f"({' | '.join(map(json.dumps, _checked(part).options))})"
        if isinstance(part, OneOf):
            return f"({' | '.join(map(self._regular, _checked(part).parts))})"
        assert isinstance(part, Repeat)
        one = f"({self._regular(_bounded(part).part)})"
        return f"({_repeated(one, json.dumps(part.separator) if part.separator else '', part)})"

    def _free(self, part: FreeText) -> str:
        """Any text without those that it must stop before; a special token is never in it."""
        if "" in part.before:
            msg = "free text cannot end before an empty text; leave it out of `before`"
            raise GrammarError(msg)
        if not part.before:
            return _ANY
        ends = " | ".join(map(json.dumps, part.before))
        holding = self._named(f"{_ANY} ({ends}) {_ANY}", "HOLDING")
        return self._named(f"{_ANY} & ~{holding}", "FREE")

    def _named(self, body: str, kind: str) -> str:
        return self._names.setdefault(body, f"{kind}{len(self._names)}")

    # -- free text and what follows it ---------------------------------------------------

    def _check_end(self, run: Sequence[_Part], after: _Part) -> None:
        """Free text must be seen to end where it does.

        Raises:
            GrammarError: What follows could belong to the free text as well.
        """
        at = next((i for i in reversed(range(len(run))) if isinstance(run[i], FreeText)), None)
        if at is None:
            return
        free = run[at]
        assert isinstance(free, FreeText)
        follows = [*run[at + 1 :], after][0]
        if isinstance(follows, (OneOf, Repeat)) and not self._is_regular(follows):
            return  # joined with it, part by part, and looked at then
        begins: tuple[str, ...] = (follows.text,) if isinstance(follows, Text) else ()
        if isinstance(follows, Choice):
            begins = follows.options
        is_seen = bool(begins) and all(text.startswith(free.before) for text in begins)
        # One letter that the free text cannot hold ends it, whatever it belongs to.
        is_seen = is_seen or (
            isinstance(follows, Schema) and bool(free.before) and max(map(len, free.before)) == 1
        )
        if not (is_seen or isinstance(follows, _Token)):
            msg = (
                f"free text before {list(free.before)} is followed by {follows}, which does not "
                "begin with one of these; say in `before` how what follows begins"
            )
            raise GrammarError(msg)

    def _ends_free(self, part: _Part) -> bool:
        """Whether a part may end with free text that more text could be taken for."""
        if isinstance(part, OneOf):
            return any(map(self._ends_free, part.parts))
        if isinstance(part, Repeat):
            return self._ends_free(part.part)
        if isinstance(part, Then):
            return bool(part.parts) and self._ends_free(part.parts[-1])
        return isinstance(part, FreeText)


def _is_open(part: _Part) -> bool:
    """Whether a regular part may end in several places."""
    return not isinstance(part, Text)


def _repeated(one: str, separator: str, repeat: Repeat) -> str:
    least, most = repeat.at_least, repeat.at_most
    if most == 0:
        return _NOTHING
    if not separator:
        return one + _times(least, most)
    more = _times(max(least - 1, 0), None if most is None else most - 1)
    whole = one if most == 1 else f"{one} ({separator} {one}){more}"
    return whole if least else f"({whole})?"


def _times(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _regex(regex: str) -> str:
    return f"/{regex_to_lark(regex, 'dw')}/" if regex else _NOTHING


def _bounded(repeat: Repeat) -> Repeat:
    least, most = repeat.at_least, repeat.at_most
    if least < 0 or (most is not None and most < least):
        msg = f"a repeat needs 0 <= at_least <= at_most, found {least} and {most}"
        raise GrammarError(msg)
    return repeat


def _checked(part: PartsT) -> PartsT:
    """A part that has alternatives.

    Raises:
        GrammarError: It has none.
    """
    if not (part.options if isinstance(part, Choice) else part.parts):
        msg = f"{type(part).__name__} has nothing to choose from; give at least one alternative"
        raise GrammarError(msg)
    return part
