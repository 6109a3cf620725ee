"""How much of the budget is left for rows that come from elsewhere; it must not know from where.

To be asked in the engine's thread.
"""

from __future__ import annotations

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.managing import budget_of

_ENDLESS = float("inf")


class Room:
    """What is left of one engine's budget."""

    def __init__(self, core: EngineCore, config: CacheConfig) -> None:
        self._core, self._config = core, config
        self._budget_bytes = budget_of(core.adapter, config)

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
        if self._config.observe:
            return _ENDLESS, _ENDLESS
        return self._budget_bytes or _ENDLESS, self._config.budget_tokens or _ENDLESS
