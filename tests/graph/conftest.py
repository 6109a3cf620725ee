"""Chat models over tiny real engines, and what their trees are compared by."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.config import CacheConfig
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

BYTES_PER_TOKEN = 512
"""Of the tiny llama."""


_ANSWERS: dict[tuple[tuple[int, ...], int], list[int]] = {}
"""The oracle's answers: all tiny llamas have the same weights."""


class Tiny(SideQuestChatModel):
    """A chat model over a tiny llama, with its oracle."""

    def expected(self, messages: Any, n: int | None = None) -> list[int]:
        """What plain transformers answer to `messages`, from scratch."""
        asked = (tuple(self.prompt_ids(messages)), n or self.max_tokens or 8)
        if asked not in _ANSWERS:
            _ANSWERS[asked] = greedy(tiny_model("llama"), *asked)
        return _ANSWERS[asked]

    def answered(self, message: Any) -> list[int]:
        """The token ids of a reply."""
        reply = self.engine.replies.get(message.id)
        assert reply is not None
        return list(reply.token_ids)

    @property
    def n_bytes(self) -> int:
        """Bytes resident now; the books are checked on the way."""
        self.kv.check_integrity()
        return self.kv.usage().n_bytes

    def tree(self, thread_id: str | None = None) -> list[tuple[Any, ...]]:
        """The shape of the tree: no ids, no order, but who stands where and on what."""
        infos = self.kv.segments(thread_id)
        by_id = {info.segment_id: info for info in infos}

        def above(info: Any) -> tuple[int, ...]:
            found: list[int] = []
            while info.parent_id in by_id:
                info = by_id[info.parent_id]
                found.append(info.n_tokens)
            return tuple(found)

        shapes = [
            (
                info.start,
                info.n_tokens,
                above(info),
                sorted((str(lb.node), str(lb.branch), lb.step or 0) for lb in info.labels),
            )
            for info in infos
        ]
        return sorted(shapes, key=str)


@pytest.fixture
def tiny_chat() -> Iterator[Callable[..., Tiny]]:
    """Makes chat models over a fresh tiny llama; their engines are closed at the end."""
    made: list[Tiny] = []

    def make(max_tokens: int = 6, **cache: Any) -> Tiny:
        model = Tiny.from_model(
            tiny_model("llama"),
            byte_tokenizer(),
            max_tokens=max_tokens,
            cache=CacheConfig(**cache),
        )
        assert isinstance(model, Tiny)
        made.append(model)
        return model

    yield make
    for model in made:
        model.engine.close()
    made.clear()
    gc.collect()
