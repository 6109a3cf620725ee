"""Chat models over tiny weights, closed when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sidequest_langchain import SideQuestChatModel
from tests.support.templates import PLAIN
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


@pytest.fixture
def make_chat() -> Iterator[Callable[..., SideQuestChatModel]]:
    """`make_chat()`, `make_chat(template=THINK)`, `make_chat(model=..., tokenizer=..., seed=1)`."""
    chats: list[SideQuestChatModel] = []

    def make(
        *, model: Any = None, tokenizer: Any = None, template: str | None = PLAIN, **settings: Any
    ) -> SideQuestChatModel:
        settings = {"max_tokens": 8} | settings
        chats.append(
            SideQuestChatModel.from_model(
                model or tiny_model("llama"), tokenizer or byte_tokenizer(template), **settings
            )
        )
        return chats[-1]

    yield make
    for chat in chats:
        chat.engine.close()


@pytest.fixture
def chat(make_chat: Callable[..., SideQuestChatModel]) -> SideQuestChatModel:
    """A tiny Llama with the plain template, greedy, 8 tokens."""
    return make_chat()
