"""Which graph step calls the model: read where LangGraph leaves it, never at the cost of an error.

It must not know the engine. LangGraph itself is not imported: its metadata is plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

from sidequest_langchain.config import Isolation
from sidequest_langchain.labels import StepLabel

BRANCH: ContextVar[tuple[str, str | None] | None] = ContextVar("sidequest_branch", default=None)
"""(branch, parent branch) of the model calls made here; `graph.branch()` sets it."""

_CALL_CONFIG: ContextVar[RunnableConfig | None] = ContextVar("sidequest_call_config", default=None)


class HasMetadata(Protocol):
    """What is needed of LangChain's run managers."""

    metadata: dict[str, Any]


@contextmanager
def called_with(config: RunnableConfig | None) -> Iterator[None]:
    """Remember the config a call was given, for where LangChain does not hand it on.

    `_stream` gets no run manager, and a thread started without the context has no running
    config either: there an explicit config is all there is. Never held across a yield.
    """
    token = _CALL_CONFIG.set(config or _CALL_CONFIG.get())
    try:
        yield
    finally:
        _CALL_CONFIG.reset(token)


def current_label(call_id: str, run_manager: HasMetadata | None = None) -> StepLabel:
    """The label of a model call made here.

    Args:
        call_id: Id of the call, and of the message it will return.
        run_manager: The call's run manager, if there is one.
    """
    sources = list(_sources(run_manager))
    step: Mapping[str, Any] = next((s for s in sources if s.get("langgraph_checkpoint_ns")), {})
    branch, parent = BRANCH.get() or (None, None)
    return StepLabel(
        call_id=call_id,
        thread_id=_first(sources, "thread_id"),
        checkpoint_ns=_text(step.get("langgraph_checkpoint_ns")),
        node=_text(step.get("langgraph_node")),
        step=_whole(step.get("langgraph_step")),
        branch=branch,
        parent_branch=parent,
    )


def scope_of(isolation: Isolation, run_manager: HasMetadata | None = None) -> str:
    """The scope inside of which a call made here may reuse prefixes.

    `"tenant"` without a tenant falls back to the thread: what is not declared to be shared is
    not shared. A thread id is one tenant's own, if there is a tenant. Calls without a thread
    share one scope.
    """
    if isolation == "shared":
        return "shared"
    sources = list(_sources(run_manager))
    tenant, thread_id = _first(sources, "sidequest_tenant"), _first(sources, "thread_id")
    if isolation == "tenant" and tenant is not None:
        return json.dumps(["tenant", tenant])
    return json.dumps(["thread", tenant, thread_id])


def _sources(run_manager: HasMetadata | None) -> Iterator[Mapping[str, Any]]:
    """Where a fact may stand: the running config, the run manager, the config of the call."""
    yield from _of_config(var_child_runnable_config.get())
    yield _mapping(getattr(run_manager, "metadata", None))
    yield from _of_config(_CALL_CONFIG.get())


def _of_config(config: object) -> Iterator[Mapping[str, Any]]:
    yield _mapping(_mapping(config).get("configurable"))
    yield _mapping(_mapping(config).get("metadata"))


def _first(sources: list[Mapping[str, Any]], key: str) -> str | None:
    return next((text for s in sources if (text := _text(s.get(key))) is not None), None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str | None:
    """Ids are told apart by their text, as LangGraph's savers do; a broken one is no id."""
    try:
        return None if value is None else str(value)
    except Exception:  # a label is a courtesy: it must not cost the answer
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
