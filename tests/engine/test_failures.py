"""What fails reaches its caller as it was raised, leaves nothing behind, and disturbs nobody."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import Event, GenerationResult, TextDelta
from sidequest_langchain.errors import EngineClosedError, RequestCancelledError
from sidequest_langchain.kv import storage as storage_room
from sidequest_langchain.kv.tree import SegmentTree
from tests.engine import checks
from tests.engine.driving import (
    THREAD,
    Listener,
    ask,
    audit,
    held,
    ids,
    model_of,
    recorded,
    right_answer,
    run,
    run_together,
    stored,
    submit_all,
)
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

MakeEngine = Callable[..., Engine]
LLAMA = "llama"
POISON = 399


class Broken(Exception):
    """What the tests raise; nothing else does."""


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(model_of(LLAMA))


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors that anybody in this process can still reach."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask lazy objects
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(found.values())


def raising_on(token_id: int) -> Any:
    def hook(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if threading.current_thread().name == THREAD and token_id in kwargs["input_ids"]:
            raise Broken(token_id)

    return model_of(LLAMA).register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def failing_layer(
    when: Callable[[int], bool], error: Callable[[], BaseException], layer: int = 1
) -> Iterator[list[int]]:
    """Raise in a layer, the ones before it having stored their rows already.

    Args:
        when: Whether pass number `n` (from 1) fails.
        error: Makes what is raised.
        layer: Which layer fails.
    """
    passes: list[int] = []

    def fail(*_: Any) -> None:
        passes.append(len(passes) + 1)
        if when(passes[-1]):
            raise error()

    with before_layer(layer, fail):
        yield passes


@contextmanager
def before_layer(layer: int, act: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Let `act` see what a layer is given by the engine.

    Not by a hook: torch keeps what a hooked module was given in a closure, which lives as long
    as the traceback does.
    """
    module = model_of(LLAMA).model.layers[layer]
    original = module.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == THREAD:
            act(hidden)
        return original(hidden, *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory (not really)")


# -- an exception in the forward pass ----------------------------------------------------


@pytest.mark.parametrize("n_others", [0, 1, 3])
def test_a_request_that_breaks_the_pass_breaks_alone(engine: Engine, n_others: int) -> None:
    """It is found by running each alone; it fails in its prompt, the others decode on."""
    others = [ask(ids(9 + n, seed=n), 8) for n in range(n_others)]
    handle = raising_on(POISON)
    try:
        submitted = submit_all(engine, [*others, ask([*ids(8), POISON], 8)])
        outcomes = [listener.outcome() for listener, _ in submitted]
    finally:
        handle.remove()
    assert isinstance(outcomes[-1], Broken)
    for request, result in zip(others, outcomes[:-1], strict=True):
        assert isinstance(result, GenerationResult)
        checks.check_result(LLAMA, request, result)
    audit(engine, map(stored, others, outcomes[:-1]))  # type: ignore[arg-type]
    checks.check_answer(engine, LLAMA, ask([*ids(8), POISON], 6), n_reused=8 if n_others else 0)


def test_a_failure_while_decoding_comes_after_what_was_streamed(engine: Engine) -> None:
    answer = right_answer(LLAMA, ids(40), 12)
    handle = raising_on(answer[4])
    listener = Listener()
    try:
        engine.submit(ask(ids(40), 12), listener)
        with pytest.raises(Broken) as caught:
            listener.result()
    finally:
        handle.remove()
    assert listener.text == engine.tokenizer.decode(answer[:5])
    assert any(entry.name == "hook" for entry in caught.traceback), "its own traceback is lost"
    audit(engine, [])
    checks.check_answer(engine, LLAMA, ask(ids(40), 12), n_reused=0)


async def test_a_failure_reaches_an_async_stream(engine: Engine) -> None:
    handle = raising_on(POISON)
    try:
        async with asyncio.timeout(2):
            with pytest.raises(Broken):
                async for _ in engine.astream(ask([POISON], 5)):
                    pass
    finally:
        handle.remove()
    checks.check_answer(engine, LLAMA, ask([POISON], 5), n_reused=0)


@pytest.mark.parametrize("n_requests", [1, 3])
def test_a_failure_between_layers_leaves_them_equal(engine: Engine, n_requests: int) -> None:
    """Layer 0 has stored its row when layer 1 fails; the answer is right nevertheless."""
    trunk = ask(ids(20), 2)
    before = [stored(trunk, run(engine, trunk))]
    requests = [ask([*ids(20), *ids(5, seed=n)], 8) for n in range(n_requests)]
    with failing_layer(lambda n: n >= 4, lambda: Broken("layer 1")):
        for listener, _ in submit_all(engine, requests):
            assert isinstance(listener.outcome(), Broken)
        audit(engine, before)
    for request, result in zip(requests, run_together(engine, requests), strict=True):
        checks.check_result(LLAMA, request, result)


def test_a_failure_that_passes_is_not_noticed(engine: Engine) -> None:
    """A pass of several that fails once is made good by running each alone."""
    requests = [ask(ids(20, seed=n), 8) for n in range(3)]
    with failing_layer(lambda n: n == 4, lambda: Broken("once")):
        results = run_together(engine, requests)
    for request, result in zip(requests, results, strict=True):
        checks.check_result(LLAMA, request, result)
    audit(engine, map(stored, requests, results))


# -- out of memory -----------------------------------------------------------------------


@pytest.mark.parametrize("n_requests", [1, 3])
@pytest.mark.parametrize("with_idle", [False, True], ids=["nothing idle", "idle segments"])
def test_out_of_memory_while_the_error_is_held(
    engine: Engine, n_requests: int, with_idle: bool
) -> None:
    """Nothing that the pass computed lives on with the exception; a retry is right."""
    if with_idle:
        run(engine, ask(ids(30, seed=9), 4))
    requests = [ask(ids(40, seed=n), 12) for n in range(n_requests)]
    with failing_layer(lambda n: n >= 5, out_of_memory):
        submitted = submit_all(engine, requests)
        errors = [listener.outcome() for listener, _ in submitted]
    assert all(isinstance(error, torch.OutOfMemoryError) for error in errors)
    submitted.clear()
    audit(engine, [])
    n_bytes = live_tensor_bytes()
    errors.clear()
    assert n_bytes == live_tensor_bytes(), "the exception keeps tensors alive"
    for request, result in zip(requests, run_together(engine, requests), strict=True):
        checks.check_result(LLAMA, request, result)


def test_out_of_memory_is_met_by_releasing_what_is_idle(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    run(engine, ask(ids(30, seed=9), 4))
    request = ask(ids(40), 12)
    with failing_layer(lambda n: n == 5, out_of_memory):
        result = run(engine, request)
    checks.check_result(LLAMA, request, result)
    audit(engine, [stored(request, result)])
    assert any("out of memory" in record.message for record in caplog.records)


def test_the_failed_pass_is_let_go_before_it_is_run_again(engine: Engine) -> None:
    """On a full device its activations are just what the second try lacks."""
    run(engine, ask(ids(30, seed=9), 4))
    kept: list[weakref.ref[torch.Tensor]] = []
    alive_at_retry: list[bool] = []

    def act(hidden: torch.Tensor) -> None:
        if not kept:
            kept.append(weakref.ref(hidden))
            raise out_of_memory()
        alive_at_retry.append(kept[0]() is not None)

    with before_layer(1, act):
        result = run(engine, ask(ids(40), 3))
    assert result.token_ids == right_answer(LLAMA, ids(40), 3)
    assert alive_at_retry[0] is False


def in_each_layer(*at: int) -> list[tuple[str, int]]:
    """Every layer has storages of its own, as where layers differ."""
    return [("in each layer", n) for n in at]


def at_once(*at: int) -> list[tuple[str, int]]:
    """All layers of a segment lie in one storage."""
    return [("at once", n) for n in at]


def lay_out(patch: pytest.MonkeyPatch, layers: str) -> None:
    """Let segments to come have one storage, or two a layer."""
    if layers == "in each layer":
        patch.setattr(storage_room, "_is_even", lambda _: False)


@pytest.mark.parametrize(("layers", "at"), [*in_each_layer(1, 2, 3, 6, 9), *at_once(1, 2)])
def test_no_room_for_more_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layers: str, at: int
) -> None:
    """Storage number `at` cannot be made, when some layers have theirs already."""
    lay_out(monkeypatch, layers)
    run(engine, ask(ids(30, seed=9), 4))
    original, n_made = storage_room._resized, 0

    def resized(*args: Any) -> torch.Tensor:
        nonlocal n_made
        n_made += args[2] > 0
        if args[2] > 0 and n_made >= at:
            raise out_of_memory()
        return original(*args)

    monkeypatch.setattr(storage_room, "_resized", resized)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, ask(ids(40), 50, ignore_eos=True))
    monkeypatch.setattr(storage_room, "_resized", original)
    engine.kv.clear()
    audit(engine, [])
    checks.check_answer(engine, LLAMA, ask(ids(40), 6), n_reused=0)


