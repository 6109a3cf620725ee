"""The most KV bytes at once, with release and management and without: a planner, a long agent.

    python -m benchmarks.peak_kv
    python -m benchmarks.peak_kv --model smollm2-135m --calls 8 --trips 1     # a smoke run

* planner: trips by beam search. Unmanaged, its calls are fed again with nothing given up; managed,
  a pruned branch is released, and what lives on is held to a budget; of each branch the last
  `--planner-window` tokens stay at full precision. At most 25 % is wanted, with as many trips
  solved.
* agent: a conversation with the results of `--calls` tool calls, questions in between, on the full
  cache and held to a budget. At most 35 % is wanted, with as many answers right.

Peaks are those of the storages (`peak_resident_bytes`), as they are while a step runs. The last
line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.messages import ToolMessage

from examples.tree_of_thoughts.generator import generate
from examples.tree_of_thoughts.planner import Run, Watcher, run_planner
from examples.tree_of_thoughts.search import Limits
from sidequest_langchain import CacheConfig, Protection, SideQuestChatModel
from sidequest_langchain.evaluation.agents import AGENTS
from sidequest_langchain.evaluation.conversing import Outcome, converse
from sidequest_langchain.evaluation.sample import Sample, Task, sample_of

from .engine_steps import Raw
from .machine import describe

MOST_OF_PLANNER, MOST_OF_AGENT = 0.25, 0.35
_TOKENS_A_CALL = 90
"""Of a tool call with its result, about; the trace is made longer until it has enough calls."""


class _Nobody(Watcher):
    """Looks away."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--trips", type=int, default=3, help="of the planner")
    parser.add_argument("--calls", type=int, default=30, help="of the agent's tools, at least")
    parser.add_argument("--samples", type=int, default=3, help="agent's conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--planner-budget", type=float, default=0.2, help="share of the unmanaged peak"
    )
    parser.add_argument(
        "--planner-window", type=int, default=50, help="recent tokens at full precision, a branch"
    )
    parser.add_argument("--agent-budget", type=float, default=0.3, help="likewise")
    parser.add_argument("--planner-chunk", type=int, help="prompt tokens a step")
    args = parser.parse_args(argv)
    found = {"planner": _planner(args), "agent": _agent(args)}
    for name, most in (("planner", MOST_OF_PLANNER), ("agent", MOST_OF_AGENT)):
        one = found[name]
        sys.stdout.write(
            f"{name}: peak {one['share']:.1%} of the unmanaged one ({most:.0%} wanted); "
            f"success {one['managed_score']:.2f}, unmanaged {one['unmanaged_score']:.2f}\n"
        )
    document = {"benchmark": "peak_kv", **vars(args), **found, "machine": describe()}
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def _planner(args: argparse.Namespace) -> dict[str, Any]:
    """Trips, each unmanaged and managed."""
    rows = []
    for seed in range(args.seed, args.seed + args.trips):
        problem = generate(n_cities=5, seed=seed)

        def plan(
            model: SideQuestChatModel,
            *,
            is_replayed: bool,
            seed: int = seed,
            problem: Any = problem,
        ) -> Run:
            return run_planner(
                model, problem, Limits(), _Nobody(), seed=seed, is_replayed=is_replayed
            )

        _say(f"planner: trip {seed}, unmanaged")
        free = _with_model(args.model, None, lambda model: plan(model, is_replayed=True))
        assert free.kept is not None
        unmanaged = free.kept.peak_bytes
        _say(f"planner: trip {seed}, managed")
        window = Protection(recent_window=args.planner_window)
        managed = _managed(args.planner_budget, unmanaged)
        cache = replace(managed, protection=window, prefill_chunk=args.planner_chunk)
        run = _with_model(args.model, cache, lambda model: plan(model, is_replayed=False))
        rows.append(
            {
                "seed": seed,
                "unmanaged_bytes": unmanaged,
                "released_bytes": free.peak_bytes,
                "managed_bytes": run.peak_bytes,
                "unmanaged_score": float(free.is_solved),
                "managed_score": float(run.is_solved),
            }
        )
    return _summed(rows)


def _agent(args: argparse.Namespace) -> dict[str, Any]:
    """Conversations, each on the full cache and on a managed one."""
    task = next(task for task in AGENTS if task.name == "revival")
    rows = []
    for number in range(args.samples):

        def talk(model: SideQuestChatModel, number: int = number) -> tuple[int, Outcome]:
            sample = _with_calls(task, args.calls, args.seed, number, model)
            return _n_calls(sample), converse(model, sample)

        _say(f"agent: conversation {number}, unmanaged")
        n_calls, full = _with_model(args.model, None, talk)
        _say(f"agent: conversation {number}, managed")
        cache = _managed(args.agent_budget, full.peak_bytes)
        _, managed = _with_model(args.model, cache, talk)
        rows.append(
            {
                "number": number,
                "calls": n_calls,
                "tokens": full.n_tokens,
                "unmanaged_bytes": full.peak_bytes,
                "managed_bytes": managed.peak_bytes,
                "unmanaged_score": _mean(full.scores),
                "managed_score": _mean(managed.scores),
            }
        )
    return _summed(rows)


def _with_model(
    name: str, cache: CacheConfig | None, use: Callable[[SideQuestChatModel], Any]
) -> Any:
    """What `use` finds on a model with an engine of its own."""
    model = SideQuestChatModel(model=name, temperature=0.0, cache=cache or CacheConfig())
    try:
        model.kv.reset_peak()
        return use(model)
    finally:
        model.engine.close()


def _managed(share: float, n_bytes: int) -> CacheConfig:
    return CacheConfig(policy="staged", budget_bytes=max(1, round(share * n_bytes)))


def _with_calls(
    task: Task, n_calls: int, seed: int, number: int, model: SideQuestChatModel
) -> Sample:
    """A sample with so many tool calls at least."""
    n_tokens = n_calls * _TOKENS_A_CALL
    while True:
        sample = sample_of(
            task,
            seed=seed,
            number=number,
            n_tokens=n_tokens,
            count=lambda text: len(model.engine.tokenizer.encode(text, control_tokens=False)),
        )
        if _n_calls(sample) >= n_calls:
            return sample
        n_tokens = round(1.1 * n_tokens)


def _n_calls(sample: Sample) -> int:
    messages = [message for ask in sample.asks for message in ask.messages]
    return sum(isinstance(message, ToolMessage) for message in messages)


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The shares' and scores' means, and all rows."""
    return {
        "share": _mean([row["managed_bytes"] / row["unmanaged_bytes"] for row in rows]),
        "unmanaged_score": _mean([row["unmanaged_score"] for row in rows]),
        "managed_score": _mean([row["managed_score"] for row in rows]),
        "rows": list(rows),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
