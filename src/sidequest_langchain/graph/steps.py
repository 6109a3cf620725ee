"""Which visit of a graph node this is: read from LangGraph's metadata or from the running context.

It must not know a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import set_config_context
from langgraph.config import get_config
from langgraph.runtime import Runtime, get_runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRef:
    """One attempt at one visit of a graph node."""

    thread_id: str | None
    checkpoint_ns: str
    """Unique per visit; retries and resumes of a visit share it."""
    task_id: str
    node: str
    step: int | None
    """LangGraph's superstep, of the innermost graph."""
    attempt: int = 1
    """Counts from 1 within one run of the graph."""
    checkpoint_id: str | None = None
    """The checkpoint that this step started from, where it is known."""


def thread_of(metadata: Mapping[str, Any]) -> str | None:
    """The thread that a run's metadata names; threads are told apart by the text of their id.

    A graph that is invoked on a thread of its own, inside of a node, is reported under the
    node's thread: only the running config knows better (`thread_in`).
    """
    thread_id = metadata.get("thread_id")
    return None if thread_id is None else str(thread_id)


def thread_in(config: RunnableConfig) -> str | None:
    """The thread that a running config names: the one that model calls are labelled with."""
    return thread_of(config.get("configurable") or {}) or thread_of(config.get("metadata") or {})


def step_of(
    name: str | None,
    tags: Sequence[str],
    metadata: Mapping[str, Any],
    *,
    around: StepRef | None,
) -> StepRef | None:
    """The step that a run starts, or `None` if it is no node's own run.

    A node's run is named after the node and has a namespace of its own; a conditional edge's
    function and a subgraph carry the namespace of the node around them. A `@task` has no
    superstep tag, but runs inside another step.

    Args:
        name: Name of the run.
        tags: Its tags.
        metadata: Its metadata.
        around: The innermost step that it runs in.
    """
    checkpoint_ns = metadata.get("langgraph_checkpoint_ns")
    if not checkpoint_ns or name is None or name != metadata.get("langgraph_node"):
        return None
    if around is not None and around.checkpoint_ns == checkpoint_ns:
        return None
    if around is None and not any(tag.startswith("graph:step:") for tag in tags):
        return None
    return StepRef(
        thread_id=thread_of(metadata),
        checkpoint_ns=checkpoint_ns,
        task_id=checkpoint_ns.rsplit(":", 1)[-1],
        node=name,
        step=metadata.get("langgraph_step"),
    )


def current_step(config: RunnableConfig | None = None) -> StepRef | None:
    """The step that is running here, or `None` outside of a graph node.

    Args:
        config: The node's config; needed only where the context was lost (a thread that was
            started without it).
    """
    if config is None:
        try:
            config = get_config()
        except RuntimeError:
            return None
    metadata = config.get("metadata") or {}
    checkpoint_ns = metadata.get("langgraph_checkpoint_ns")
    node = metadata.get("langgraph_node")
    if not checkpoint_ns or node is None:
        return None
    with set_config_context(config) as context:
        runtime: Runtime[Any] | None = context.run(lambda: get_runtime())
    info = runtime.execution_info if runtime is not None else None
    return StepRef(
        thread_id=thread_in(config),
        checkpoint_ns=checkpoint_ns,
        task_id=checkpoint_ns.rsplit(":", 1)[-1],
        node=node,
        step=metadata.get("langgraph_step"),
        attempt=1 if info is None else info.node_attempt,
        checkpoint_id=None if info is None else info.checkpoint_id,
    )
