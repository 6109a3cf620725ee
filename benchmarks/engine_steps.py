"""What a step costs for 1, 2, 4, 8 and 16 siblings, and what batching parallel calls gains.

    python -m benchmarks.engine_steps --model qwen2.5-coder-0.5b

Two claims are measured, each interleaved over several rounds, medians reported:

* one step for 8 siblings over a 1,000-token trunk against a step for 1;
* 16 concurrent `ainvoke` against the same calls one after the other.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from benchmarks.machine import describe
from langchain_core.messages import HumanMessage

from sidequest_langchain import SideQuestChatModel

SIBLINGS = (1, 2, 4, 8, 16)
TOPICS = (
    "tea", "rain", "maps", "trains", "stone", "wool", "salt", "glass",
    "paper", "clay", "bread", "boats", "roads", "wells", "mills", "kites",
)  # fmt: skip


def trunk(model: SideQuestChatModel, n_tokens: int) -> str:
    """A text of about `n_tokens` tokens."""
    line = "The {} town lies by the river; its market sells {} and its inn has {} rooms. "
    words = ("first", "apples", "nine", "second", "cloth", "four", "third", "honey", "six")
    text = ""
    i = 0
    while len(model.get_token_ids(text)) < n_tokens:
        text += line.format(*(words[(i + k) % len(words)] for k in range(3)))
        i += 1
    return text


async def concurrent(model: SideQuestChatModel, prompts: list[str]) -> None:
    """All prompts at the same time."""
    await asyncio.gather(*(model.ainvoke([HumanMessage(p)]) for p in prompts))


async def in_turn(model: SideQuestChatModel, prompts: list[str]) -> None:
    """One prompt after the other."""
    for prompt in prompts:
        await model.ainvoke([HumanMessage(prompt)])


def seconds_per_step(model: SideQuestChatModel, prompts: list[str]) -> float:
    """Median cost of a decode step for these prompts together; their trunk is resident."""
    steps = model.kv.usage().n_steps
    begun = time.perf_counter()
    asyncio.run(concurrent(model, prompts))
    elapsed = time.perf_counter() - begun
    return elapsed / (model.kv.usage().n_steps - steps)


def measure_siblings(
    model: SideQuestChatModel, text: str, rounds: int
) -> dict[int, dict[str, float]]:
    """Seconds per step by number of siblings; each round takes every number once."""
    asyncio.run(in_turn(model, [text]))
    figures: dict[int, list[float]] = {n: [] for n in SIBLINGS}
    for i in range(rounds):
        for n in SIBLINGS:
            prompts = [f"{text}\nRound {i} of {n}: a line about {t}." for t in TOPICS[:n]]
            figures[n].append(seconds_per_step(model, prompts))
    return {
        n: {"seconds_per_step": statistics.median(v), "min": min(v), "max": max(v)}
        for n, v in figures.items()
    }


def measure_concurrency(model: SideQuestChatModel, rounds: int) -> dict[str, Any]:
    """16 calls at once against one after the other; nothing of them is resident before."""
    prompts = [f"Write one plain sentence about {topic}." for topic in TOPICS]
    ways = {"concurrent": concurrent, "in_turn": in_turn}
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            model.kv.clear()
            begun = time.perf_counter()
            asyncio.run(way(model, prompts))
            figures[name].append(time.perf_counter() - begun)
    ratios = [b / a for a, b in zip(figures["concurrent"], figures["in_turn"], strict=True)]
    return {
        "concurrent_s": statistics.median(figures["concurrent"]),
        "in_turn_s": statistics.median(figures["in_turn"]),
        "speedup": statistics.median(ratios),
    }


def main(argv: list[str] | None = None) -> int:
    """Run both measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--trunk-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    model = SideQuestChatModel(model=args.model, max_tokens=args.new_tokens, ignore_eos=True)
    siblings = measure_siblings(model, trunk(model, args.trunk_tokens), args.rounds)
    model.kv.clear()
    parallel = measure_concurrency(model, args.rounds)
    ratio = siblings[8]["seconds_per_step"] / siblings[1]["seconds_per_step"]
    for n, figure in siblings.items():
        step = figure["seconds_per_step"]
        sys.stdout.write(f"{n:3d} siblings  {step * 1e3:7.1f} ms a step  {n / step:6.1f} tok/s\n")
    sys.stdout.write(f"8 siblings cost {ratio:.2f} x a step for 1\n")
    sys.stdout.write(f"16 calls at once are {parallel['speedup']:.2f} x as fast as in turn\n")
    document = {
        "benchmark": "engine_steps",
        "model": args.model,
        "trunk_tokens": args.trunk_tokens,
        "rounds": args.rounds,
        "siblings": siblings,
        "step_ratio_8_to_1": ratio,
        "parallel": parallel,
        "machine": describe(),
    }
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


class _Raw(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the description's lines and shows defaults."""


if __name__ == "__main__":
    sys.exit(main())
