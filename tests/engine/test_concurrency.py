"""Many requests at a time: none waits for ever, none disturbs another, cancelled ones stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import (
    Event,
    Finished,
    GenerationRequest,
    GenerationResult,
    TextDelta,
)
from sidequest_langchain.errors import RequestCancelledError
from tests.engine import checks
from tests.engine.driving import (
    Listener,
    Pass,
    ask,
    audit,
    held,
    ids,
    model_of,
    n_fed,
    recorded,
    right_answer,
    run,
    run_together,
    stored,
    submit_all,
)

MakeEngine = Callable[..., Engine]
LLAMA = "llama"


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(model_of(LLAMA))


def slowly(n: int) -> None:
    """Let a pass take so long that others get to act between two of them."""
    time.sleep(0.02)


async def collect(engine: Engine, request: GenerationRequest) -> GenerationResult:
    text = ""
    async for event in engine.astream(request):
        if isinstance(event, TextDelta):
            text += event.text
        else:
            assert event.result.text == text
            return event.result
    pytest.fail("the stream ended without a result")


async def first_events(events: AsyncIterator[TextDelta | Finished], n: int = 2) -> None:
    for _ in range(n):
        await anext(events)


# -- many at a time ----------------------------------------------------------------------


async def test_64_streams_finish_as_if_alone(engine: Engine) -> None:
    requests = [ask([*ids(12), *ids(3 + n % 9, seed=n)], 4 + n % 5) for n in range(64)]
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, result in zip(requests, results, strict=True):
        checks.check_result(LLAMA, request, result)
    audit(engine, map(stored, requests, results))


def test_64_streams_from_threads(engine: Engine) -> None:
    requests = [ask([*ids(12), *ids(3 + n % 9, seed=n)], 4) for n in range(64)]
    results: dict[int, GenerationResult] = {}

    def serve(n: int) -> None:
        results[n] = run(engine, requests[n])

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for n, request in enumerate(requests):
        checks.check_result(LLAMA, request, results[n])
    audit(engine, [stored(request, results[n]) for n, request in enumerate(requests)])


def test_more_than_may_run_wait_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(max_running=3))
    requests = [ask(ids(6, seed=n), 3, ignore_eos=True, call=str(n)) for n in range(10)]
    order: list[str] = []

    def listen(name: str) -> tuple[Listener, Callable[[Event], None]]:
        listener = Listener()

        def sink(event: Event) -> None:
            if isinstance(event, Finished):
                order.append(name)
            listener(event)

        return listener, sink

    listeners = []
    with recorded(model_of(LLAMA)) as passes:
        with held(engine):
            for request in requests:
                listener, sink = listen(request.label.call_id)
                engine.submit(request, sink)
                listeners.append(listener)
        for listener in listeners:
            listener.result()
    assert order == [str(n) for n in range(10)]
    assert max(sum(b <= a for a, b in pairs(step)) for step in passes) < 3


def pairs(step: Pass) -> list[tuple[int, int]]:
    """Neighbours in a pass's positions; another row begins where they do not go up."""
    return list(zip(step.positions, step.positions[1:], strict=False))


def test_simultaneous_requests_compute_their_common_head_once(engine: Engine) -> None:
    requests = [ask([*ids(60), *ids(n, seed=n)], 3, ignore_eos=True) for n in range(1, 9)]
    with recorded(model_of(LLAMA)) as passes:
        results = run_together(engine, requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == right_answer(LLAMA, request.prompt_ids, 3)
    assert [result.n_reused_tokens for result in results] == [0] + 7 * [60]
    # 60 once, the suffixes of 1..8, and two of three generated tokens each are fed.
    assert n_fed(passes) == 60 + 36 + 8 * 2
    audit(engine, map(stored, requests, results))


@pytest.mark.parametrize("prefill_chunk", [None, 20])
def test_simultaneous_equal_requests(make_engine: MakeEngine, prefill_chunk: int | None) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(prefill_chunk=prefill_chunk))
    requests = [ask(ids(40), 5, ignore_eos=True) for _ in range(5)]
    with recorded(model_of(LLAMA)) as passes:
        results = run_together(engine, requests)
    assert {result.token_ids for result in results} == {right_answer(LLAMA, ids(40), 5)}
    # 40 once; for each of the others the last token of the prompt; 4 generated ones each.
    assert n_fed(passes) == 40 + 4 + 5 * 4
    audit(engine, [stored(requests[0], results[0])])


