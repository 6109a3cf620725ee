"""What managing the cache costs, and what it saves as a conversation grows.

    python -m benchmarks.managed_cost --model qwen2.5-coder-0.5b

Two questions, each over several rounds, medians of the rounds' ratios reported:

* watching: decoding over the same path with nothing managed, with everything watched and nothing
  to do, and with a budget that asks for acts all the time, one step of each after another; at most
  2 % and 3 % more is wanted. The steps are as many as lie between two cycles of the budget;
* the curve: time per decoded token after 2,000 to 16,000 tokens were seen, with a budget of 2,000
  tokens and without; the first is to stay within 10 %, the second grows.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.evaluation.pages import write_between

from .engine_steps import Raw, request, seconds_per_step, trunk_ids
from .in_turn import InTurn
from .machine import describe

MOST_WATCHED, MOST_MANAGED, MOST_GROWTH = 1.02, 1.03, 1.10
PLAIN, WATCHED, MANAGED = "nothing managed", "watched", "managed"


def engines(model: str, budget: int, n: int) -> dict[str, list[Engine]]:
    """Engines over one model: plain, watching without need, and managed (`n` of these)."""
    # Without guesses, whose number depends on the text: a step is one token a row.
    settings = {
        PLAIN: [CacheConfig(prompt_lookup=0)],
        WATCHED: [CacheConfig(prompt_lookup=0, policy="staged", budget_tokens=10**6)],
        MANAGED: [
            # Another number of requests makes another engine over the same weights.
            CacheConfig(prompt_lookup=0, policy="staged", budget_tokens=budget, max_running=8 + i)
            for i in range(n)
        ],
    }
    return {
        name: [SideQuestChatModel(model=model, cache=config).engine for config in configs]
        for name, configs in settings.items()
    }


class Decoding:
    """Decodes on top of a path that an engine has read once."""

    def __init__(self, engine: Engine, ids: tuple[int, ...], new_tokens: int) -> None:
        self._engine, self._ids, self._new_tokens = engine, ids, new_tokens
        self._n = 0
        list(engine.stream(request(ids, 1, f"read-{len(ids)}")))

    def seconds(self) -> float:
        """Mean cost of a step; what was decoded is released."""
        self._n += 1
        name = f"decode-{len(self._ids)}-{self._n}"
        cost = seconds_per_step(self._engine, [request(self._ids, self._new_tokens, name)])
        self._engine.kv.release(name)
        return cost


def watching(
    engines: dict[str, Engine], ids: tuple[int, ...], steps: int, rounds: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Mean seconds of a step, and the median, least and most of the rounds' ratios to `PLAIN`.

    Every round reads the path anew: acts of the one before would leave it shorter.
    """
    task = progress.add_task("steps in turn", total=rounds * steps)
    costs: dict[str, list[float]] = {name: [] for name in engines}
    acts = 0
    for i in range(rounds):
        for engine in engines.values():
            engine.kv.clear()
            list(engine.stream(request(ids, 1, f"read-{i}")))
        before = len(engines[MANAGED].kv.receipts())
        with InTurn(engines) as turn:
            found = turn.seconds(
                lambda i=i: request(ids, steps + 2, f"decode-{i}"),  # type: ignore[misc]
                steps,
                lambda: progress.advance(task),
            )
        acts += len(engines[MANAGED].kv.receipts()) - before
        for name, seconds in found.items():
            costs[name].append(statistics.mean(seconds))
    ratios = {
        name: [a / b for a, b in zip(v, costs[PLAIN], strict=True)] for name, v in costs.items()
    }
    return {
        name: {
            "seconds_per_step": statistics.median(v),
            "ratio": statistics.median(ratios[name]),
            "least": min(ratios[name]),
            "most": max(ratios[name]),
            "acts": acts if name == MANAGED else 0,
        }
        for name, v in costs.items()
    }


