"""LangChain's standard unit suite for chat models, whole; nothing is loaded."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from sidequest_langchain import SideQuestChatModel

MODEL = "qwen2.5-coder-0.5b"


class TestUnit(ChatModelUnitTests):
    """`test_serdes` is skipped: LangChain reads back none but the models on a list of its own."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return SideQuestChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"LC_OUTPUT_VERSION": "v1"}, {"model": MODEL}, {"output_version": "v1"}
