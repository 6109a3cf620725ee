"""The callback handler that a graph carries: LangChain's events, told to the lifecycle.

Synchronous and inline, since an asynchronous handler loses its errors in a synchronous graph
and its order in an asynchronous one. It must not wait for the engine: it may run on an event
loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.outputs import LLMResult
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent, GraphResumeEvent
from langgraph.config import get_config

from sidequest_langchain.graph.attached import lifecycle_of
from sidequest_langchain.graph.events import KVEvent, Observer
from sidequest_langchain.graph.runs import CallTotals, Started
from sidequest_langchain.graph.steps import thread_in

logger = logging.getLogger(__name__)

N_ERRORS = 100
"""Failures kept; `n_errors` counts all."""


class SideQuestCallbackHandler(GraphCallbackHandler):
    """Gives back the segments of steps that a graph has left.

    Bind it to a graph with `attach(graph, model)`, not to the model: there it would see no
    node begin or end. Several handlers of one model share what they see; a graph whose
    subgraph is attached too is counted once.

    Its failures never reach the graph: they are logged, counted in `n_errors` and kept in
    `errors`, unless `strict`.
    """

    run_inline = True
    ignore_custom_event = True

    def __init__(
        self, model: object, *, on_event: Observer | None = None, strict: bool = False
    ) -> None:
        """Make a handler for the graphs of one model.

        Args:
            model: The `SideQuestChatModel`, bound or not.
            on_event: Observer of the events of the graphs that this handler is bound to.
            strict: Let failures reach the graph; for tests.

        Raises:
            ConfigError: `model` is no model of this package.
        """
        self.lifecycle = lifecycle_of(model)
        self.raise_error = strict
        self.n_errors = 0
        self._errors: deque[BaseException] = deque(maxlen=N_ERRORS)
        self._observers: list[Observer] = []
        if on_event is not None:
            self.observe(on_event)

    # -- for users -----------------------------------------------------------------------

    @property
    def errors(self) -> tuple[BaseException, ...]:
        """The most recent failures, oldest first; they never reached the graph."""
        return tuple(self._errors)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` with every event, where it happens. Returns the undo.

        Observers are told everything, each event once, those of a step in order. They must
        not block: they may run on an event loop or in the engine's thread.
        """
        self._observers.append(observer)

        def undo() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return undo

    # -- for the lifecycle ---------------------------------------------------------------

    def deliver(self, event: KVEvent) -> None:
        """Hand an event to the observers; one that raises stops nobody else."""
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception as error:
                self.fail(error)
                if self.raise_error:
                    raise

    def fail(self, error: BaseException) -> None:
        """Count a failure that must not reach the graph."""
        logger.warning("a failure in the callbacks of a graph: %r", error, exc_info=error)
        self.n_errors += 1
        # Without its frames: they would keep alive whatever the graph held.
        self._errors.append(error.with_traceback(None))

    # -- LangChain's events --------------------------------------------------------------

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A chain, a graph or a node begins."""
        self._start(run_id, parent_run_id, kwargs.get("name"), tags, metadata)

    def on_chain_end(self, outputs: dict[str, Any], *, run_id: UUID, **kwargs: Any) -> None:
        """A chain, a graph or a node ended well."""
        self._guard(self.lifecycle.end_run, run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A chain, a graph or a node was left by an exception, which need not be a failure."""
        self._guard(self.lifecycle.end_run, run_id, error)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool begins; what it calls belongs to the step around it."""
        self._start(run_id, parent_run_id, None, tags, metadata)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool ended well."""
        self._guard(self.lifecycle.end_run, run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool was left by an exception."""
        self._guard(self.lifecycle.end_run, run_id, error)

    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A retriever begins; what it calls belongs to the step around it."""
        self._start(run_id, parent_run_id, None, tags, metadata)

    def on_retriever_end(self, documents: Sequence[Any], *, run_id: UUID, **kwargs: Any) -> None:
        """A retriever ended well."""
        self._guard(self.lifecycle.end_run, run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A retriever was left by an exception."""
        self._guard(self.lifecycle.end_run, run_id, error)

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[Any]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A model call begins."""
        self._guard(self._learn, parent_run_id)
        self._guard(self.lifecycle.start_call, run_id, parent_run_id, metadata or {})

    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A call of a model without messages: not ours, but it runs inside a node."""
        self._guard(self._learn, parent_run_id)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """A model call ended well."""
        self._guard(lambda: self.lifecycle.end_call(run_id, totals_of(response)))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A model call failed or was cancelled."""
        self._guard(self.lifecycle.end_call, run_id, None)

    # -- LangGraph's events --------------------------------------------------------------

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """A graph pauses: nothing of its thread is released."""
        self._guard(self.lifecycle.pause, event.run_id)

    def on_resume(self, event: GraphResumeEvent) -> None:
        """A graph goes on from a checkpoint: its first steps repeat earlier attempts."""
        self._guard(self.lifecycle.resume, event.run_id)

    # -- inside --------------------------------------------------------------------------

    def _start(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        name: str | None,
        tags: list[str] | None,
        metadata: dict[str, Any] | None,
    ) -> None:
        started = Started(
            run_id=run_id,
            parent_run_id=parent_run_id,
            name=name,
            tags=tuple(tags or ()),
            metadata=metadata or {},
        )
        self._guard(self._learn, parent_run_id)
        self._guard(self.lifecycle.start_run, self, started)

    def _learn(self, parent_run_id: UUID | None) -> None:
        """Learn from the running config, if it is that of the run that this is a child of."""
        try:
            config = get_config()
        except RuntimeError:
            return
        callbacks = config.get("callbacks")
        if not isinstance(callbacks, BaseCallbackManager) or parent_run_id is None:
            return
        if callbacks.parent_run_id == parent_run_id:
            self.lifecycle.learn(callbacks, thread_in(config))

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:
            self.fail(error)
            if self.raise_error:
                raise


def totals_of(response: LLMResult) -> CallTotals | None:
    """What a model call's messages say it cost; `None` if it was no model of ours."""
    totals = CallTotals()
    for generations in response.generations:
        for generation in generations:
            message = getattr(generation, "message", None)
            figures = getattr(message, "response_metadata", {}).get("sidequest")
            if message is None or not figures:
                continue
            usage = getattr(message, "usage_metadata", None) or {}
            segment = figures.get("segment")
            totals.add(
                CallTotals(
                    n_calls=1,
                    n_reused_tokens=figures.get("reused_tokens", 0),
                    n_prefilled_tokens=figures.get("prefilled_tokens", 0),
                    n_generated_tokens=usage.get("output_tokens", 0),
                    segments=[] if segment is None else [segment],
                )
            )
    return totals if totals.n_calls else None
