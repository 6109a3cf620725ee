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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

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

from .engine_steps import Raw, request, trunk_ids
from .grammar_libraries import CASES, TRIP, libraries
from .machine import describe

MOST_SHARE = 0.05

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
