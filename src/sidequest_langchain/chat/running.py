"""Running the samples of one call at the same time, from sync and from async code.

It must not know messages. Whatever ends the wait (an error of one sample, a cancelled task, a
keyboard interrupt) cancels them all.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

from sidequest_langchain.engine.engine import Engine, Ticket
from sidequest_langchain.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
)


def run_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """The results of `requests`, in their order.

    Raises:
        Exception: What the first request that failed, failed with.
    """
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()

    def sink(sample: int, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            events.put((sample, event))

    tickets: list[Ticket] = []
    results: dict[int, GenerationResult] = {}
    try:
        for sample, request in enumerate(requests):
            tickets.append(engine.submit(request, partial(sink, sample)))
        while len(results) < len(requests):
            sample, event = events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                results[sample] = event.result
    finally:
        for ticket in tickets:
            ticket.cancel()
    return [results[sample] for sample in range(len(requests))]


async def arun_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Like `run_all`, without blocking the event loop."""
    if len(requests) == 1:
        return [await _arun(engine, requests[0])]
    tasks = [asyncio.ensure_future(_arun(engine, request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _arun(engine: Engine, request: GenerationRequest) -> GenerationResult:
    async with aclosing(engine.astream(request)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return event.result
    msg = "the engine's stream ended without a result"
    raise RuntimeError(msg)
