"""The token ids of replies this engine generated, by message id.

A later prompt that holds the reply unchanged is encoded with these ids, since the tokenizer,
given the text, may split it elsewhere. Bounded; it must not know a model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply as it was generated."""

    text: str
    token_ids: tuple[int, ...]
    """The longest head of the generated tokens that decodes to a head of `text`."""
    thread_id: str | None = None
    """The thread that it was generated for."""


class ReplyLog:
    """The most recent replies; the oldest are forgotten, which costs time, not correctness."""

    def __init__(self, n_most: int = 8192) -> None:
        self._n_most = n_most
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, message_id: str, reply: Reply) -> None:
        """Remember a reply."""
        with self._lock:
            self._replies[message_id] = reply
            self._replies.move_to_end(message_id)
            while len(self._replies) > self._n_most:
                self._replies.popitem(last=False)

    def get(self, message_id: str) -> Reply | None:
        """The reply with this id, or `None`."""
        with self._lock:
            reply = self._replies.get(message_id)
            if reply is not None:
                self._replies.move_to_end(message_id)
            return reply

    def of(self, thread_id: str, call_ids: Collection[str] = ()) -> dict[str, Reply]:
        """What is remembered of a thread, and of some calls of whatever thread, by message id."""
        with self._lock:
            return {
                message_id: reply
                for message_id, reply in self._replies.items()
                if reply.thread_id == thread_id or message_id in call_ids
            }

    def __len__(self) -> int:
        return len(self._replies)