def test_the_head_of_another_scope_is_not_waited_for(engine: Engine) -> None:
    requests = [ask(ids(40), 3, scope=str(n)) for n in range(3)]
    with recorded(model_of(LLAMA)) as passes:
        results = run_together(engine, requests)
    assert len(passes[0].token_ids) == 3 * 40
    assert [result.n_reused_tokens for result in results] == [0, 0, 0]


def test_one_that_waits_for_a_head_goes_on_when_its_owner_is_cancelled(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(prefill_chunk=7))
    requests = [ask([*ids(60), *ids(5, seed=n)], 4) for n in range(3)]
    with recorded(model_of(LLAMA), lambda n: tickets[0].cancel() if n == 4 else None):
        submitted = submit_all(engine, requests)
        tickets = [ticket for _, ticket in submitted]
        first, *others = [listener.outcome() for listener, _ in submitted]
    assert isinstance(first, RequestCancelledError)
    for request, result in zip(requests[1:], others, strict=True):
        assert isinstance(result, GenerationResult)
        checks.check_result(LLAMA, request, result)
    audit(engine, map(stored, requests[1:], others))


# -- cancelling --------------------------------------------------------------------------


def test_a_cancelled_row_is_in_no_later_pass(engine: Engine) -> None:
    """Cancelled as pass 5 begins, by the pass's own thread: pass 6 is without them."""
    requests = [ask(ids(9, seed=n), 12, ignore_eos=True) for n in range(4)]

    def cancel(n: int) -> None:
        if n == 5:
            tickets[1].cancel()
            tickets[3].cancel()

    with recorded(model_of(LLAMA), cancel) as passes:
        submitted = submit_all(engine, requests)
        tickets = [ticket for _, ticket in submitted]
        outcomes = [listener.outcome() for listener, _ in submitted]
    assert [len(step.token_ids) for step in passes] == [36, 4, 4, 4, 4] + 7 * [2]
    alive = [(requests[n], outcomes[n]) for n in (0, 2)]
    for request, result in alive:
        assert isinstance(result, GenerationResult)
        assert result.token_ids == right_answer(LLAMA, request.prompt_ids, 12)
    assert all(isinstance(outcomes[n], RequestCancelledError) for n in (1, 3))
    audit(engine, [stored(request, result) for request, result in alive])  # type: ignore[arg-type]


def test_cancelling_again_or_late_changes_nothing(engine: Engine) -> None:
    listener = Listener()
    ticket = engine.submit(ask(ids(9), 3), listener)
    listener.result()
    before = engine.kv.usage()
    for _ in range(2):
        ticket.cancel()
    run(engine, ask(ids(9), 3))
    assert len([e for e in listener.events if not isinstance(e, TextDelta)]) == 1
    assert engine.kv.usage().n_bytes == before.n_bytes


async def stop_by_cancel(engine: Engine, request: GenerationRequest) -> None:
    started = asyncio.Event()

    async def listen() -> None:
        async for _ in engine.astream(request):
            started.set()

    task = asyncio.create_task(listen())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def stop_by_timeout(engine: Engine, request: GenerationRequest) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(engine, request), 0.15)


async def stop_by_aclose(engine: Engine, request: GenerationRequest) -> None:
    events = engine.astream(request)
    await first_events(events)
    await events.aclose()  # type: ignore[attr-defined]


