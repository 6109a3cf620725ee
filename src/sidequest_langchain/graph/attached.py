"""One lifecycle for each model, shared by its handlers. It must not know LangChain's events."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from sidequest_langchain.chat.engines import EngineCell
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.lifecycle import Cache, Lifecycle

_lock = threading.Lock()
_lifecycles: weakref.WeakKeyDictionary[EngineCell, Lifecycle] = weakref.WeakKeyDictionary()
"""By what all copies of a model share; an entry goes with the last of them."""

WRAPPED = ("bound", "default", "runnable")
"""Where LangChain's wrappers keep what they wrap: bindings, configurable fields, fallbacks."""


def lifecycle_of(model: object) -> Lifecycle:
    """The lifecycle of a model, made at the first call. Loads nothing.

    Args:
        model: A model of this package, or a runnable bound to one (`model.bind_tools(...)`).

    Raises:
        ConfigError: It is neither.
    """
    served = served_by(model)
    with _lock:
        lifecycle = _lifecycles.get(served.engines)
        if lifecycle is None:
            lifecycle = Lifecycle(_caches_of(served.engines), served.cache_config.retain)
            _lifecycles[served.engines] = lifecycle
        return lifecycle


def served_by(model: object) -> Any:
    """The chat model itself, without what LangChain wraps around it.

    Raises:
        ConfigError: There is no model of this package in it.
    """
    found: Any = model
    while found is not None and not hasattr(found, "engines"):
        found = next((getattr(found, name) for name in WRAPPED if hasattr(found, name)), None)
    if found is None or not hasattr(found, "cache_config"):
        msg = (
            f"a SideQuestChatModel (bound or not) was expected, found {type(model).__name__}; "
            "only models of this package have segments to give back"
        )
        raise ConfigError(msg)
    return found


def _caches_of(cell: EngineCell) -> Callable[[], tuple[Cache, ...]]:
    """Finds the caches of a model that may not be loaded yet; keeps nothing alive."""
    held = weakref.ref(cell)

    def caches() -> tuple[Cache, ...]:
        found = held()
        return () if found is None else tuple(engine.kv for engine in found.live())

    return caches
