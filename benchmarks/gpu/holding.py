"""What a step must not do: wait for the device, keep memory, spoil the tree where memory ends."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.kv.beside import Copies
from sidequest_langchain.kv.segment import Path

from .driving import Forest, ask, engine_on, generate, run_together
from .findings import Findings, Setting, Skipped
from .making import made, prompt

MIB = 2**20


def model_for(setting: Setting) -> PreTrainedModel:
    """The model of these stages: bf16, as on an accelerator."""
    shape = setting.pick("tiny", "qwen2-0.5b")
    return made(shape, dtype=torch.bfloat16, device=setting.device)


def check_syncs(setting: Setting, findings: Findings) -> None:
    """Count how often the host waits for the device in a forward pass; it must not each layer."""
    model = model_for(setting)
    n_layers = model.config.num_hidden_layers
    forest = Forest(model)
    try:
        n_trunk = setting.pick(40, 1000)
        trunk = prompt(n_trunk, model.config.vocab_size)
        forest.plant(trunk)
        counts: dict[str, Any] = {}
        for n_rows in setting.pick((1, 3), (1, 8)):
            paths = branches(forest, trunk, n_rows)
            counts[f"{n_rows} rows decode"] = _count(setting, forest, paths, [[5]] * n_rows)
            chunks = [[5]] * (n_rows - 1) + [trunk[: n_trunk // 2]]
            counts[f"{n_rows} rows, one prefills"] = _count(setting, forest, paths, chunks)
            forest.drop(paths)
        forest.clear()
    finally:
        forest.close()
    findings.figures["waits"] = counts
    if setting.device.type != "cuda":
        msg = "only CUDA tells when the host waits"
        raise Skipped(msg)
    for name, (n_waits, _) in counts.items():
        findings.at_most(f"waits in a pass, {name}", n_waits, n_layers - 1)


def check_copies(setting: Setting, findings: Findings) -> None:
    """Copies to CPU memory whose sources are overwritten at once, with products going on beside."""
    n = setting.pick(2**10, 2**24)
    for dtype in (torch.bfloat16, torch.int8):
        rows = torch.arange(n, device=setting.device).view(4, -1)
        source = {"whole": rows.to(dtype), "strided": rows.to(dtype)[:, ::2].clone()[:, 1:]}
        before = {name: t.cpu() for name, t in source.items()}
        square = torch.eye(setting.pick(8, 2048), device=setting.device)
        setting.wait()
        begun = time.perf_counter()
        copies = Copies.of(source)
        told_s = time.perf_counter() - begun
        source.clear()
        for _ in range(20):
            square = square @ square
        torch.zeros(2 * n, dtype=dtype, device=setting.device)
        found = copies.tensors()
        for name, tensor in before.items():
            findings.holds(
                "copies are bit-identical", ok=torch.equal(found[name], tensor), case=name
            )
        findings.figures[f"{dtype}"] = {
            "ms until the call returned": 1e3 * told_s,
            "ms until all was there": 1e3 * (time.perf_counter() - begun),
        }


def branches(forest: Forest, trunk: Sequence[int], n_rows: int) -> list[Path]:
    """Paths that decode over one trunk, each with a first token of its own."""
    paths = [forest.begin([*trunk, 10 + i]) for i in range(n_rows)]
    forest.feed(paths, [[10 + i] for i in range(n_rows)])
    return paths


def _count(
    setting: Setting, forest: Forest, paths: Sequence[Path], new: Sequence[Sequence[int]]
) -> tuple[int, list[str]]:
    """Waits of the second of two like passes, and where they were asked for."""
    forest.feed(paths, new)
    with warnings.catch_warnings(record=True) as found, _watched(setting):
        warnings.simplefilter("always")
        forest.feed(paths, new)
    waits = [w for w in found if "synchroniz" in str(w.message)]
    places = sorted({f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in waits})
    return len(waits), places


@contextmanager
def _watched(setting: Setting) -> Iterator[None]:
    if setting.device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_memory(setting: Setting, findings: Findings) -> None:
    """A release gives the allocator back what its receipt says."""
    model = model_for(setting)
    n_vocab = model.config.vocab_size
    trunk = prompt(setting.pick(40, 2000), n_vocab)
    with engine_on(model) as engine:
        run_together(engine, [ask(trunk, 1, call="trunk")])
        for i in range(2):  # the first round warms the libraries up
            ids = [*trunk, *prompt(setting.pick(20, 1500), n_vocab, seed=2)]
            run_together(engine, [ask(ids, 8, call="branch")])
            held = _requested(setting, engine)
            receipt = engine.kv.release("branch")
            fell = held - _requested(setting, engine)
            if i:
                findings.holds("the branch held something", ok=receipt.freed_bytes > 0)
                findings.at_most("bytes kept of a release", abs(fell - receipt.freed_bytes), 0)
        findings.figures |= {"released_bytes": receipt.freed_bytes, "fell_bytes": fell}
        engine.kv.clear()
        findings.at_most("bytes resident after all is released", engine.kv.usage().n_bytes, 0)


def _requested(setting: Setting, engine: Engine) -> int:
    """Bytes asked of the device's allocator, before its rounding; off CUDA the tree's own books."""
    gc.collect()
    usage = engine.kv.usage().n_bytes  # also: the step before is over
    setting.wait()
    if setting.device.type == "cuda":
        return int(torch.cuda.memory_stats(setting.device)["requested_bytes.all.current"])
    return usage


def check_exhaustion(setting: Setting, findings: Findings) -> None:
    """Where memory ends in a pass, that request fails and the tree is what it was."""
    model = model_for(setting)
    n_vocab = model.config.vocab_size
    trunk = prompt(setting.pick(40, 1000), n_vocab)
    with engine_on(model) as engine:
        run_together(engine, [ask(trunk, 4, call="trunk")])
        before = engine.kv.usage()
        long = [*trunk, *prompt(setting.pick(60, 8000), n_vocab, seed=5)]
        with engine.kv.pin("trunk"), _scarcity(setting, model):
            try:
                run_together(engine, [ask(long, 4)])
                failed = False
            except torch.OutOfMemoryError:
                failed = True
        setting.forget()
        after = engine.kv.usage()
        findings.figures["ran_out"] = failed
        if not failed:
            msg = "memory did not end as it was meant to"
            raise Skipped(msg)
        # A prompt that left the trunk in its middle has cut it in two: that may stay.
        found, wanted = ((u.n_bytes, u.n_tokens, u.n_paths) for u in (after, before))
        findings.holds("the tree is what it was", ok=found == wanted, case=f"{found} / {wanted}")
        engine.kv.check_integrity()
        ids = [*trunk, *prompt(5, n_vocab, seed=6)]
        (result,) = run_together(engine, [ask(ids, 4)])
        findings.holds("the trunk is still used", ok=result.n_reused_tokens == len(trunk))
        findings.holds("the engine goes on", ok=len(generate(model, [ids], 4)[0][0]) == 4)


@contextmanager
def _scarcity(setting: Setting, model: PreTrainedModel) -> Iterator[None]:
    """Too little memory for a long prompt: a few MiB more than now; off CUDA it is pretended."""
    if setting.device.type == "cuda":
        setting.forget()
        total = torch.cuda.get_device_properties(setting.device).total_memory
        reserved = torch.cuda.memory_reserved(setting.device)
        torch.cuda.set_per_process_memory_fraction((reserved + 32 * MIB) / total, setting.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, setting.device)
        return

    def end(_module: Any, _args: Any) -> None:
        msg = "pretended"
        raise torch.OutOfMemoryError(msg)

    layers = model.model.layers
    handle = layers[len(layers) // 2].register_forward_pre_hook(end)
    try:
        yield
    finally:
        handle.remove()