async def stop_by_close(engine: Engine, request: GenerationRequest) -> None:
    events = engine.stream(request)
    for _ in range(2):
        next(events)
    events.close()  # type: ignore[attr-defined]


async def stop_by_break(engine: Engine, request: GenerationRequest) -> None:
    for _ in engine.stream(request):
        break


@pytest.mark.parametrize(
    "stop", [stop_by_cancel, stop_by_timeout, stop_by_aclose, stop_by_close, stop_by_break]
)
async def test_abandoned_streams_stop_within_a_step(
    engine: Engine, stop: Callable[[Engine, GenerationRequest], object]
) -> None:
    trunk = ask(ids(20), 2)
    before = [stored(trunk, run(engine, trunk))]
    prompt = [*ids(20), *ids(6, seed=3)]
    with recorded(model_of(LLAMA), slowly) as passes:
        await stop(engine, ask(prompt, 400, ignore_eos=True))  # type: ignore[misc]
        n_passes = len(passes)
        assert n_passes < 50
        begun = time.perf_counter()
        result = run(engine, ask(ids(5, seed=8), 1))
        assert time.perf_counter() - begun < 1
    # At most the pass that ran, and the one of the other request.
    assert len(passes) <= n_passes + 2
    assert passes[-1].token_ids == tuple(ids(5, seed=8))
    audit(engine, [*before, stored(ask(ids(5, seed=8), 1), result)])
    checks.check_answer(engine, LLAMA, ask(prompt, 6), n_reused=20)


async def test_half_of_64_are_cancelled(engine: Engine) -> None:
    requests = [ask([*ids(20), *ids(3, seed=n)], 12) for n in range(64)]
    tasks = [asyncio.create_task(collect(engine, request)) for request in requests]

    async def cancel() -> None:
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()

    with recorded(model_of(LLAMA), slowly):
        async with asyncio.timeout(60):
            results, _ = await asyncio.gather(
                asyncio.gather(*tasks, return_exceptions=True), cancel()
            )
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    for request, result in zip(requests[1::2], results[1::2], strict=True):
        checks.check_result(LLAMA, request, result)
    audit(engine, map(stored, requests[1::2], results[1::2]))


# -- the event loop ----------------------------------------------------------------------


async def test_the_event_loop_runs_on_meanwhile(engine: Engine) -> None:
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - begun)

    heart = asyncio.create_task(beat())
    begun = time.perf_counter()
    with recorded(model_of(LLAMA), slowly):
        requests = [ask(ids(9, seed=n), 30, ignore_eos=True) for n in range(8)]
        await asyncio.gather(*(collect(engine, request) for request in requests))
    took = time.perf_counter() - begun
    heart.cancel()
    assert took > 30 * 0.02
    assert max(gaps) < took / 3, "the loop stood still"


async def test_two_event_loops_share_an_engine(engine: Engine) -> None:
    requests = [ask(ids(9, seed=n), 6) for n in range(4)]

    async def pair(start: int) -> list[GenerationResult]:
        return await asyncio.gather(*(collect(engine, r) for r in requests[start : start + 2]))

    elsewhere = asyncio.to_thread(asyncio.run, pair(2))
    here, there = await asyncio.gather(pair(0), elsewhere)
    for request, result in zip(requests, [*here, *there], strict=True):
        checks.check_result(LLAMA, request, result)


def test_an_event_loop_that_closed_takes_nobody_along(engine: Engine) -> None:
    """Its requests end; the engine serves on, for other loops too."""

    async def leave() -> None:
        events = engine.astream(ask(ids(9), 200, ignore_eos=True))
        await first_events(events, 1)
        abandoned.append(events)

    abandoned: list[object] = []
    with recorded(model_of(LLAMA), slowly):
        asyncio.run(leave())
        abandoned.clear()
        checks.check_answer(engine, LLAMA, ask(ids(30, seed=4), 3), n_reused=0)
        assert len(engine._core._scheduler.running) == 0