@pytest.mark.parametrize(("layers", "at"), [*in_each_layer(1, 2, 3, 4, 6, 8), *at_once(1, 2)])
def test_no_room_to_split(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layers: str, at: int
) -> None:
    """A prompt leaves a segment in its middle, and copy number `at` cannot be made."""
    lay_out(monkeypatch, layers)
    first = ask(ids(30), 4)
    before = [stored(first, run(engine, first))]
    shown = engine.kv.segments()
    branch = ask([*ids(20), *ids(6, seed=1)], 4)
    fail_copy(monkeypatch, "begin", at)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, branch)
    monkeypatch.undo()
    audit(engine, before)
    assert engine.kv.segments() == shown
    checks.check_answer(engine, LLAMA, branch, n_reused=20)
    checks.check_answer(engine, LLAMA, ask(ids(30), 4), n_reused=30)


@pytest.mark.parametrize(("layers", "at"), [*in_each_layer(1, 2, 3, 4), *at_once(1)])
def test_no_room_to_close(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layers: str, at: int
) -> None:
    """A request ends, and copy number `at` without the room to grow cannot be made."""
    lay_out(monkeypatch, layers)
    first = ask(ids(30), 4)
    before = [stored(first, run(engine, first))]
    fail_copy(monkeypatch, "commit", at)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, ask([*ids(30), *ids(6, seed=1)], 4))
    monkeypatch.undo()
    audit(engine, before)
    checks.check_answer(engine, LLAMA, ask([*ids(30), *ids(6, seed=1)], 4), n_reused=30)


