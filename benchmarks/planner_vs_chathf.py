"""One planner run's recorded calls, through this package and through ChatHuggingFace.

    pip install 'sidequest-langchain[bench]'
    python -m benchmarks.planner_vs_chathf

The planner runs once and its calls are recorded (or `--record FILE` gives them). Then both serve
the same calls, in turn, over the same weights object in the same dtype, greedily:

* ours: the calls of one round at the same time, as the graph makes them; the cache is emptied
  before every replay;
* ChatHuggingFace over HuggingFacePipeline, as its documentation sets it up: one call after the
  other, since `generate` on one model is not safe from several threads.

`--rounds` replays are interleaved; medians are reported. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.replaying import Call, Replay, read_calls, replay
from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.models.loading import load

Ask = Callable[[Sequence[Call]], list[str]]


def ours(model: SideQuestChatModel) -> Ask:
    """The calls of a round at the same time."""

    def one(call: Call) -> str:
        return str(model.invoke(list(call.messages), max_tokens=call.max_tokens).text)

    def ask(calls: Sequence[Call]) -> list[str]:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(one, calls))

    return ask


def chat_hugging_face(model: Any, tokenizer: Any) -> Ask:
    """One call after the other through langchain-huggingface."""
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline  # noqa: PLC0415
    from transformers import pipeline  # noqa: PLC0415

    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=pipe), tokenizer=tokenizer)

    def one(call: Call) -> str:
        settings = {
            "max_new_tokens": call.max_tokens,
            "do_sample": False,
            "return_full_text": False,
        }
        return str(chat.invoke(list(call.messages), pipeline_kwargs=settings).content)

    return lambda calls: [one(call) for call in calls]


def record(model_name: str, words: list[str]) -> list[Call]:
    """Run the planner once and read its calls."""
    from sidequest_langchain.examples.tree_of_thoughts.main import (  # noqa: PLC0415
        main as plan,
    )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.json"
        status = plan(["--model", model_name, "--record", str(path), "--quiet", *words])
        if status:
            raise SystemExit(status)
        return read_calls(path)


def figures(replays: list[Replay]) -> dict[str, float]:
    """Median, least and most seconds."""
    walls = [r.wall_s for r in replays]
    return {"wall_s": statistics.median(walls), "min_s": min(walls), "max_s": max(walls)}


def main(argv: list[str] | None = None) -> int:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="replays of each; %(default)s")
    parser.add_argument("--record", type=Path, help="calls recorded before, instead of a run")
    parser.add_argument("--most-calls", type=int, help="only the first of the calls")
    parser.add_argument("planner", nargs="*", help="further words for the planner, after --")
    args = parser.parse_args(argv)
    calls = read_calls(args.record) if args.record else record(args.model, args.planner)
    calls = calls[: args.most_calls]
    loaded = load(args.model)
    model = SideQuestChatModel.from_model(loaded.model, loaded.tokenizer, temperature=0.0)
    ways = {
        "ours": ours(model),
        "ChatHuggingFace": chat_hugging_face(loaded.model, loaded.tokenizer),
    }
    replays: dict[str, list[Replay]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, ask in ways.items():
            model.kv.clear()
            replays[name].append(replay(calls, ask))
    mine, other = replays["ours"], replays["ChatHuggingFace"]
    ratio = statistics.median(b.wall_s / a.wall_s for a, b in zip(mine, other, strict=True))
    answers = zip(mine[-1].texts, other[-1].texts, strict=True)
    same = [a.strip() == b.strip() for a, b in answers]
    document = {
        "benchmark": "planner_vs_chathf",
        "model": args.model,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "calls": len(calls),
        "rounds": args.rounds,
        "same_weights": True,
        "same_answers": sum(same),
        "figures": {name: figures(found) for name, found in replays.items()},
        "ratio": ratio,
        "machine": describe(),
    }
    for name, found in document["figures"].items():
        sys.stdout.write(f"{name:16s} {found['wall_s']:8.1f} s for {len(calls)} calls\n")
    sys.stdout.write(f"ChatHuggingFace takes {ratio:.1f} x as long; {sum(same)} same answers\n")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
