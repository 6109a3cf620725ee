"""What a grammar lets through is what it describes: by parsers and matchers that are not ours."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.engine.grammars import ARGUMENTS, AUTO, TOKENIZERS, allows, tools, walk

KITS = pytest.mark.parametrize("kit", TOKENIZERS)
NAMES = st.sampled_from(["name", "value", "城市", "a b", 'é"\\', "🚀", "plan"])
VALUES = st.sampled_from(
    [None, True, False, 0, -7, 1.5, "", "Paris", "你好 🚀", 'a"b\\c\n', [], {}, [1, "x"]]
)


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    def bounded(low: int, n: int) -> dict[str, Any]:
        return {"type": kind, "minimum": low, "maximum": low + n}

    return st.builds(bounded, st.integers(-200, 200), st.integers(0, 300))


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    def sized(least: int, n: int) -> dict[str, Any]:
        return {"type": "string", "minLength": least, "maxLength": least + n}

    formats = st.sampled_from(["date", "uuid", "date-time", "ipv4", "no-such-format"])
    patterns = st.sampled_from([r"^[A-Z]{2}\d{3}$", r"^(yes|no|城市)$", r"^\w+@x\.org$"])
    return st.one_of(
        st.builds(sized, st.integers(0, 3), st.integers(0, 4)),
        formats.map(lambda name: {"type": "string", "format": name}),
        patterns.map(lambda regex: {"type": "string", "pattern": regex}),
    )


@st.composite
def _objects(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    additional = draw(st.sampled_from([False, True, {"type": "integer"}]))
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": additional,
    }


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def sized(items: Any, least: int, n: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + n}

    return st.builds(sized, inner, st.integers(0, 2), st.integers(0, 2))


TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.just({"type": ["integer", "null"]}),
    st.just({}),
    _numbers("integer"),
    _numbers("number"),
    _strings(),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=6,
)


def check_json(text: str, schema: Any) -> None:
    """It parses, it is valid, and it is in one line, spaced as `json.dumps` does it."""
    value = json.loads(text)
    jsonschema.validate(
        value, schema, format_checker=jsonschema.FormatChecker(["date", "uuid", "ipv4"])
    )
    assert "\n" not in text
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert " " not in re.sub(r"(?<=[,:]) ", "", outside), "blanks where json.dumps has none"
    assert not re.search(r"[,:](?! )", outside)


@KITS
@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_json_that_comes_out_is_valid(kit: str, schema: Any, seed: int) -> None:
    text = walk(tools(kit), Schema.of(schema), seed)
    if text is not None:
        check_json(text, schema)


@KITS
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_recursive_json_is_valid(kit: str, seed: int) -> None:
    text = walk(tools(kit), Schema.of(TREE), seed)
    assert text is not None
    check_json(text, TREE)


@KITS
@settings(max_examples=50, deadline=None)
@given(
    value=st.recursive(
        VALUES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_json_as_json_dumps_writes_it_may_be_said(kit: str, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    found = tools(kit)
    assert allows(found, Schema("{}"), found.tokenizer.encode(text))


@pytest.mark.parametrize("text", ["{}", "true", '{"title":"x","description":"y"}'])
def test_what_says_nothing_allows_any_json(text: str) -> None:
    kit = tools("byte")
    for said in ("[1, null]", '{"a": {"b": []}}', '"城市"', "-1.5e3", "false"):
        assert allows(kit, Schema(text), kit.tokenizer.encode(said))
    assert not allows(kit, Schema(text), kit.tokenizer.encode("[1,  2]"))
    assert not allows(kit, Schema(text), kit.tokenizer.encode("plan"))


def test_properties_come_in_the_order_of_the_schema() -> None:
    kit = tools("byte")
    one = {"type": "integer", "minimum": 1, "maximum": 1}
    schema = {"properties": {"z": one, "a": one}, "required": ["a", "z"], "type": "object"}
    grammar = Schema.of({**schema, "additionalProperties": False})
    assert walk(kit, grammar, 0) == '{"z": 1, "a": 1}'


PATTERNS = [
    r"[A-Z]{2}-\d{3}",
    r"^\w{1,8}$",
    r"(yes|no|vielleicht)+",
    r"城市|你好{1,3}",
    r"[🚀🛰]{2}",
    r"a/b\\/c|\"x\"",
    r"\d{4}-(0[1-9]|1[0-2])",
    r"",
    r"(?i)plan\.?",
    r"[^<>\s]{1,5}",
]


@KITS
@pytest.mark.parametrize("regex", PATTERNS)
def test_text_matches_its_pattern(kit: str, regex: str) -> None:
    for seed in range(5):
        text = walk(tools(kit), Pattern(regex), seed)
        assert text is not None
        assert re.fullmatch(regex, text, re.ASCII), text


OPTIONS = ("yes", "yes please", "no", "城市", "🚀 to Paris", ' "quoted"\n', "")


@KITS
def test_each_option_of_a_choice_may_be_said_and_nothing_else(kit: str) -> None:
    found = tools(kit)
    for text in OPTIONS:
        assert allows(found, Choice(OPTIONS), said(kit, text)), text
    for text in ("ye", "yes pleas", "yes please!", "城", "city"):
        assert not allows(found, Choice(OPTIONS), said(kit, text)), text
    texts = {walk(found, Choice(OPTIONS), seed, by=0.0) for seed in range(60)}
    assert texts <= set(OPTIONS)
    assert len(texts) > 2


def said(kit: str, text: str) -> list[int]:
    """The tokens of a text as a model says it: with the space that decoding takes off."""
    blank = " " if kit.startswith("metaspace") else ""
    return tools(kit).tokenizer.encode(blank + text, follows_text=True)


ONE = '{"name": "Rome", "value": 7}'
CALLED = f"<tool_call>\n{ONE}\n</tool_call>"


@KITS
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("The plan < a <tool and </tool", True),
        (CALLED, True),
        (f"The plan is: {CALLED}", True),
        (f"Now <tool_{CALLED}\n{CALLED}", True),
        (f"{CALLED}\n{CALLED}\n{CALLED}", False),
        (f"{CALLED}{CALLED}", False),
        (f"{CALLED} and", False),
        ("The plan <tool_call>", False),
        (f"<tool_call>{ONE}</tool_call>", False),
    ],
)
def test_free_text_and_then_calls(kit: str, text: str, is_allowed: bool) -> None:
    assert allows(tools(kit), AUTO, said(kit, text)) == is_allowed


def test_a_tag_that_shows_may_be_spelled_out_and_a_special_one_may_not() -> None:
    for kit, is_allowed in (("byte", True), ("byte-special", False)):
        tokenizer = tools(kit).tokenizer
        tag, rest = tokenizer.encode("<tool_call>"), CALLED.removeprefix("<tool_call>")
        spelled = tokenizer.encode("<tool_call>", control_tokens=False)
        assert len(tag) == 1 < len(spelled)
        assert allows(tools(kit), AUTO, [*tag, *tokenizer.encode(rest)])
        assert allows(tools(kit), AUTO, [*spelled, *tokenizer.encode(rest)]) == is_allowed


def _matches(grammar: Grammar, text: str) -> bool:
    """What `re` says, where a grammar can be written for it."""
    return re.fullmatch(_as_regex(grammar), text, re.DOTALL | re.ASCII) is not None


def _as_regex(grammar: Grammar) -> str:
    match grammar:
        case Text(text):
            return re.escape(text)
        case Pattern(regex):
            return f"(?:{regex})"
        case Choice(options):
            return f"(?:{'|'.join(map(re.escape, options))})"
        case Then(parts):
            return "".join(map(_as_regex, parts))
        case OneOf(parts):
            return f"(?:{'|'.join(map(_as_regex, parts))})"
        case Repeat(part, least, most, separator):
            one, between = _as_regex(part), re.escape(separator)
            turns = [
                between.join([one] * n) for n in range(least, (most if most is not None else 6) + 1)
            ]
            return f"(?:{'|'.join(reversed(turns))})"
        case FreeText(before):
            return f"(?:(?!{'|'.join(map(re.escape, before))}).)*" if before else ".*"
    raise AssertionError(grammar)


WORDS = st.sampled_from(["a", "b", "ab", " the", "城市", "<t>", "\n"])
REGULAR = st.recursive(
    st.one_of(
        WORDS.map(Text),
        st.sampled_from(["[ab]{1,3}", "a?b", r"\d{1,2}"]).map(Pattern),
        st.lists(WORDS, min_size=1, max_size=3).map(lambda words: Choice(tuple(words))),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: Then(tuple(parts))),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: OneOf(tuple(parts))),
        st.builds(
            lambda part, least, n, between: Repeat(part, least, least + n, between),
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
            st.sampled_from(["", ", "]),
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(grammar=REGULAR, seed=st.integers(0, 2**32), kit=st.sampled_from(sorted(TOKENIZERS)))
def test_parts_put_together_mean_what_re_says(grammar: Grammar, seed: int, kit: str) -> None:
    text = walk(tools(kit), grammar, seed, by=0.0)
    assert text is not None
    assert _matches(grammar, text), text


TAIL = OneOf((Then((Text("<t>"), ARGUMENTS)), Then((Text("<u>"), Repeat(ARGUMENTS, 1, 2, ";")))))
JSON_TEXT = r'\{"name": "(?:Paris|Rome|城市)", "value": \d{1,2}\}'
MIXED: list[tuple[Grammar, str, bytes]] = [
    (
        Then((FreeText(("<t>", "<u>")), TAIL)),
        rf".*?(?:<t>{JSON_TEXT}|<u>{JSON_TEXT}(?:;{JSON_TEXT})?)",
        b"<tu>",
    ),
    (Then((Pattern("[a-z ]+"), Text(" end"), ARGUMENTS)), rf"[a-z ]+ end{JSON_TEXT}", b" end{"),
    (
        Repeat(Then((FreeText(("<t>",)), Text("<t>"), ARGUMENTS)), 1, 2),
        rf"(?:.*?<t>{JSON_TEXT}){{1,2}}",
        b"<t>",
    ),
    (
        Then((FreeText(("<t>", "!")), Repeat(Then((Text("<t>"), ARGUMENTS)), 0, 2), Text("!"))),
        rf"(?:[^!]*!|[^!]*?(?:<t>{JSON_TEXT}){{1,2}}!)",
        b"<t>!",
    ),
    (
        Then((OneOf((Then((ARGUMENTS, FreeText(("<t>",)))), Text("x"))), Text("<t>"), ARGUMENTS)),
        rf"(?:{JSON_TEXT}.*?|x)<t>{JSON_TEXT}",
        b"<t>{",
    ),
    (Then((FreeText(("{",)), ARGUMENTS)), rf"[^{{]*{JSON_TEXT}", b"{"),
    (Repeat(ARGUMENTS, 2, 2, "\n"), rf"{JSON_TEXT}\n{JSON_TEXT}", b""),
    (Then((Repeat(ARGUMENTS, 0, 1), Pattern("[0-9]+"))), rf"(?:{JSON_TEXT})?[0-9]+", b""),
]


@KITS
@pytest.mark.parametrize(("grammar", "regex", "letters"), MIXED, ids=range(len(MIXED)))
def test_what_may_end_in_several_places_is_joined_with_what_follows(
    kit: str, grammar: Grammar, regex: str, letters: bytes
) -> None:
    n_ended, liked = 0, [b"%c" % letter for letter in letters]
    for seed in range(12):
        text = walk(tools(kit), grammar, seed, by=6.0, liked=liked)
        n_ended += text is not None
        assert text is None or re.fullmatch(regex, text, re.DOTALL), text
    assert n_ended
