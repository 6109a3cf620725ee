"""Puts events on LangChain's callback bus: other handlers' `on_custom_event`, `astream_events`.

A handler is never given the callback manager of the run it observes. The manager becomes known
when something runs *inside* a node (a model call, a tool, a subgraph, one of our helpers): then
it is the `callbacks` of the running config. Until then events wait here, in order. It must not
know what the events mean.

Observers of a handler are told everything. What never comes on the bus:
* the events of a run in which nothing ever ran inside a node: nobody is known to tell;
* releases at the end of a run, and those the engine gets to only after it: the bus ends with
  the run;
* what an asynchronous handler is still awaiting when its event loop is closed.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManager,
    BaseCallbackHandler,
    BaseCallbackManager,
    CallbackManager,
)
from langchain_core.callbacks.base import RunManagerMixin

from sidequest_langchain.graph.events import KVEvent

T = TypeVar("T")

MAX_WAITING = 4096
"""Events kept for a run in which nothing ever ran inside a node; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that an event is reported under."""

    run_id: UUID
    graph_run_id: UUID | None = None
    """The graph whose node it is: handlers bound to a subgraph see that subgraph's events."""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Lane(Generic[T]):
    """Items that one thread at a time takes, in order; nobody waits for anybody.

    Whoever finds another at work leaves the items to it.
    """

    def __init__(self) -> None:
        self.waiting: deque[T] = deque(maxlen=MAX_WAITING)
        self._is_busy = threading.Lock()

    def run(self, take: Callable[[T], None]) -> None:
        """Take what waits, unless another is at it."""
        while self.waiting and self._is_busy.acquire(blocking=False):
            try:
                while self.waiting:
                    take(self.waiting.popleft())
            finally:
                self._is_busy.release()

    async def arun(self, take: Callable[[T], Any]) -> None:
        """The same for a `take` that is awaited."""
        while self.waiting and self._is_busy.acquire(blocking=False):
            try:
                while self.waiting:
                    await take(self.waiting.popleft())
            finally:
                self._is_busy.release()


class EventBus:
    """Delivers the events of one root run, in order, each once, without ever waiting.

    A synchronous graph's handlers are called where the event happens, or in whichever thread
    is delivering already. An asynchronous graph's are called from its event loop: coroutines
    by a task on it, plain functions in its executor unless they are inline.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._loop = _running_loop()
        self._managers: dict[UUID | None, BaseCallbackManager] = {}
        self._first: BaseCallbackManager | None = None
        self._events: Lane[tuple[KVEvent | None, Origin]] = Lane()
        self._threaded: dict[int, Lane[Callable[[], Any]]] = {}
        """What handlers in the executor have yet to take, by the identity of the handler."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def knows(self, graph_run_id: UUID | None) -> bool:
        """Whether the handlers of this graph are known already."""
        return graph_run_id in self._managers

    def capture(self, graph_run_id: UUID | None, manager: BaseCallbackManager) -> None:
        """Learn the handlers of a graph from the config of something that runs in a node."""
        self._managers[graph_run_id] = manager
        self._first = self._first or manager

    def forget(self, graph_run_id: UUID) -> None:
        """A graph's run has ended: its handlers are not needed once its events are delivered."""
        if graph_run_id in self._managers:
            self._events.waiting.append((None, Origin(graph_run_id, graph_run_id)))

    def put(self, event: KVEvent, origin: Origin) -> None:
        """Queue an event; `flush` delivers it."""
        if not self._is_closed:
            self._events.waiting.append((event, origin))

    def flush(self) -> None:
        """Deliver what waits, if it is known to whom. Call it from a graph's thread."""
        if self._first is None or not self._events.waiting:
            return
        if not isinstance(self._first, AsyncCallbackManager):
            self._events.run(self._dispatch)
        elif self._loop is not None and _running_loop() is self._loop:
            self._start_task()
        else:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Deliver on the graph's event loop if it has one; else the next `flush` does."""
        if self._first is None or self._loop is None or self._loop.is_closed():
            return
        if isinstance(self._first, AsyncCallbackManager):
            with suppress(RuntimeError):  # closed since: nobody listens any more
                self._loop.call_soon_threadsafe(self._start_task)

    def close(self) -> None:
        """The run has ended: its bus with it. Nothing more is taken in."""
        self.flush()
        self._is_closed = True
        self._let_go()

    # -- inside --------------------------------------------------------------------------

    def _dispatch(self, item: tuple[KVEvent | None, Origin]) -> None:
        event, origin = item
        if event is None:
            self._managers.pop(origin.graph_run_id, None)
            return
        manager = CallbackManager(
            handlers=self._hearers(origin),
            parent_run_id=origin.run_id,
            tags=list(origin.tags),
            metadata=dict(origin.metadata),
        )
        try:
            manager.on_custom_event(event.name, event.data, run_id=origin.run_id)
        except Exception as error:
            self._on_error(error)

    def _start_task(self) -> None:
        if self._events.waiting:
            task = asyncio.get_running_loop().create_task(self._events.arun(self._adispatch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._let_go())

    async def _adispatch(self, item: tuple[KVEvent | None, Origin]) -> None:
        # Not by the asynchronous manager: it takes several turns of the loop for each event,
        # and the last node's events would come after the end of the graph.
        event, origin = item
        if event is None:
            self._managers.pop(origin.graph_run_id, None)
            return
        for handler in self._hearers(origin):
            act = partial(
                handler.on_custom_event,
                event.name,
                event.data,
                run_id=origin.run_id,
                tags=list(origin.tags),
                metadata=dict(origin.metadata),
            )
            if inspect.iscoroutinefunction(handler.on_custom_event):
                try:
                    await act()
                except Exception as error:
                    self._on_error(error)
            elif handler.run_inline:
                self._call(act)
            else:
                lane = self._threaded.setdefault(id(handler), Lane())
                lane.waiting.append(partial(copy_context().run, act))
                asyncio.get_running_loop().run_in_executor(None, lane.run, self._call)

    def _let_go(self) -> None:
        """Keep no handler alive once the run is over and told."""
        if self._is_closed and not self._events.waiting:
            self._managers.clear()
            self._threaded.clear()
            self._first = self._loop = None

    def _call(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            self._on_error(error)

    def _hearers(self, origin: Origin) -> list[BaseCallbackHandler]:
        known = self._managers.get(origin.graph_run_id) or self._first
        heard = [] if known is None else known.inheritable_handlers
        return [handler for handler in heard if _hears(handler)]


def _hears(handler: BaseCallbackHandler) -> bool:
    """Whether a handler does anything with such an event."""
    silent = (RunManagerMixin.on_custom_event, AsyncCallbackHandler.on_custom_event)
    return not handler.ignore_custom_event and type(handler).on_custom_event not in silent


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
