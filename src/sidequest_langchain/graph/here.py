"""Where a helper was called: in which run, and which lifecycles watch it.

It must not know what the helper wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config

from sidequest_langchain.graph.branches import BranchLedger
from sidequest_langchain.graph.handler import SideQuestCallbackHandler
from sidequest_langchain.graph.lifecycle import Lifecycle, Releases
from sidequest_langchain.graph.runs import PrunePlan
from sidequest_langchain.graph.steps import thread_in


@dataclass(frozen=True, slots=True)
class Watch:
    """A run, and a lifecycle that watches it."""

    run_id: UUID
    thread_id: str | None
    lifecycle: Lifecycle

    def open_branch(self, branch: str, parent: str | None) -> None:
        """A branch was opened in the run."""
        self.lifecycle.open_branch(self.run_id, self.thread_id, branch, parent)

    def foresee(self, branches: Sequence[str]) -> None:
        """Branches are about to go on in the run's thread."""
        self.lifecycle.foresee(self.thread_id, branches)

    def read_branches(self, read: Callable[[BranchLedger], tuple[str, ...]]) -> tuple[str, ...]:
        """What `read` finds in the branches of the run's thread."""
        return self.lifecycle.read_branches(self.run_id, self.thread_id, read)

    def stage(self, plan: PrunePlan) -> bool:
        """Keep a prune until the step around it ends well; `False`: there is no step."""
        return self.lifecycle.stage(self.run_id, plan)

    def prune_now(self, plan: PrunePlan) -> Releases:
        """A prune that does not wait for the step to end."""
        return self.lifecycle.prune_now(self.run_id, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where a helper was called."""

    thread_id: str | None = None
    watches: tuple[Watch, ...] = ()
    """One for each attached model; none outside of an attached graph."""

    def read_branches(self, read: Callable[[BranchLedger], tuple[str, ...]]) -> tuple[str, ...]:
        """What `read` finds in the branches of the thread, each once."""
        found: dict[str, None] = {}
        for watch in self.watches:
            found |= dict.fromkeys(watch.read_branches(read))
        return tuple(found)


def here(config: RunnableConfig | None = None) -> Here:
    """Look where this is called.

    Args:
        config: The node's config; needed only where the context was lost (a thread that was
            started without it).
    """
    if config is None:
        try:
            config = get_config()
        except RuntimeError:
            return Here()
    thread_id = thread_in(config)
    callbacks = config.get("callbacks")
    if not isinstance(callbacks, BaseCallbackManager) or callbacks.parent_run_id is None:
        return Here(thread_id=thread_id)
    run_id = callbacks.parent_run_id
    found: dict[int, Watch] = {}
    for handler in callbacks.handlers:
        if isinstance(handler, SideQuestCallbackHandler):
            lifecycle = handler.lifecycle
            if lifecycle.run(run_id) is not None:
                lifecycle.learn(callbacks, thread_id)
                found[id(lifecycle)] = Watch(run_id, thread_id, lifecycle)
    return Here(thread_id=thread_id, watches=tuple(found.values()))
