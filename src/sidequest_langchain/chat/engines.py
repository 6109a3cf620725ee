"""The engines a chat model uses, shared by all of its copies.

LangChain copies models freely (`configurable_fields` makes a new one for every call); weights
must not be loaded again for that, nor let go between two calls. It must not know messages.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.errors import ConfigError

T = TypeVar("T")


class EngineCell:
    """Holds what its models made, by what it was made from. A copy of it is itself."""

    def __init__(self, given: Engine | None = None) -> None:
        """Make a cell.

        Args:
            given: An engine over a model that the caller loaded; there is no other then.
        """
        self.given = given
        self.identity = None if given is None else uuid.uuid4().hex
        """Tells weights that the caller loaded from any other of the same name."""
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for `key`, or what `make` makes now."""
        made: T | None = self._made.get(key)
        if made is None or getattr(made, "is_closed", False):
            with self._lock:
                made = self._made.get(key)
                if made is None or getattr(made, "is_closed", False):
                    made = self._made[key] = make()
        return made

    def check(self, model: str, config: CacheConfig) -> None:
        """Refuse settings that a model the caller loaded cannot follow.

        Raises:
            ConfigError: Another model, or another cache, is asked for.
        """
        if self.given is None or (model == self.given.name and config == self.given.config):
            return
        msg = (
            f"this chat model was made with from_model(...) for {self.given.name!r}; its model and "
            "its cache settings cannot be changed: call from_model again"
        )
        raise ConfigError(msg)

    def has(self, key: Hashable) -> bool:
        """Whether something was made for `key`."""
        return key in self._made

    def live(self) -> tuple[Engine, ...]:
        """The engines that are there already; makes none, and does not wait for one being made."""
        made = (self.given, *self._made.values())
        return tuple(e for e in made if isinstance(e, Engine) and not e.is_closed)

    def __copy__(self) -> EngineCell:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineCell:
        return self

    def __reduce__(self) -> tuple[type[EngineCell], tuple[()]]:
        if self.given is not None:
            msg = (
                "a chat model made with from_model(...) cannot be pickled: its weights are in "
                "this process; make it from a name or a directory instead"
            )
            raise ConfigError(msg)
        return EngineCell, ()