@pytest.mark.parametrize(("layers", "at"), [*in_each_layer(1, 4, 5, 8, 9, 12), *at_once(1, 2, 3)])
def test_no_room_to_merge(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layers: str, at: int
) -> None:
    """Two requests computed a common head each: one of them fails as it gives up its own."""
    lay_out(monkeypatch, layers)
    requests = [ask([*ids(10), *ids(6, seed=n)], 3 + n) for n in (1, 2)]
    fail_copy(monkeypatch, "commit", at)
    outcomes = [listener.outcome() for listener, _ in submit_all(engine, requests)]
    monkeypatch.undo()
    [failed] = [r for r, o in zip(requests, outcomes, strict=True) if isinstance(o, BaseException)]
    [(done, result)] = [
        (r, o) for r, o in zip(requests, outcomes, strict=True) if isinstance(o, GenerationResult)
    ]
    checks.check_result(LLAMA, done, result)
    audit(engine, [stored(done, result)])
    checks.check_answer(engine, LLAMA, ask(failed.prompt_ids, 6), n_reused=10)
    checks.check_answer(engine, LLAMA, ask(done.prompt_ids, 6), n_reused=16)


def fail_copy(patch: pytest.MonkeyPatch, act: str, at: int) -> None:
    """Let copy number `at` of rows that an act of the tree makes fail, and none after it."""
    original, scarce = getattr(SegmentTree, act), ScarceRows(at)

    def failing(self: SegmentTree, *args: Any, **given: Any) -> Any:
        with scarce:
            return original(self, *args, **given)

    patch.setattr(SegmentTree, act, failing)


