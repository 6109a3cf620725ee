"""What a step and a prefill cost, beside `transformers.generate` on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import torch

from sidequest_langchain.engine.engine import Engine

from .driving import Forest, ask, engine_on, generate, run_together
from .findings import Findings, Setting, Skipped
from .holding import branches, model_for
from .making import prompt


def measure_steps(setting: Setting, findings: Findings) -> None:
    """Milliseconds a decode step by rows and trunk, the three ways in turn.

    `pass` is one forward pass over the tree, `engine` a whole step of the engine with sampling
    and text, `generate` a step of transformers over a batch that holds the trunk once a row.
    """
    model = model_for(setting)
    found = findings.figures["steps"] = []
    forest = Forest(model)
    try:
        with engine_on(model) as engine:
            _measure_steps(setting, found, forest, engine)
    finally:
        forest.close()


def _measure_steps(
    setting: Setting, found: list[dict[str, Any]], forest: Forest, engine: Engine
) -> None:
    n_vocab = forest.adapter.vocab_size
    n_rounds = setting.pick(1, 3)
    for n_trunk in setting.pick((40,), (1000, 7000)):
        trunk = prompt(n_trunk, n_vocab)
        for n_rows in setting.pick((1, 3), (1, 8, 16, 64)):
            setting.require(setting.pick(1, 12), f"{n_rows} rows over {n_trunk} tokens")
            ways = _ways(setting, forest, engine, trunk, n_rows)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(n_rounds):
                for name, way in ways.items():
                    times[name].append(_unless_full(way, setting))
            row: dict[str, Any] = {"rows": n_rows, "trunk_tokens": n_trunk}
            row |= {f"{name}_ms": _median_ms(values) for name, values in times.items()}
            for name in ("pass", "engine"):
                row[f"generate_over_{name}"] = _ratio(row["generate_ms"], row[f"{name}_ms"])
            found.append(row)


def _ways(
    setting: Setting, forest: Forest, engine: Engine, trunk: list[int], n_rows: int
) -> dict[str, Callable[[], float]]:
    n_steps = setting.pick(3, 16)

    def one_pass() -> float:
        forest.clear()
        forest.plant(trunk)
        paths = branches(forest, trunk, n_rows)
        forest.feed(paths, [[7]] * n_rows)
        times = []
        for _ in range(n_steps):
            begun = time.perf_counter()
            forest.feed(paths, [[7]] * n_rows).argmax(-1).tolist()
            times.append(setting.seconds(begun))
        forest.clear()
        return statistics.median(times)

    def whole() -> float:
        engine.kv.clear()
        run_together(engine, [ask(trunk, 1)])
        requests = [ask([*trunk, 10 + i], n_steps) for i in range(n_rows)]
        n_before = engine.kv.usage().n_steps
        begun = time.perf_counter()
        run_together(engine, requests)
        seconds = setting.seconds(begun)
        n_run = engine.kv.usage().n_steps - n_before
        engine.kv.clear()
        return seconds / n_run

    def plain() -> float:
        _, times = generate(
            forest.adapter.model, [[*trunk, 10 + i] for i in range(n_rows)], n_steps
        )
        return statistics.median(times[1:])

    return {"pass": one_pass, "engine": whole, "generate": plain}


def measure_prefill(setting: Setting, findings: Findings) -> None:
    """Prompt tokens a second by chunk, and those of `generate`, in turn."""
    model = model_for(setting)
    n_prompt = setting.pick(64, 8192)
    ids = prompt(n_prompt, model.config.vocab_size, seed=9)
    chunks = setting.pick((16, 32), (256, 512, 1024, 2048, 4096))

    def in_chunks(chunk: int) -> Callable[[], float]:
        def run() -> float:
            forest = Forest(model)
            try:
                setting.wait()
                begun = time.perf_counter()
                forest.plant(ids, chunk=chunk)
                return setting.seconds(begun)
            finally:
                forest.clear()
                forest.close()

        return run

    ways: dict[str, Callable[[], float]] = {str(chunk): in_chunks(chunk) for chunk in chunks}
    ways["generate"] = lambda: generate(model, [ids], 1)[1][0]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(setting.pick(2, 4)):
        for name, way in ways.items():
            setting.require(setting.pick(0.5, 3), "prefill")
            seconds = _unless_full(way, setting)
            if i:  # the first round warms up
                times[name].append(seconds)
    findings.figures["prompt_tokens"] = n_prompt
    findings.figures["tokens_per_s"] = {
        name: round(n_prompt / statistics.median(values), 1) for name, values in times.items()
    }


def write_profile(setting: Setting, findings: Findings) -> None:
    """A table of where ten decode steps of eight rows spend their time, into a file."""
    if setting.profile is None:
        msg = "--profile FILE was not given"
        raise Skipped(msg)
    model = model_for(setting)
    forest = Forest(model)
    try:
        trunk = prompt(setting.pick(40, 1000), model.config.vocab_size)
        forest.plant(trunk)
        paths = branches(forest, trunk, 8)
        forest.feed(paths, [[7]] * 8)
        with torch.profiler.profile() as profile:
            for _ in range(10):
                forest.feed(paths, [[7]] * 8).argmax(-1).tolist()
            setting.wait()
        forest.clear()
    finally:
        forest.close()
    key = "self_cuda_time_total" if setting.device.type == "cuda" else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=key, row_limit=40)
    File(setting.profile).write_text(table, encoding="utf-8")
    findings.figures["table"] = setting.profile


def _unless_full(way: Callable[[], float], setting: Setting) -> float:
    """Seconds, or infinity where the device has no room for it."""
    try:
        return way()
    except torch.OutOfMemoryError:
        return float("inf")
    finally:
        setting.forget()


def _median_ms(seconds: list[float]) -> float | None:
    median = statistics.median(seconds)
    return None if median == float("inf") else round(1e3 * median, 3)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one / other, 2)
