"""Two libraries for grammars over the same vocabulary: times, and which schemas they get right.

Used by `grammar_mask`. xgrammar takes part where it is installed; the package does not need it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.grammar import Schema, Text
from sidequest_langchain.errors import GrammarError

TRIP = Schema.of(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["search_flights", "book_hotel"]},
            "arguments": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 30},
                    "notes": {"type": ["string", "null"]},
                },
                "required": ["city", "days", "notes"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
)
SAID = (
    '{"name": "book_hotel", "arguments": {"city": "Lisbon", "days": 12, "notes": "near the river, '
    'with a view of the 城市 🚀 and \\"quiet\\" rooms; breakfast before eight"}}'
)

Case: TypeAlias = tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]
CASES: dict[str, Case] = {
    "object": (json.loads(TRIP.schema), (SAID,), ('{"name": "book_hotel"}', "{}")),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, ("[1, 2]",), ("[1, 1]",)),
    "not": ({"properties": {"a": {"not": {"type": "integer"}}}}, ('{"a": "b"}',), ('{"a": 1}',)),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("1.5",), ("1",)),
    "lookahead": ({"type": "string", "pattern": "^(?!a)[a-z]$"}, ('"b"',), ('"a"',)),
    "allOf": (
        {"allOf": [{"required": ["a"]}, {"properties": {"a": {"const": 1}}, "type": "object"}]},
        ('{"a": 1}',),
        ("[1]", '{"a": 2}', "{}"),
    ),
    "pattern and length": (
        {"type": "string", "pattern": "^a+$", "maxLength": 3},
        ('"aa"',),
        ('"aaaa"',),
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, ("15",), ("16",)),
    "const": ({"const": {"a": [1, None]}}, ('{"a": [1, null]}',), ('{"a": [1]}',)),
    "format": ({"type": "string", "format": "date"}, ('"2026-11-30"',), ('"2026-13-30"',)),
    "range": ({"type": "number", "minimum": 0.5, "maximum": 2}, ("0.75", "2"), ("0.25", "2.5")),
    "recursion": (
        {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
        ("[[], [[]]]",),
        ("[1]",),
    ),
}

Step: TypeAlias = Callable[[int], bool]
"""Fill the mask, say whether it allows a token, and move on past that."""


class Ours:
    """llguidance, as the package uses it."""

    name = "llguidance"

    def __init__(self, engine: Engine) -> None:
        self._grammars = engine.grammars
        self._vocabulary: Any = engine.grammars.constraint(Text("x"))._vocabulary

    def begin(self, schema: dict[str, Any]) -> Step | None:
        try:
            constraint: Any = self._grammars.constraint(Schema.of(schema))
        except GrammarError:
            return None
        matcher, vocabulary = constraint._matcher, self._vocabulary

        def step(token_id: int) -> bool:
            vocabulary.read(matcher)
            return vocabulary.has(token_id) and bool(matcher.consume_token(token_id))

        return step


class Theirs:
    """xgrammar."""

    name = "xgrammar"

    def __init__(self, engine: Engine) -> None:
        import xgrammar  # noqa: PLC0415

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            engine.tokenizer._tokenizer,
            vocab_size=engine.vocab_size,
            stop_token_ids=sorted(engine.eos_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, engine.vocab_size)

    def begin(self, schema: dict[str, Any]) -> Step | None:
        try:
            compiled = self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(", ", ": ")
            )
        except RuntimeError:
            return None
        matcher, bits = self._library.GrammarMatcher(compiled), self._bits

        def step(token_id: int) -> bool:
            matcher.fill_next_token_bitmask(bits)
            is_allowed = int(bits[0, token_id >> 5]) >> (token_id & 31) & 1
            return bool(is_allowed) and bool(matcher.accept_token(token_id))

        return step


def says(library: Ours | Theirs, case: Case, engine: Engine) -> str:
    """What a library makes of a schema: `refuses` it, gets it `right`, `too wide`, `too narrow`."""
    schema, right, wrong = case

    def allows(text: str) -> bool:
        step = library.begin(schema)
        assert step is not None
        end = sorted(engine.eos_ids)[0]
        return all(map(step, [*engine.tokenizer.encode(text), end]))

    if library.begin(schema) is None:
        return "refuses"
    if any(map(allows, wrong)):
        return "too wide"
    return "right" if all(map(allows, right)) else "too narrow"


def libraries(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Each library over the same vocabulary, schemas and texts."""
    ids = engine.tokenizer.encode(SAID)
    found: dict[str, Any] = {}
    for kind in (Ours, Theirs):
        begun = time.perf_counter()
        try:
            library = kind(engine)
        except ImportError:
            continue
        set_up_s = time.perf_counter() - begun
        tokens, compiles = [], []
        for _ in range(args.rounds):
            schema = {**json.loads(TRIP.schema), "title": f"{time.perf_counter()}"}
            begun = time.perf_counter()
            step = library.begin(schema)
            compiles.append(time.perf_counter() - begun)
            assert step is not None
            for token_id in ids:
                begun = time.perf_counter()
                assert step(token_id)
                tokens.append(time.perf_counter() - begun)
        cases = {name: says(library, case, engine) for name, case in CASES.items()}
        found[library.name] = {
            "set_up_s": set_up_s,
            "compile_s": statistics.median(compiles),
            "token_s": statistics.median(tokens),
            "token_s_max": max(tokens),
            "cases": cases,
            "n_wrong": sum(what.startswith("too") for what in cases.values()),
        }
    return found
