"""What each conversation of an agent held when the model was last called: what a summary replaced.

Plain facts about messages; it must not know a cache.

    held before    u1 a1 u2 a2 u3 a3
    now            S  a3 u4             a1 and a2 were replaced: summarised, or trimmed away
    now            u1 a1 u5             nothing was: somebody went back to a checkpoint
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from langchain_core.messages import AIMessage, BaseMessage

from sidequest_langchain.chat.messages import reply_id

MOST_CONVERSATIONS = 1024
"""Remembered; the least recently used are forgotten."""
MOST_BRANCHES = 8
"""Of one conversation."""
SUMMARY = "summarization"
"""How LangChain's `SummarizationMiddleware` says that a message is its summary."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent runs."""

    thread_id: str | None
    nodes: tuple[str, ...]
    """Names of the nodes around the model's, the outermost first."""


@dataclass(slots=True)
class _Held:
    """A conversation, by the ids of its messages."""

    branches: list[dict[str, str | None]] = field(default_factory=list)
    """What calls held, the latest last: by message, in order, the call whose reply it is."""
    seen: set[str] = field(default_factory=set)
    """All that it ever held."""

    def branch_of(self, ids: set[str]) -> dict[str, str | None]:
        """The branch that messages with these ids come from; empty if that cannot be told."""
        if len(self.branches) == 1:
            return self.branches[0]
        found = max(reversed(self.branches), key=lambda b: len(ids & b.keys()), default={})
        return found if ids & found.keys() else {}


class Conversations:
    """Remembers conversations between calls of the model. Safe to use from many threads."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[Place, int], _Held] = OrderedDict()
        self._n_unnamed = 0
        self._lock = threading.Lock()

    def replaced(self, place: Place, messages: Sequence[BaseMessage]) -> tuple[str, ...]:
        """Model calls whose replies were replaced since the last call; see `hold`.

        None if somebody went back to a checkpoint: the branch that was left is nobody's summary.

        Args:
            place: Where the agent runs.
            messages: The conversation as it is in the state.
        """
        with self._lock:
            held = self._held.get(self._key(place, messages))
            if held is None:
                return ()
            ids = {message.id for message in messages if message.id}
            branch = held.branch_of(ids)
            before = list(branch)
            gone = [at for at, message_id in enumerate(before) if message_id not in ids]
            is_back = any(i in held.seen and i not in branch for i in ids)
            if not gone or is_back:
                return ()
            has_tail = any(message_id in ids for message_id in before[gone[0] :])
            if not has_tail and not any(map(_is_summary, messages)):
                return ()
            found = (branch[before[at]] for at in gone)
            return tuple(call_id for call_id in found if call_id is not None)

    def hold(self, place: Place, messages: Iterable[BaseMessage]) -> None:
        """Remember what a conversation holds now."""
        messages = list(messages)
        with self._lock:
            key = self._key(place, messages)
            held = self._held.setdefault(key, _Held())
            now = {
                message.id: reply_id(message) if isinstance(message, AIMessage) else None
                for message in messages
                if message.id
            }
            # What goes on from a branch takes its place; another branch stays beside it.
            others = [branch for branch in held.branches if not branch.keys() <= now.keys()]
            held.branches = [*others, now][-MOST_BRANCHES:]
            held.seen.update(now)
            self._held.move_to_end(key)
            while len(self._held) > MOST_CONVERSATIONS:
                self._held.popitem(last=False)

    def _key(self, place: Place, messages: Sequence[BaseMessage]) -> tuple[Place, int]:
        """A thread is one conversation; without one, messages are told by their ids."""
        if place.thread_id is not None:
            return place, 0
        ids = {message.id for message in messages if message.id}
        for key in reversed(self._held):
            if key[0] == place and ids & self._held[key].seen:
                return key
        self._n_unnamed += 1
        return place, self._n_unnamed


def _is_summary(message: BaseMessage) -> bool:
    return message.additional_kwargs.get("lc_source") == SUMMARY
