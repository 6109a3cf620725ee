"""Chat models over tiny weights, and the oracle of their answers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from sidequest_langchain import SideQuestChatModel
from tests.support.oracle import greedy
from tests.support.templates import PLAIN
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

BYTES_PER_TOKEN = 512
"""Of the tiny llama."""


class Chat:
    """A chat model with the weights it serves."""

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        self.weights = model
        self.chat = SideQuestChatModel.from_model(model, tokenizer, **{"max_tokens": 8} | settings)

    def expected(self, messages: Sequence[BaseMessage] | str, n: int = 8) -> list[int]:
        """What plain transformers answer, from scratch, to the ids that are fed."""
        return greedy(self.weights, self.chat.prompt_ids(messages), n)  # type: ignore[arg-type]

    def answered(self, message: BaseMessage) -> list[int]:
        """The token ids of a reply."""
        reply = self.chat.engine.replies.get(str(message.id))
        assert reply is not None
        return list(reply.token_ids)

    def resident(self) -> set[tuple[int, ...]]:
        """The ids on each path, root to tip; the books are checked on the way."""
        self.chat.kv.check_integrity()
        tree = self.chat.engine._core.tree

        def look() -> set[tuple[int, ...]]:
            tips = [path.tip for path in tree.paths.values()]
            return {tuple(i for s in tip.path() for i in s.token_ids) for tip in tips}

        return self.chat.engine._core.call(look).result(30)

    @property
    def n_bytes(self) -> int:
        """Bytes resident now."""
        self.chat.kv.check_integrity()
        return self.chat.kv.usage().n_bytes


@pytest.fixture
def make_chat() -> Iterator[Callable[..., Chat]]:
    """`make_chat()`, `make_chat(template=THINK)`, `make_chat(model=tiny_model("gpt2"))`."""
    made: list[Chat] = []

    def make(*, model: Any = None, template: str | None = PLAIN, **settings: Any) -> Chat:
        weights = model or tiny_model("llama")
        made.append(Chat(weights, byte_tokenizer(template), **settings))
        return made[-1]

    yield make
    for one in made:
        one.chat.engine.close()
    made.clear()
    gc.collect()
