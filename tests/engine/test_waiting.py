"""Calls that wait for their turn are released as running ones are; nobody can hang the engine."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    SamplingParams,
)
from sidequest_langchain.errors import EngineClosedError, RequestError
from sidequest_langchain.labels import StepLabel


def request(name: str, first: int, n: int = 12, **sampling: float) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=(first, 5, 7, 9),
        sampling=SamplingParams(max_tokens=n, ignore_eos=True, **sampling),
        label=StepLabel(call_id=f"call-{name}", branch=name),
    )


def submit(engine: Engine, *requests: GenerationRequest) -> list[queue.SimpleQueue[Event]]:
    sinks: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    for one, sink in zip(requests, sinks, strict=True):
        engine.submit(one, sink.put)
    return sinks


def last(sink: queue.SimpleQueue[Event]) -> Event:
    while True:
        event = sink.get(timeout=30)
        if isinstance(event, (Finished, Failed)):
            return event


@pytest.fixture
def narrow(make_engine: Callable[..., Engine]) -> Engine:
    """An engine that runs one request at a time: the others wait."""
    return make_engine(config=CacheConfig(max_running=1))


def test_a_waiting_call_that_is_released_leaves_nothing(narrow: Engine) -> None:
    sinks = submit(narrow, request("a", 20, 40), request("b", 30), request("c", 40))
    receipt = narrow.kv.release("b")
    assert (receipt.n_paths, receipt.n_deferred) == (1, 1)
    assert all(isinstance(last(sink), Finished) for sink in sinks)
    branches = {label.branch for info in narrow.kv.segments() for label in info.labels}
    assert branches == {"a", "c"}


def test_clearing_reaches_calls_that_wait(narrow: Engine) -> None:
    sinks = submit(narrow, request("a", 20, 40), request("b", 30), request("c", 40))
    assert narrow.kv.clear().n_paths == 3
    assert all(isinstance(last(sink), Finished) for sink in sinks)
    assert narrow.kv.usage().n_bytes == 0


def test_paths_are_numbered_in_the_order_of_submission(narrow: Engine) -> None:
    before = narrow.kv.serial
    sinks = submit(narrow, request("a", 20, 30), request("b", 30), request("c", 40))
    narrow.kv.usage()
    assert narrow.kv.serial == before + 3
    assert all(isinstance(last(sink), Finished) for sink in sinks)


def test_an_observer_that_exits_harms_nobody(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()

    def leave(receipt: object) -> None:
        raise SystemExit

    undo = engine.kv.observe(leave)
    sinks = submit(engine, request("a", 20), request("b", 30))
    engine.kv.release("a")
    assert all(isinstance(last(sink), Finished) for sink in sinks)
    undo()
    undo()
    engine.kv.check_integrity()
    assert isinstance(last(submit(engine, request("d", 50))[0]), Finished)


def test_a_call_from_the_engines_own_thread_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    errors: list[BaseException] = []

    def ask(receipt: object) -> None:
        try:
            list(engine.stream(request("z", 60)))
        except RequestError as error:
            errors.append(error)

    engine.kv.observe(ask)
    assert isinstance(last(submit(engine, request("a", 20))[0]), Finished)
    engine.kv.release("a")
    assert "its own thread" in str(errors[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_hanging(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.submit(request("a", 20), lambda event: None)
        except EngineClosedError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    done = threading.Event()
    status: list[int] = []

    def wait() -> None:
        status.append(os.waitpid(child, 0)[1])
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(20)
    assert status == [0]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1e-40}, {"temperature": 1.0, "top_p": 5e-324}]
)
def test_extreme_sampling_is_greedy(make_engine: Callable[..., Engine], sampling: dict) -> None:
    engine = make_engine()
    sinks = submit(engine, request("a", 20), request("b", 20, **sampling))
    greedy, extreme = (last(sink) for sink in sinks)
    assert isinstance(greedy, Finished)
    assert isinstance(extreme, Finished)
    assert extreme.result.token_ids == greedy.result.token_ids
