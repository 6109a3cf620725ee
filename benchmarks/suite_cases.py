"""LangChain's standard suites over one of the contestants; run by `standard_suites`, with pytest.

The declarations are the same for all: what a text model can be asked for. Only who reports how many
tokens came out of a cache is asked about it. It imports nothing of this package's other modules.

    SUITE_CONTESTANT   ours, chathf or llamacpp
    SUITE_SOURCE       JSON: name, folder and gguf of the model
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

MAX_TOKENS = 96
N_CONTEXT = 4096
NAME = os.environ["SUITE_CONTESTANT"]
SOURCE: dict[str, Any] = json.loads(os.environ["SUITE_SOURCE"])
Chosen = tuple[type[BaseChatModel], dict[str, Any]]


@cache
def contestant() -> Chosen:
    """The class, and what it is made with; weights that can be shared are loaded once."""
    made: Chosen = {"ours": _ours, "chathf": _chathf, "llamacpp": _llamacpp}[NAME]()
    return made


def _ours() -> Chosen:
    from sidequest_langchain import SideQuestChatModel  # noqa: PLC0415

    keeper = SideQuestChatModel(model=SOURCE["name"])
    _held.append(keeper.engine)
    return SideQuestChatModel, {"model": SOURCE["name"], "temperature": 0.0}


def _chathf() -> Chosen:
    import torch  # noqa: PLC0415
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline  # noqa: PLC0415
    from transformers import pipeline  # noqa: PLC0415

    pipe = pipeline("text-generation", model=SOURCE["folder"], dtype=torch.float32)
    settings = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "return_full_text": False}
    llm = HuggingFacePipeline(pipeline=pipe, pipeline_kwargs=settings)
    return ChatHuggingFace, {"llm": llm, "tokenizer": pipe.tokenizer}


def _llamacpp() -> Chosen:
    from langchain_community.chat_models import ChatLlamaCpp  # noqa: PLC0415

    settings = {"n_ctx": N_CONTEXT, "n_batch": 512, "temperature": 0.0, "verbose": False}
    return ChatLlamaCpp, {"model_path": SOURCE["gguf"], **settings}


_held: list[Any] = []


class TestUnit(ChatModelUnitTests):
    """Without calls of the model."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return contestant()[0]

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return contestant()[1]

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"LC_OUTPUT_VERSION": "v1"}, contestant()[1], {"output_version": "v1"}


class TestIntegration(ChatModelIntegrationTests):
    """With calls of the model."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return contestant()[0]

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # ChatHuggingFace has no such setting of its own; its pipeline got it
        limit = {} if NAME == "chathf" else {"max_tokens": MAX_TOKENS}
        return contestant()[1] | limit

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        # the peers are made of one model's files or objects
        return "smollm2-135m" if NAME == "ours" else None

    @property
    def enable_vcr_tests(self) -> bool:
        return True  # there is no traffic to record: the test streams

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        details = ["cache_read_input", "cache_creation_input"] if NAME == "ours" else []
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._asked_twice(stream=stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._asked_twice(stream=stream)

    def _asked_twice(self, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke("Say yes.")
        if not stream:
            return model.invoke("Say yes.")
        first, *others = model.stream("Say yes.")
        for chunk in others:
            first += chunk
        return first
