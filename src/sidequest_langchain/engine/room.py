"""How much of the budget is left for rows that come from elsewhere; it must not know from where.

To be asked in the engine's thread.
"""

from __future__ import annotations

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.core import EngineCore

_ENDLESS = float("inf")


class Room:
    """What is left of one engine's budget."""

    def __init__(self, core: EngineCore, config: CacheConfig) -> None:
        self._core, self._config = core, config

    def left(self) -> tuple[float, float]:
        """Bytes and rows that may come; without a budget there is no end to them."""
        most_bytes, most_tokens = self._budget()
        return most_bytes - self._core.tree.n_bytes, most_tokens - self._core.tree.n_tokens

    def make(self, n_bytes: int, n_tokens: int) -> None:
        """Release what idles longest until so much may come, as for any request; exact."""
        most_bytes, most_tokens = self._budget()
        wanted_bytes, wanted_tokens = min(n_bytes, most_bytes), min(n_tokens, most_tokens)

        def is_over() -> bool:
            bytes_left, tokens_left = self.left()
            return bytes_left < wanted_bytes or tokens_left < wanted_tokens

        self._core.tree.sweep(is_over)

    def _budget(self) -> tuple[float, float]:
        manager, config = self._core.manager, self._config
        if config.observe:
            return _ENDLESS, _ENDLESS
        most_bytes = config.budget_bytes if manager is None else manager.budget_bytes
        return most_bytes or _ENDLESS, config.budget_tokens or _ENDLESS
