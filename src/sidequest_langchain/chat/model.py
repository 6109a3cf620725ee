"""The chat model: LangChain's calls over one engine.

It must not know how tokens are computed, nor LangGraph beyond what `chat/step.py` reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from sidequest_langchain.chat.engines import EngineCell
from sidequest_langchain.chat.output import PROVIDER, chat_result, chunks_of
from sidequest_langchain.chat.running import arun_all, run_all
from sidequest_langchain.chat.serving import ServedModel
from sidequest_langchain.chat.settings import as_stops
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.registry import engine_over
from sidequest_langchain.engine.request import GenerationRequest
from sidequest_langchain.errors import RequestError


class SideQuestChatModel(ServedModel):
    """A LangChain chat model on local weights, whose KV cache follows the graph it is used in.

    Weights load at the first call, once per process. Every call is run by the engine's thread;
    calls that run at the same time, from any thread or task, are computed together.

    If the last message is an AI message, the model continues it.

    Example:
        >>> model = SideQuestChatModel(model="smollm2-135m", max_tokens=16)
        >>> answer = model.invoke("Name a city.")
    """

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "",
        cache: CacheConfig | BaseCache | bool | None = None,
        **settings: Any,
    ) -> SideQuestChatModel:
        """A chat model over transformers objects that you loaded.

        Args:
            model: A causal language model; it is used as it is, where it is.
            tokenizer: Its tokenizer; it is copied.
            name: What to call it; by default the name it was loaded by.
            cache: Settings of the KV cache, or LangChain's cache of answers.
            settings: Any other setting of a chat model.

        Raises:
            UnsupportedModelError: The architecture cannot be served exactly.
            ConfigError: A setting is unknown or out of range.
        """
        if isinstance(cache, CacheConfig):
            settings["cache_config"], cache = cache, None
        engine = engine_over(model, tokenizer, config=settings.get("cache_config"), name=name)
        settings |= {"engines": EngineCell(engine), "cache_config": engine.config}
        return cls(model=name or engine.name, cache=cache, **settings)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Not there yet.

        Raises:
            NotImplementedError: Always; it says what works meanwhile.
        """
        msg = (
            "SideQuestChatModel does not bind tools yet; tool messages in a conversation are "
            "rendered, and tools=[...] of a call reach the chat template, but replies are not "
            "parsed for tool calls"
        )
        raise NotImplementedError(msg)

    # -- counting ------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` alone, by the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.engine.tokenizer.encode(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens that a call with `messages` feeds.

        Any part of a conversation is counted (`trim_messages` asks for such): what the template
        refuses is counted message by message.
        """
        if not messages:
            return 0
        try:
            return len(self.prompt_ids(messages, tools=tools or ()))
        except RequestError:
            return sum(self._count_alone(message) for message in messages)

    def _count_alone(self, message: BaseMessage) -> int:
        """Tokens of one message, rather too many than too few."""
        calls = getattr(message, "tool_calls", None) or ""
        try:
            n_turn = len(self.prompt_ids([HumanMessage("")]))
        except RequestError:  # a base model
            n_turn = 0
        return n_turn + len(self.get_token_ids(f"{message.text}{calls}"))

    # -- LangChain's hooks ---------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "sidequest-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        values = {**self._sampling_fields, **kwargs}
        params = LangSmithParams(
            ls_provider=PROVIDER, ls_model_name=values["model"], ls_model_type="chat"
        )
        params["ls_temperature"] = values["temperature"]
        if values["max_tokens"] is not None:
            params["ls_max_tokens"] = values["max_tokens"]
        if stops := [*as_stops(self.stop), *as_stops(stop)]:
            params["ls_stop"] = stops
        return params

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        # Several samples cannot be told apart in one stream: they arrive whole.
        return super()._streaming_disabled(**kwargs) or (kwargs.get("n") or self.n) != 1

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._prepare(messages, stop, run_manager, kwargs)
        results = run_all(call.engine, call.requests)
        return chat_result(call.requests, results, self.model, call.managed)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await self._aprepare(messages, stop, run_manager, kwargs)
        results = await arun_all(call.engine, call.requests)
        return chat_result(call.requests, results, self.model, call.managed)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._prepare(messages, stop, run_manager, kwargs)
        request = _only(call.requests)
        with closing(call.engine.stream(request)) as events:
            for event in events:
                for chunk in chunks_of(event, request, self.model, call.managed):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await self._aprepare(messages, stop, run_manager, kwargs)
        request = _only(call.requests)
        async with aclosing(call.engine.astream(request)) as events:
            async for event in events:
                for chunk in chunks_of(event, request, self.model, call.managed):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk


def _only(requests: Sequence[GenerationRequest]) -> GenerationRequest:
    if len(requests) > 1:
        msg = f"n={len(requests)} samples cannot be streamed; use generate(..., n=...)"
        raise RequestError(msg)
    return requests[0]