def interleaved(
    ways: dict[str, Callable[[], float]], rounds: int, base: str, progress: Progress
) -> dict[str, dict[str, float]]:
    """Median seconds of each way, and the median of the rounds' own ratios to `base`."""
    task = progress.add_task("rounds", total=(rounds + 1) * len(ways))
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            cost = way()
            progress.advance(task)
            if i:
                figures[name].append(cost)
    return {
        name: {
            "seconds_per_step": statistics.median(v),
            "ratio": statistics.median(a / b for a, b in zip(v, figures[base], strict=True)),
        }
        for name, v in figures.items()
    }


def table(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The figures as tables of Markdown."""
    lines = [
        f"{args.model}, {args.rounds} rounds of {args.steps} steps in turn, then of "
        f"{args.new_tokens} tokens (`python -m benchmarks.managed_cost --rounds {args.rounds} "
        f"--seen {' '.join(map(str, args.seen))} --docs docs/managed-cache.md`).",
        "",
        f"| decoding over {args.path} tokens | ms a token | ratio | least | most | acts |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found["watching"].items():
        lines.append(
            f"| {name} | {1e3 * one['seconds_per_step']:.1f} | {one['ratio']:.3f} | "
            f"{one['least']:.3f} | {one['most']:.3f} | {one['acts']} |"
        )
    lines += [
        "",
        f"| tokens seen | budget of {args.budget} tokens: ms a token | ratio | none: ms | ratio |",
        "|---|---|---|---|---|",
    ]
    managed, plain = found["curve"]["managed"], found["curve"]["plain"]
    for n, one in managed.items():
        other = plain[n]
        lines.append(
            f"| {n} | {1e3 * one['seconds_per_step']:.1f} | {one['ratio']:.3f} | "
            f"{1e3 * other['seconds_per_step']:.1f} | {other['ratio']:.3f} |"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run both measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--budget", type=int, default=2000, help="tokens")
    parser.add_argument("--path", type=int, default=2000, help="tokens of the path that is watched")
    parser.add_argument("--seen", type=int, nargs="+", default=[2000, 4000, 8000, 16000])
    parser.add_argument("--steps", type=int, default=224, help="of a round over the path")
    parser.add_argument("--new-tokens", type=int, default=32, help="of a round of the curve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--docs", type=Path, help="page between whose marks the tables go")
    args = parser.parse_args(argv)
    made = engines(args.model, args.budget, len(args.seen) + 1)
    plain, watched, managed = made[PLAIN][0], made[WATCHED][0], made[MANAGED]
    ids = trunk_ids(plain, max([*args.seen, args.path]))
    found: dict[str, Any] = {}
    with Progress(transient=True) as progress:
        path = ids[: args.path]
        three = {PLAIN: plain, WATCHED: watched, MANAGED: managed[-1]}
        found["watching"] = watching(three, path, args.steps, args.rounds, progress)
        for engine in three.values():
            engine.kv.clear()
        ways: dict[str, Callable[[], float]] = {}
        for n, engine in zip(args.seen, managed, strict=False):
            ways[f"managed {n}"] = Decoding(engine, ids[:n], args.new_tokens).seconds
            ways[f"plain {n}"] = Decoding(plain, ids[:n], args.new_tokens).seconds
        first = args.seen[0]
        found["curve"] = {
            kind: interleaved(
                {str(n): partial(ways[f"{kind} {n}"]) for n in args.seen},
                args.rounds,
                str(first),
                progress,
            )
            for kind in ("managed", "plain")
        }
    found["held bytes"] = {
        str(n): engine.kv.usage().n_bytes for n, engine in zip(args.seen, managed, strict=False)
    }
    last = str(args.seen[-1])
    found["holds"] = {
        "watched": found["watching"][WATCHED]["ratio"] <= MOST_WATCHED,
        "managed": found["watching"][MANAGED]["ratio"] <= MOST_MANAGED,
        "flat": found["curve"]["managed"][last]["ratio"] <= MOST_GROWTH,
    }
    lines = table(found, args)
    print("\n".join(lines))
    if args.docs is not None:
        write_between(args.docs, "managed cost", "\n".join(lines))
    print(json.dumps({"machine": describe(), **found}))
    return 0 if all(found["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
