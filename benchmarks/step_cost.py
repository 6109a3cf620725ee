"""What a decode step costs as the tree grows: rows, segments, and nodes that nobody reads.

    python -m benchmarks.step_cost --model qwen2.5-coder-0.5b

Three questions, each interleaved over several rounds, medians of the rounds reported:

* rows: one sequence over trunks of more and more resident rows;
* segments: the same number of rows in one segment and in sixteen; at most 5 % more is wanted;
* idle nodes: with 2,000 finished calls left in the tree, and with none; less than 1 % is wanted.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine

from .engine_steps import Raw, request, seconds_per_step, trunk_ids
from .machine import describe

MOST_FOR_SEGMENTS, MOST_FOR_IDLE = 1.05, 1.01
N_SEGMENTS = 16
_AT_ONCE = 16


class Probe:
    """Times steps of one sequence on top of a resident trunk."""

    def __init__(self, engine: Engine, new_tokens: int) -> None:
        self._engine = engine
        self._new_tokens = new_tokens
        self._n_probes = 0

    def seconds(self, trunk: tuple[int, ...]) -> float:
        """Mean cost of a step; what the probe stored is released."""
        self._n_probes += 1
        name = f"probe-{self._n_probes}"
        cost = seconds_per_step(self._engine, [request(trunk, self._new_tokens, name)])
        self._engine.kv.release(name)
        return cost


def grow(engine: Engine, ids: tuple[int, ...], n_segments: int, name: str) -> None:
    """Have `ids` resident as a chain of so many segments of one size."""
    size = len(ids) // n_segments
    for i in range(1, n_segments + 1):
        list(engine.stream(request(ids[: i * size], 1, f"{name}-{i}")))


def litter(engine: Engine, trunk: tuple[int, ...], n_nodes: int) -> None:
    """Leave so many finished calls below the trunk."""
    requests = [
        request((*trunk, 1000 + i % 5000, 1000 + i // 5000), 1, f"idle-{i}") for i in range(n_nodes)
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: list(engine.stream(one)), requests))


def interleaved(
    ways: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, dict[str, float]]:
    """Median, least and most of each way; each round takes every way once, after one unmeasured."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            cost = way()
            if i:
                figures[name].append(cost)
    return {
        name: {"seconds_per_step": statistics.median(v), "min": min(v), "max": max(v)}
        for name, v in figures.items()
    }


def ratio(figures: dict[str, dict[str, float]], of: str, to: str) -> float:
    """How many times as much a step costs."""
    return figures[of]["seconds_per_step"] / figures[to]["seconds_per_step"]


def by_rows(engine: Engine, rows: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Trunks of different lengths."""
    probe = Probe(engine, args.new_tokens)
    ids = trunk_ids(engine, max(rows))
    grow(engine, ids[: min(rows)], 1, "trunk")
    for n in rows:
        list(engine.stream(request(ids[:n], 1, f"rows-{n}")))
    ways = {str(n): partial(probe.seconds, ids[:n]) for n in rows}
    found = interleaved(ways, args.rounds)
    engine.kv.clear()
    return found


def by_segments(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """One segment against a chain of the same number of rows."""
    probe = Probe(engine, args.new_tokens)
    ids = trunk_ids(engine, 2 * args.rows)
    whole, parts = ids[: args.rows], ids[args.rows :]
    grow(engine, whole, 1, "whole")
    grow(engine, parts, N_SEGMENTS, "parts")
    n_segments = len(engine.kv.segments())
    if n_segments != N_SEGMENTS + 1:
        msg = f"{N_SEGMENTS + 1} segments were to be made, found {n_segments}"
        raise RuntimeError(msg)
    ways = {"1": lambda: probe.seconds(whole), str(N_SEGMENTS): lambda: probe.seconds(parts)}
    found = interleaved(ways, args.rounds)
    engine.kv.clear()
    return found


def by_idle_nodes(clean: Engine, littered: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """A tree with many finished calls against one without, over the same weights."""
    ids = trunk_ids(clean, args.rows)
    for engine in (clean, littered):
        grow(engine, ids, 1, "trunk")
    litter(littered, ids, args.idle_nodes)
    probes = {
        "0": Probe(clean, args.new_tokens),
        str(args.idle_nodes): Probe(littered, args.new_tokens),
    }
    ways = {name: partial(probe.seconds, ids) for name, probe in probes.items()}
    return interleaved(ways, args.rounds)


def main(argv: list[str] | None = None) -> int:
    """Run the three measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rows", type=int, default=1024, help="of the trunk, where it is one")
    parser.add_argument("--idle-nodes", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    # Without guesses, whose number depends on the text: a step is one token a row.
    model = SideQuestChatModel(model=args.model, cache=CacheConfig(prompt_lookup=0))
    # Other settings of the cache mean another tree over the same weights.
    other = SideQuestChatModel(
        model=args.model, cache=CacheConfig(prompt_lookup=0, max_running=_AT_ONCE + 1)
    )
    steps = [args.rows // 4, args.rows, 2 * args.rows, 4 * args.rows]
    rows = by_rows(model.engine, steps, args)
    segments = by_segments(model.engine, args)
    idle = by_idle_nodes(model.engine, other.engine, args)
    for what, figures in (("rows", rows), ("segments", segments), ("idle nodes", idle)):
        for name, figure in figures.items():
            cost = figure["seconds_per_step"] * 1e3
            sys.stdout.write(f"{name:>6s} {what:10s} {cost:8.2f} ms a step\n")
    document = {
        "benchmark": "step_cost",
        "model": args.model,
        "rounds": args.rounds,
        "rows": rows,
        "segments": segments,
        "segments_ratio": ratio(segments, str(N_SEGMENTS), "1"),
        "segments_ratio_wanted": MOST_FOR_SEGMENTS,
        "idle_nodes": idle,
        "idle_nodes_ratio": ratio(idle, str(args.idle_nodes), "0"),
        "idle_nodes_ratio_wanted": MOST_FOR_IDLE,
        "machine": describe(),
    }
    sys.stdout.write(
        f"{N_SEGMENTS} segments cost {document['segments_ratio']:.3f} x one; "
        f"{args.idle_nodes} idle nodes cost {document['idle_nodes_ratio']:.3f} x none\n"
    )
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
