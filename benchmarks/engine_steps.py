"""What a step costs for 1, 2, 4, 8 and 16 siblings, and what batching parallel calls gains.

    python -m benchmarks.engine_steps --model qwen2.5-coder-0.5b

Two claims are measured, each interleaved over several rounds, medians reported:

* one step for 8 siblings over a 1,000-token trunk against a step for 1;
* 16 concurrent `ainvoke` from `Send` tasks of a graph against one after the other.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send

from sidequest_langchain import SideQuestChatModel, attach
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest, SamplingParams
from sidequest_langchain.labels import StepLabel

from .machine import describe

SIBLINGS = (1, 2, 4, 8, 16)
TOPICS = (
    "tea", "rain", "maps", "trains", "stone", "wool", "salt", "glass",
    "paper", "clay", "bread", "boats", "roads", "wells", "mills", "kites",
)  # fmt: skip


def trunk_ids(engine: Engine, n_tokens: int) -> tuple[int, ...]:
    """The first `n_tokens` tokens of a plain text."""
    line = "The {} town lies by the river; its market sells {} and its inn has {} rooms. "
    words = ("first", "apples", "nine", "second", "cloth", "four", "third", "honey", "six")
    ids: list[int] = []
    i = 0
    while len(ids) < n_tokens:
        ids += engine.tokenizer.encode(line.format(*(words[(i + k) % 9] for k in range(3))))
        i += 1
    return tuple(ids[:n_tokens])


class Fan(TypedDict):
    """State of a graph that asks many things at once."""

    prompts: list[str]
    answers: Annotated[list[str], operator.add]


class Question(TypedDict):
    """What one node of it is sent."""

    prompt: str


def fan_out(model: SideQuestChatModel) -> CompiledStateGraph[Fan]:
    """A graph that sends every prompt to a node of its own, as an agent's branches do."""

    async def ask(task: Question) -> dict[str, list[str]]:
        answer = await model.ainvoke([HumanMessage(task["prompt"])])
        return {"answers": [str(answer.text)]}

    def send(state: Fan) -> list[Send]:
        return [Send("ask", {"prompt": prompt}) for prompt in state["prompts"]]

    builder: StateGraph[Any, Any, Any, Any] = StateGraph(Fan)
    builder.add_node("ask", ask, input_schema=Question)  # type: ignore[call-overload]
    builder.add_conditional_edges(START, send, ["ask"])
    builder.add_edge("ask", END)
    return attach(builder.compile(), model)


def request(ids: tuple[int, ...], new_tokens: int, name: str) -> GenerationRequest:
    """A greedy request of exactly `new_tokens` tokens."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return GenerationRequest(prompt_ids=ids, sampling=sampling, label=StepLabel(call_id=name))


def seconds_per_step(engine: Engine, requests: list[GenerationRequest]) -> float:
    """Mean cost of a step for these requests together; their trunk is resident."""
    steps = engine.kv.usage().n_steps
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda r: list(engine.stream(r)), requests))
    elapsed = time.perf_counter() - begun
    return elapsed / (engine.kv.usage().n_steps - steps)


def measure_siblings(
    engine: Engine, trunk: tuple[int, ...], new_tokens: int, rounds: int
) -> dict[int, dict[str, float]]:
    """Seconds per step by number of siblings; each round takes every number once."""
    list(engine.stream(request(trunk, 1, "trunk")))
    figures: dict[int, list[float]] = {n: [] for n in SIBLINGS}
    for i in range(rounds):
        for n in SIBLINGS:
            tails = [engine.tokenizer.encode(f" {topic} {i}.{n}") for topic in TOPICS[:n]]
            requests = [
                request((*trunk, *tail), new_tokens, f"{i}-{n}-{j}") for j, tail in enumerate(tails)
            ]
            figures[n].append(seconds_per_step(engine, requests))
            for r in requests:
                engine.kv.release(r.label.call_id)
    return {
        n: {"seconds_per_step": statistics.median(v), "min": min(v), "max": max(v)}
        for n, v in figures.items()
    }


def measure_concurrency(model: SideQuestChatModel, rounds: int) -> dict[str, Any]:
    """16 `ainvoke` from `Send` tasks at once, against one after the other; all from cold."""
    prompts = [f"Write one plain sentence about {topic}." for topic in TOPICS]
    graph = fan_out(model)
    ways: dict[str, RunnableConfig] = {"concurrent": {}, "in_turn": {"max_concurrency": 1}}
    figures: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, list[str]] = {}
    for _ in range(rounds):
        for name, config in ways.items():
            model.kv.clear()
            begun = time.perf_counter()
            state = asyncio.run(graph.ainvoke({"prompts": prompts, "answers": []}, config))
            figures[name].append(time.perf_counter() - begun)
            answers[name] = state["answers"]
    ratios = [b / a for a, b in zip(figures["concurrent"], figures["in_turn"], strict=True)]
    return {
        "concurrent_s": statistics.median(figures["concurrent"]),
        "in_turn_s": statistics.median(figures["in_turn"]),
        "speedup": statistics.median(ratios),
        "same_answers": answers["concurrent"] == answers["in_turn"],
    }


def main(argv: list[str] | None = None) -> int:
    """Run both measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--trunk-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    model = SideQuestChatModel(
        model=args.model,
        max_tokens=args.new_tokens,
        temperature=0.0,
        cache=CacheConfig(prompt_lookup=0),  # a step is one token a row
    )
    trunk = trunk_ids(model.engine, args.trunk_tokens)
    siblings = measure_siblings(model.engine, trunk, args.new_tokens, args.rounds)
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


class Raw(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the description's lines and shows defaults."""


if __name__ == "__main__":
    sys.exit(main())
