"""Fixtures of every test, and the settings that make runs repeatable.

Tiny models come from `tests.support`; real ones only under the marker `real`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

# Read when huggingface_hub is imported: a test that would go to the network fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LANGSMITH_TRACING", "false")

import pytest
import torch

from tests.support.real import load_real
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from sidequest_langchain.engine.engine import Engine
    from sidequest_langchain.models.loading import LoadedModel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def torch_threads(request: pytest.FixtureRequest) -> None:
    """One thread for tiny matrices, where a second one only costs; two for real models."""
    torch.set_num_threads(2 if request.node.get_closest_marker("real") else 1)


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> None:
    """What was imported is never garbage: without it a collection takes half the time."""
    gc.collect()
    gc.freeze()


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
    engines.clear()
    gc.collect()


@pytest.fixture(scope="session")
def real_smollm() -> LoadedModel:
    """SmolLM2-135M-Instruct: `.model` and `.tokenizer`. Mark the test `real`."""
    return load_real("smollm2-135m")


@pytest.fixture(scope="session")
def real_qwen() -> LoadedModel:
    """Qwen2.5-Coder-0.5B-Instruct: `.model` and `.tokenizer`. Mark the test `real`."""
    return load_real("qwen2.5-coder-0.5b")
