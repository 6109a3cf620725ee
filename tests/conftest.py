"""Fixtures of every test, and the settings that make runs repeatable.

Tiny models come from `tests.support`; real ones only under the marker `real`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from sidequest_langchain.engine.engine import Engine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One torch thread: with tiny matrices a second one only costs, and changes rounding."""
    torch.set_num_threads(1)


@pytest.fixture
def tok() -> PreTrainedTokenizerFast:
    """A fresh byte-level tokenizer with the plain template."""
    return byte_tokenizer()


@pytest.fixture
def tiny() -> PreTrainedModel:
    """A fresh tiny Llama: 512 bytes of KV per token."""
    return tiny_model("llama")


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines that are closed when the test ends.

    `make_engine()`, `make_engine("gemma3")`, `make_engine(model, tokenizer, config=...)`.
    """
    from sidequest_langchain.engine.engine import Engine

    engines: list[Engine] = []

    def make(model: PreTrainedModel | str = "llama", tokenizer: Any = None, **given: Any) -> Engine:
        loaded = tiny_model(model) if isinstance(model, str) else model
        engines.append(Engine(loaded, tokenizer or byte_tokenizer(), **given))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    gc.collect()