class ScarceRows(TorchFunctionMode):
    """The copy of rows number `at` (from 1) meets a full device; those after it do not."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._n_left = at

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.clone, torch.empty) and made.numel():
            self._n_left -= 1
            if self._n_left == 0:
                raise out_of_memory()
        return made


# -- what else may raise -----------------------------------------------------------------


@pytest.mark.parametrize("n_others", [0, 2])
def test_a_request_that_cannot_begin(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, n_others: int
) -> None:
    """The split of a segment fails while a request is admitted: only that one fails."""
    original = SegmentTree.begin

    def begin(self: SegmentTree, scope: str, prompt: Any, label: Any, **given: Any) -> Any:
        if label.call_id == "broken":
            raise Broken
        return original(self, scope, prompt, label, **given)

    monkeypatch.setattr(SegmentTree, "begin", begin)
    others = [ask(ids(20, seed=n), 6) for n in range(n_others)]
    submitted = submit_all(engine, [ask(ids(9), call="broken"), *others])
    assert isinstance(submitted[0][0].outcome(), Broken)
    for request, (listener, _) in zip(others, submitted[1:], strict=True):
        checks.check_result(LLAMA, request, listener.result())


@pytest.mark.parametrize("at", [TextDelta, GenerationResult])
def test_a_sink_that_raises_ends_its_own_request(engine: Engine, at: type) -> None:
    told: list[Event] = []

    def sink(event: Event) -> None:
        told.append(event)
        if at is TextDelta or not isinstance(event, TextDelta):
            raise Broken

    other = ask(ids(20), 6)
    listener = Listener()
    with recorded(model_of(LLAMA)) as passes:
        with held(engine):
            engine.submit(ask(ids(9, seed=2), 30, ignore_eos=True, call="deaf"), sink)
            engine.submit(other, listener)
        checks.check_result(LLAMA, other, listener.result())
        engine.kv.usage()
    if at is TextDelta:
        assert max(len(step.positions) for step in passes[3:]) == 1, "it went on for nobody"
        audit(engine, [stored(other, listener.result())])
    engine.kv.check_integrity()
    checks.check_answer(engine, LLAMA, ask(ids(9, seed=2), 6), n_reused=0 if at is TextDelta else 9)


def test_an_observer_that_raises_changes_nothing(engine: Engine) -> None:
    def observer(receipt: Any) -> None:
        raise Broken

    run(engine, ask(ids(9), 3, call="idle"))
    undo = engine.kv.observe(observer)
    assert engine.kv.release("idle").n_paths == 1
    requests = [ask(ids(20, seed=n), 8, call=f"busy{n}") for n in range(2)]
    with recorded(model_of(LLAMA), lambda n: engine.kv.release("busy0") if n == 3 else None):
        results = run_together(engine, requests)
    undo()
    for request, result in zip(requests, results, strict=True):
        checks.check_result(LLAMA, request, result)
    audit(engine, [stored(requests[1], results[1])])


# -- the end of an engine ----------------------------------------------------------------


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_closed_while_running() -> None:
    engine = Engine(model_of(LLAMA), byte_tokenizer())
    requests = [ask(ids(9 + n, seed=n), 300, ignore_eos=True) for n in range(3)]
    with recorded(model_of(LLAMA), lambda n: time.sleep(0.01)):
        submitted = submit_all(engine, requests)
        time.sleep(0.1)
        engine.close()
    for listener, ticket in submitted:
        assert isinstance(listener.outcome(), EngineClosedError)
        ticket.cancel()
    assert engine.is_closed
    for use in (
        lambda: run(engine, ask(ids(9))),
        engine.kv.usage,
        engine.kv.segments,
        lambda: engine.kv.release("x"),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            use()
    engine.close()
    assert engine_threads() == []
    model = model_of(LLAMA)
    assert model.config._attn_implementation == "sdpa"


def test_a_closed_engine_holds_no_memory() -> None:
    model = tiny_model(LLAMA)
    engine = Engine(model, byte_tokenizer())
    n_bytes = live_tensor_bytes()
    run(engine, ask(ids(200), 4))
    assert live_tensor_bytes() - n_bytes >= 200 * 512
    engine.close()
    assert live_tensor_bytes() <= n_bytes


async def test_closed_under_async_streams() -> None:
    engine = Engine(model_of(LLAMA), byte_tokenizer())

    async def listen() -> None:
        async for _ in engine.astream(ask(ids(9), 400, ignore_eos=True)):
            pass

    with recorded(model_of(LLAMA), lambda n: time.sleep(0.01)):
        tasks = [asyncio.create_task(listen()) for _ in range(3)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        async with asyncio.timeout(5):
            found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, EngineClosedError) for error in found)


@pytest.mark.parametrize("is_running", [False, True])
def test_an_engine_that_nobody_holds_is_gone(is_running: bool) -> None:
    """Its thread, its tree and its tensors, also when a request is under way."""
    model = tiny_model(LLAMA)
    n_bytes = live_tensor_bytes()
    engine = Engine(model, byte_tokenizer())
    run(engine, ask(ids(200), 4))
    refs = [weakref.ref(thing) for thing in (engine, engine._core, engine._core.tree, engine.kv)]
    listener = Listener()
    if is_running:
        engine.submit(ask(ids(9), 10_000, ignore_eos=True), listener)
    assert len(engine_threads()) == 1
    del engine
    gc.collect()
    assert engine_threads() == []
    assert [ref() for ref in refs] == [None] * 4
    if is_running:
        assert isinstance(listener.outcome(), EngineClosedError)
        listener.events.clear()
    assert live_tensor_bytes() <= n_bytes


def test_a_stream_keeps_its_engine(make_engine: MakeEngine) -> None:
    def answer() -> Iterator[Any]:
        return Engine(model_of(LLAMA), byte_tokenizer()).stream(ask(ids(40), 12))

    *_, last = answer()
    assert last.result.token_ids == right_answer(LLAMA, ids(40), 12)
    gc.collect()
    assert engine_threads() == []


def test_cancelled_requests_say_so(engine: Engine) -> None:
    with recorded(model_of(LLAMA), lambda n: ticket.cancel() if n == 2 else None):
        [(listener, ticket)] = submit_all(engine, [ask(ids(9), 50, ignore_eos=True)])
        with pytest.raises(RequestCancelledError, match="cancelled"):
            listener.result()
