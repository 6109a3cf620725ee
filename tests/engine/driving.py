"""Drives an engine as its tests need it: ask, run together, hold, record, look inside.

It must not know LangChain, nor what is right: that is `tests.support.oracle`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from sidequest_langchain.engine.engine import Engine, Ticket
from sidequest_langchain.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    TextDelta,
)
from sidequest_langchain.labels import StepLabel
from tests.support import oracle
from tests.support.tiny import tiny_model

THREAD = "sidequest-engine"
PATIENCE_S = 150.0
"""Longest wait for anything; only a hang lasts so long."""

_call_numbers = itertools.count()


def ids(n: int, seed: int = 0) -> list[int]:
    """`n` token ids without a pattern; the sequences of two seeds differ in every place."""
    return [(17 * i * i + 5 * i + 3 + 37 * seed) % 400 for i in range(n)]


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    """One tiny model a family for all tests that do not change it."""
    return tiny_model(family)


@functools.cache
def _greedy(family: str, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(oracle.greedy(model_of(family), prompt, n))


def right_answer(family: str, prompt: Sequence[int], n: int) -> tuple[int, ...]:
    """What `model_of(family)` answers by plain `generate`; each question is computed once."""
    return _greedy(family, tuple(prompt), n)


@functools.cache
def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of K/V of one token, measured at the cache that transformers itself fills."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.nbytes for t in tensors) // 3


def ask(
    prompt: Sequence[int],
    n: int | None = 8,
    *,
    call: str | None = None,
    scope: str = "",
    thread: str | None = None,
    branch: str | None = None,
    constraint: Any = None,
    **sampling: Any,
) -> GenerationRequest:
    """A request for up to `n` tokens, greedy unless `sampling` says otherwise."""
    call = call if call is not None else f"call-{next(_call_numbers)}"
    return GenerationRequest(
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=n, **sampling),
        label=StepLabel(call_id=call, thread_id=thread, branch=branch),
        scope=scope,
        constraint=constraint,
    )


def run(engine: Engine, request: GenerationRequest) -> GenerationResult:
    """The result of one request, alone."""
    *_, last = engine.stream(request)
    assert isinstance(last, Finished)
    return last.result


@dataclass
class Listener:
    """A sink that keeps what it is told, until somebody asks."""

    events: list[Event] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, TextDelta):
            self.is_over.set()

    def outcome(self) -> GenerationResult | BaseException:
        """The result or the error; waits."""
        assert self.is_over.wait(PATIENCE_S), "the request neither finished nor failed"
        last = self.events[-1]
        return last.error if isinstance(last, Failed) else last.result  # type: ignore[union-attr]

    def result(self) -> GenerationResult:
        """The result; raises what the request failed with."""
        outcome = self.outcome()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))


def submit_all(
    engine: Engine, requests: Iterable[GenerationRequest]
) -> list[tuple[Listener, Ticket]]:
    """Hand all requests in between two steps, so that they are batched from the first on."""
    submitted = []
    with held(engine):
        for request in requests:
            listener = Listener()
            submitted.append((listener, engine.submit(request, listener)))
    return submitted


def run_together(engine: Engine, requests: Iterable[GenerationRequest]) -> list[GenerationResult]:
    """The results of requests that run in one batch."""
    return [listener.result() for listener, _ in submit_all(engine, requests)]


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Hold the engine's thread at a step boundary."""
    reached, gate = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        gate.wait(PATIENCE_S)

    engine._core.call(wait)
    assert reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        gate.set()


@dataclass(frozen=True)
class Pass:
    """What one forward pass of the engine was fed."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]


@contextmanager
def recorded(
    model: PreTrainedModel, during: Callable[[int], None] = lambda n: None
) -> Iterator[list[Pass]]:
    """Record the engine's forward passes; plain ones, from other threads, are left out.

    Args:
        model: Hooked until the block ends.
        during: Called in the engine's thread as pass number `n` (from 1) begins; may raise.
    """
    passes: list[Pass] = []

    def hook(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if threading.current_thread().name == THREAD:
            tokens, positions = kwargs["input_ids"][0], kwargs["position_ids"][0]
            passes.append(Pass(tuple(tokens.tolist()), tuple(positions.tolist())))
            during(len(passes))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def n_fed(passes: Iterable[Pass]) -> int:
    """Tokens fed in all passes."""
    return sum(len(step.token_ids) for step in passes)


def resident(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The ids stored on each path, root to tip, by call id."""
    tree = engine._core.tree

    def look() -> dict[str, tuple[int, ...]]:
        return {
            path.label.call_id: tuple(
                token_id for segment in path.tip.path() for token_id in segment.token_ids
            )
            for path in tree.paths.values()
        }

    return engine._core.call(look).result(PATIENCE_S)


def stored(request: GenerationRequest, result: GenerationResult) -> tuple[int, ...]:
    """The ids that must be resident once a request has ended.

    The last token sampled is never fed, be it the end-of-turn token or the last of the length;
    a token that reaches past a stop string is not kept.
    """
    n_sampled = len(request.prompt_ids) + result.n_generated_tokens - 1
    return (*request.prompt_ids, *result.kept_ids)[:n_sampled]


def n_distinct(paths: Iterable[Sequence[int]]) -> int:
    """Rows that paths need when each distinct head is stored once: the nodes of their trie."""
    heads = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    return len(heads)


def longest_head(prompt: Sequence[int], paths: Iterable[Sequence[int]]) -> int:
    """Tokens of a prompt that are a head of some path."""
    return max(n for path in paths for n in range(len(prompt) + 1) if prompt[:n] == path[:n])


def audit(engine: Engine, paths: Iterable[Sequence[int]] | None = None) -> None:
    """Check an idle engine's books against the tensors that are really there.

    Args:
        engine: Idle.
        paths: Ids of all paths that must be resident, and no other row.
    """
    engine.kv.check_integrity()
    tree, usage = engine._core.tree, engine.kv.usage()
    for segment in engine._core.call(lambda: list(tree.segments())).result(PATIENCE_S):
        lengths = {t.shape[1] for t in (*segment.keys, *segment.values)}
        assert lengths == {len(segment.token_ids)}, "a layer has other rows than tokens"
    assert usage.n_bytes == usage.n_tokens * token_bytes(engine._core.adapter.model)
    assert oracle.storage_bytes(tree) == usage.n_bytes, "the books differ from the storages"
    if paths is not None:
        assert usage.n_tokens == n_distinct(paths)
