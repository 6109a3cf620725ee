"""Settings of the cache: frozen objects, checked when they are made.

It must not know torch, a model, a policy or a graph.
"""

from __future__ import annotations

from sidequest_langchain.config.parts import Guard, Protection, Schedule, Tiers
from sidequest_langchain.config.settings import CacheConfig, Isolation, Retain

__all__ = ["CacheConfig", "Guard", "Isolation", "Protection", "Retain", "Schedule", "Tiers"]
