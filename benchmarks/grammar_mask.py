"""What holding an answer to a grammar costs, and how two libraries for it compare.

    python -m benchmarks.grammar_mask --model qwen2.5-coder-0.5b

* share: what the constraint of a request takes for a token, against a decode step of the same
  engine without one, in turn over several rounds; at most 5 % is wanted;
* forcing: passes and seconds for a tool call, with the tokens that its grammar forces fed together
  and one by one;
* libraries: set-up, compiling, mask and accept for a token, and which of some schemas each
  refuses, gets right, or gets wrong. xgrammar takes part where it is installed; the package does
  not need it.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine import scheduler
from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.grammar import (
    Choice,
    FreeText,
    Grammar,
    Pattern,
    Repeat,
    Schema,
    Text,
    Then,
)
from sidequest_langchain.errors import GrammarError

from .engine_steps import Raw, request, trunk_ids
from .machine import describe

MOST_SHARE = 0.05

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
CALL = Then((Text("<tool_call>\n"), TRIP, Text("\n</tool_call>")))
LINES = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 20}
GRAMMARS: dict[str, Grammar] = {
    "call": CALL,
    "auto": Then((FreeText(("<tool_call>",)), Repeat(CALL, separator="\n"))),
    "strings": Schema.of(LINES),
    "any json": Schema("{}"),
    "regex": Pattern(r"([A-Z][a-z]{2,12} ){40}"),
    "choice": Repeat(Choice(("north", "south", "east", "west", "northwest")), 60, 60, ", "),
}
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


class Timed(Constraint):
    """A constraint, and what it took."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self.seconds = 0.0
        self.n_tokens = 0

    @contextmanager
    def _clock(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun

    def mask(self, logits: Tensor) -> Tensor:
        with self._clock():
            return self._inner.mask(logits)

    def best(self, logits: Tensor, best_id: int) -> int:
        with self._clock():
            return self._inner.best(logits, best_id)

    def accept(self, token_id: int) -> None:
        self.n_tokens += 1
        with self._clock():
            self._inner.accept(token_id)

    @property
    def is_done(self) -> bool:
        with self._clock():
            return self._inner.is_done

    def forced(self) -> Sequence[int]:
        with self._clock():
            return self._inner.forced()

    def n_allowed(self, token_ids: Sequence[int]) -> int:
        with self._clock():
            return self._inner.n_allowed(token_ids)


def held(
    engine: Engine, ids: tuple[int, ...], n: int, grammar: Grammar | None
) -> tuple[float, Timed | None, int]:
    """Seconds of a greedy answer over a resident prompt, what its constraint took, its passes."""
    timed = None if grammar is None else Timed(engine.grammars.constraint(grammar))
    asked = replace(request(ids, n, "held"), constraint=timed)
    n_steps = engine.kv.usage().n_steps
    begun = time.perf_counter()
    list(engine.stream(asked))
    seconds = time.perf_counter() - begun
    n_steps = engine.kv.usage().n_steps - n_steps
    engine.kv.release("held")
    return seconds, timed, n_steps


def share(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """What a constraint takes for a token, as a share of a decode step without one."""
    ids = trunk_ids(engine, args.trunk_tokens)
    list(engine.stream(request(ids, 1, "trunk")))
    steps: list[float] = []
    tokens: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    for i in range(args.rounds + 1):
        seconds, _, n_steps = held(engine, ids, args.new_tokens, None)
        for name, grammar in GRAMMARS.items():
            _, timed, _ = held(engine, ids, args.new_tokens, grammar)
            assert timed is not None
            if i:
                tokens[name].append(timed.seconds / timed.n_tokens)
        if i:
            steps.append(seconds / n_steps)
    step = statistics.median(steps)
    found = {name: statistics.median(each) for name, each in tokens.items()}
    shares = {name: seconds / step for name, seconds in found.items()}
    return {"step_s": step, "token_s": found, "share": shares, "share_max": max(shares.values())}


def forcing(engine: Engine, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """A tool call with its forced tokens fed together, and one by one."""
    ids = trunk_ids(engine, args.trunk_tokens)
    usual = scheduler.N_FORCED
    found: dict[str, list[tuple[float, int]]] = {"together": [], "one by one": []}
    try:
        for i in range(args.rounds + 1):
            for name, n_most in (("together", usual), ("one by one", 0)):
                scheduler.N_FORCED = n_most
                seconds, _, n_passes = held(engine, ids, args.call_tokens, CALL)
                if i:
                    found[name].append((seconds, n_passes))
    finally:
        scheduler.N_FORCED = usual
    return {
        name: {"seconds": statistics.median(s for s, _ in each), "passes": each[0][1]}
        for name, each in found.items()
    }


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


def main(argv: list[str] | None = None) -> int:
    """Run the three measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--trunk-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--call-tokens", type=int, default=120, help="most of a tool call")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    engine = SideQuestChatModel(model=args.model, cache=CacheConfig(prompt_lookup=0)).engine
    compared = libraries(engine, args)
    shared, forced = share(engine, args), forcing(engine, args)
    write = sys.stdout.write
    write(f"a decode step takes {shared['step_s'] * 1e3:.2f} ms\n")
    for name, seconds in shared["token_s"].items():
        part = shared["share"][name]
        write(f"  {name:10s} {seconds * 1e6:8.0f} us a token, {part:6.2%} of a step\n")
    for name, each in forced.items():
        write(f"a call, {name:10s} {each['passes']:3d} passes {each['seconds'] * 1e3:8.0f} ms\n")
    for name, each in compared.items():
        write(
            f"{name:10s} set up {each['set_up_s']:.2f} s, "
            f"compile {each['compile_s'] * 1e3:.1f} ms, "
            f"{each['token_s'] * 1e6:.0f} us a token (worst {each['token_s_max'] * 1e6:.0f}), "
            f"{each['n_wrong']} of {len(CASES)} schemas wrong\n"
        )
    document = {
        "benchmark": "grammar_mask",
        "model": args.model,
        "rounds": args.rounds,
        "share": shared,
        "share_wanted": MOST_SHARE,
        "forcing": forced,
        "libraries": compared,
        "machine": describe(),
    }
    write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
