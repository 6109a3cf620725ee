"""LangChain's standard integration suite for chat models, whole, on real weights.

The default model is the smallest of the catalogue that passes: its answers must copy a number,
names in Chinese and Japanese, and call a tool unasked.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from sidequest_langchain import SideQuestChatModel
from tests.support.real import require_real

MODEL, OTHER_MODEL = "qwen2.5-coder-0.5b", "smollm2-135m"
SETTINGS = {"model": MODEL, "temperature": 0.0, "max_tokens": 64}

Details = dict[Literal["invoke", "stream"], list[Any]]


@pytest.fixture(scope="module", autouse=True)
def weights() -> Iterator[None]:
    """Each test makes chat models of its own; the weights stay loaded between them."""
    require_real(MODEL)
    require_real(OTHER_MODEL)
    keeper = SideQuestChatModel(**SETTINGS)
    assert keeper.engine
    yield
    keeper.kv.clear()


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
class TestIntegration(ChatModelIntegrationTests):
    """Skipped are images, sound and PDF, which a text model lacks, and nothing else."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return SideQuestChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return SETTINGS

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def enable_vcr_tests(self) -> bool:
        return True  # there is no traffic to record: the test streams

    @property
    def supported_usage_metadata_details(self) -> Details:
        both = ["cache_read_input", "cache_creation_input"]
        return {"invoke": both, "stream": both}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        text = _new_text()
        first, again = (_asked(text, stream=stream).usage_metadata for _ in range(2))
        assert first["input_tokens"] == again["input_tokens"]
        assert first["input_token_details"]["cache_creation"] > 50
        assert again["input_token_details"]["cache_read"] == again["input_tokens"]
        return _asked(text, stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        answer = _asked(_new_text(), stream=stream)
        details = answer.usage_metadata["input_token_details"]
        assert sum(details.values()) == answer.usage_metadata["input_tokens"]
        return answer


def _new_text() -> str:
    """What no other call has asked, from the first word on."""
    return f"{uuid.uuid4()} " * 3


def _asked(text: str, *, stream: bool) -> AIMessage:
    model = SideQuestChatModel(**SETTINGS | {"max_tokens": 2})
    if not stream:
        return model.invoke(text)
    full: AIMessageChunk | None = None
    for chunk in model.stream(text):
        full = chunk if full is None else full + chunk
    assert isinstance(full, AIMessage)
    return full
