"""Binds a graph to a model's cache. It must not know what is released when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from langchain_core.tracers.context import register_configure_hook
from langgraph.pregel import Pregel

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.attached import lifecycle_of
from sidequest_langchain.graph.events import Observer
from sidequest_langchain.graph.handler import SideQuestCallbackHandler

G = TypeVar("G", bound=Pregel[Any, Any, Any, Any])

_SESSION: ContextVar[SideQuestCallbackHandler | None] = ContextVar(
    "sidequest_session", default=None
)
_hook_lock = threading.Lock()
_hooks: list[ContextVar[Any]] = []


def attach(graph: G, model: object, *, on_event: Observer | None = None, strict: bool = False) -> G:
    """Let a graph give back its segments: of pruned branches, abandoned attempts, ended runs.

    The same as `graph.with_config(callbacks=[SideQuestCallbackHandler(model)])`. Attach the
    outermost graph; attaching its subgraphs as well changes nothing. Attaching twice changes
    nothing but adds the observer.

    Args:
        graph: A compiled graph. It is not changed.
        model: The `SideQuestChatModel` that its nodes call, bound or not.
        on_event: Observer of this graph's events (see `SideQuestCallbackHandler.observe`).
        strict: Let failures of the handler reach the graph; for tests.

    Returns:
        A graph of the same type. `handler_of(graph, model)` finds the handler in it.

    Raises:
        ConfigError: The graph is not compiled, or `model` is no model of this package.
    """
    given: object = graph
    if not isinstance(given, Pregel):
        hint = "; compile it first: builder.compile()" if hasattr(graph, "compile") else ""
        msg = f"a compiled graph was expected, found {type(graph).__name__}{hint}"
        raise ConfigError(msg)
    handler = SideQuestCallbackHandler(model, strict=strict)
    bound = handler_of(graph, model)
    if bound is not None and bound.raise_error == strict:
        handler = bound
    if on_event is not None:
        handler.observe(on_event)
    return graph if handler is bound else graph.with_config(callbacks=[handler])


def handler_of(graph: Pregel[Any, Any, Any, Any], model: object) -> SideQuestCallbackHandler | None:
    """The handler that `attach` has bound to a graph for a model."""
    callbacks = (graph.config or {}).get("callbacks") or []
    handlers = callbacks if isinstance(callbacks, list) else callbacks.handlers
    lifecycle = lifecycle_of(model)
    for handler in handlers:
        if isinstance(handler, SideQuestCallbackHandler) and handler.lifecycle is lifecycle:
            return handler
    return None


@contextmanager
def session(
    model: object, *, on_event: Observer | None = None, strict: bool = False
) -> Iterator[SideQuestCallbackHandler]:
    """Attach every graph that is run inside of the `with` block, without naming it.

    For graphs that somebody else builds and runs. LangGraph tells handlers that come this way
    nothing of pauses and resumes: a run stopped by `interrupt_before`/`interrupt_after` counts
    as ended, and a resumed step's earlier attempt is not recognised. Prefer `attach`.

    Raises:
        ConfigError: `model` is no model of this package.
    """
    with _hook_lock:
        if not _hooks:
            register_configure_hook(_SESSION, inheritable=True)
            _hooks.append(_SESSION)
    handler = SideQuestCallbackHandler(model, on_event=on_event, strict=strict)
    token = _SESSION.set(handler)
    try:
        yield handler
    finally:
        _SESSION.reset(token)
