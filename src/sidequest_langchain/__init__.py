"""A KV cache of the same shape as an agent's reasoning, for LangChain and LangGraph.

Importing the package loads nothing else: each public name is fetched when it is first used,
so that `import sidequest_langchain` stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sidequest_langchain._version import __version__

if TYPE_CHECKING:
    from sidequest_langchain.chat.model import SideQuestChatModel
    from sidequest_langchain.config import CacheConfig, Guard, Protection, Schedule, Tiers
    from sidequest_langchain.graph import (
        SideQuestCallbackHandler,
        SideQuestSaver,
        abacktrack,
        akeep_only,
        aprune,
        attach,
        backtrack,
        branch,
        current_step,
        keep_only,
        prune,
        session,
    )
    from sidequest_langchain.graph.middleware import SideQuestMiddleware

_HOMES = {
    "CacheConfig": "config",
    "Guard": "config",
    "Protection": "config",
    "Schedule": "config",
    "SideQuestCallbackHandler": "graph",
    "SideQuestChatModel": "chat.model",
    "SideQuestMiddleware": "graph.middleware",
    "SideQuestSaver": "graph",
    "Tiers": "config",
    "abacktrack": "graph",
    "akeep_only": "graph",
    "aprune": "graph",
    "attach": "graph",
    "backtrack": "graph",
    "branch": "graph",
    "current_step": "graph",
    "keep_only": "graph",
    "prune": "graph",
    "session": "graph",
}

__all__ = [
    "CacheConfig",
    "Guard",
    "Protection",
    "Schedule",
    "SideQuestCallbackHandler",
    "SideQuestChatModel",
    "SideQuestMiddleware",
    "SideQuestSaver",
    "Tiers",
    "__version__",
    "abacktrack",
    "akeep_only",
    "aprune",
    "attach",
    "backtrack",
    "branch",
    "current_step",
    "keep_only",
    "prune",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
