"""Drives the engine, one forward pass over a tree, and plain transformers beside them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from sidequest_langchain.kv.segment import Path
from sidequest_langchain.kv.step_plan import Row
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.labels import PathSelector, StepLabel

from .making import tokenizer_for

_numbers = itertools.count()
PATIENCE_S = 120.0


@contextmanager
def engine_on(model: PreTrainedModel, *, prefill_chunk: int | None = None) -> Iterator[Engine]:
    """An engine over a model, closed at the end."""
    config = CacheConfig(prefill_chunk=prefill_chunk)
    engine = Engine(model, tokenizer_for(model), config=config, name="gpu-check")
    try:
        yield engine
    finally:
        engine.close()


def ask(prompt: Sequence[int], n: int, *, call: str | None = None) -> GenerationRequest:
    """A greedy request for exactly `n` tokens."""
    return GenerationRequest(
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=n, ignore_eos=True),
        label=StepLabel(call_id=call or f"call-{next(_numbers)}"),
    )


def run_together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """The results of requests that are handed in between two steps, so that they are a batch.

    Raises:
        Exception: What the first of them failed with.
    """
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    gate = threading.Event()
    engine._core.call(gate.wait)
    try:
        for request, inbox in zip(requests, inboxes, strict=True):
            engine.submit(request, inbox.put)
    finally:
        gate.set()
    return [_last(inbox) for inbox in inboxes]


def _last(inbox: queue.SimpleQueue[Event]) -> GenerationResult:
    while True:
        event = inbox.get(timeout=PATIENCE_S)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            return event.result


class Forest:
    """A tree that grows by forward passes of one model, without the engine's thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.adapter = ModelAdapter(model)
        self.tree = SegmentTree(self.adapter.layout)

    def close(self) -> None:
        """Give the model its own attention back."""
        self.adapter.close()

    def begin(self, ids: Sequence[int]) -> Path:
        """A path at the longest resident head of `ids`."""
        return self.tree.begin("gpu-check", ids, StepLabel(call_id=f"call-{next(_numbers)}"))

    def feed(self, paths: Sequence[Path], new: Sequence[Sequence[int]]) -> Tensor:
        """One pass over new tokens of every path; fp32 logits of their last ones, `[R, V]`."""
        rows = []
        for path, ids in zip(paths, new, strict=True):
            self.tree.reserve(path, len(ids))
            rows.append(Row(tip=path.tip, n_new=len(ids), position=path.tip.end))
        logits = self.adapter.forward(rows, [token for ids in new for token in ids])
        for path, ids in zip(paths, new, strict=True):
            self.tree.extend(path, ids)
        return logits

    def plant(self, ids: Sequence[int], *, chunk: int = 1024) -> Path:
        """A closed path that holds all of `ids`."""
        path = self.begin(ids)
        for at in range(path.n_reused, len(ids), chunk):
            self.feed([path], [ids[at : at + chunk]])
        self.tree.commit(path)
        return path

    def drop(self, paths: Sequence[Path]) -> None:
        """Undo paths that still run."""
        for path in paths:
            self.tree.discard(path)

    def clear(self) -> None:
        """Let every path go."""
        self.drop([path for path in self.tree.paths.values() if path.is_running])
        self.tree.release(PathSelector(), reason="cleared")


class _Clock(StoppingCriteria):
    """Stops never; notes when each token of `generate` was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], n: int
) -> tuple[list[list[int]], list[float]]:
    """Exactly `n` greedy tokens for prompts of one length by `model.generate`.

    Returns:
        The tokens, and the seconds that each of them took: the first one with the prefill.
    """
    batch = torch.tensor([list(ids) for ids in prompts], device=model.device)
    clock = _Clock()
    begun = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=n,
            eos_token_id=model.config.vocab_size,  # no token has it: none ends the answer
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    times = [begun, *clock.times]
    tokens: list[list[int]] = out[:, batch.shape[1] :].tolist()
    return tokens, [b - a for a, b in itertools.pairwise(times)]


@torch.no_grad()
def plain_logits(model: PreTrainedModel, ids: Sequence[int], n_last: int) -> Tensor:
    """fp32 logits of the last `n_last` tokens by a fresh pass without a cache, `[n_last, V]`."""
    batch = torch.tensor([list(ids)], device=model.device)
    logits: Tensor = model(input_ids=batch, use_cache=False, logits_to_keep=n_last).logits[0]
    return logits.float()
