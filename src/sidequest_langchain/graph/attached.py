"""One lifecycle for each model, shared by its handlers. It must not know LangChain's events."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from sidequest_langchain.config import CacheConfig, Retain
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.lifecycle import Cache, Lifecycle

_lock = threading.Lock()
_lifecycles: dict[int, Lifecycle] = {}
"""By the identity of live models, which need not be hashable; an entry goes with its model."""


def lifecycle_of(model: object) -> Lifecycle:
    """The lifecycle of a model, made at the first call.

    Args:
        model: A model of this package, or a runnable bound to one (`model.bind_tools(...)`).

    Raises:
        ConfigError: It is neither.
    """
    model = _unbound(model)
    with _lock:
        if id(model) not in _lifecycles:
            _lifecycles[id(model)] = Lifecycle(_cache_of(weakref.ref(model)), _retain_of(model))
            weakref.finalize(model, _lifecycles.pop, id(model), None)
        return _lifecycles[id(model)]


def _unbound(model: object) -> Any:
    found = model
    while not hasattr(type(found), "kv") and hasattr(found, "bound"):
        found = found.bound
    if not hasattr(type(found), "kv"):
        msg = (
            f"a SideQuestChatModel (bound or not) was expected, found {type(model).__name__}; "
            "only models of this package have segments to give back"
        )
        raise ConfigError(msg)
    return found


def _cache_of(model: weakref.ref[Any]) -> Any:
    """Finds the cache of a model that may not be loaded yet; never loads it, never keeps it."""

    def cache() -> Cache | None:
        found = model()
        return None if found is None else found.loaded_kv

    return cache


def _retain_of(model: Any) -> Retain | None:
    config = getattr(model, "cache_config", None)
    return config.retain if isinstance(config, CacheConfig) else None
