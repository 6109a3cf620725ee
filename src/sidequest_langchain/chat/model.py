"""The chat model: LangChain's calls over one engine.

It must not know how tokens are computed, nor LangGraph beyond what `chat/step.py` reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from sidequest_langchain.chat.counting import CountingModel
from sidequest_langchain.chat.engines import EngineCell
from sidequest_langchain.chat.output import PROVIDER, ChunkMaker, chat_result
from sidequest_langchain.chat.running import arun_all, run_all
from sidequest_langchain.chat.settings import as_stops, settings_for
from sidequest_langchain.chat.structured import Method, structured
from sidequest_langchain.chat.tools import chosen, described
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.registry import engine_over
from sidequest_langchain.engine.request import GenerationRequest
from sidequest_langchain.errors import RequestError


class SideQuestChatModel(CountingModel):
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

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools it may call.

        Args:
            tools: Pydantic classes (v2 or v1), TypedDicts, functions, LangChain tools, runnables,
                or dicts: a JSON schema with a title, or a tool in the form of OpenAI or Anthropic.
            tool_choice: `None`, `False` or `"auto"`: the model may call. `True`, `"any"` or
                `"required"`: it must call one. A name, or a dict in the form of OpenAI or
                Anthropic: it must call that one. `"none"`: it is not told of the tools.
            strict: As in OpenAI's form. A forced call follows its schema in any case.
            parallel_tool_calls: Whether one answer may call several tools. By default it may
                where calls are up to the model, and where they are forced there is one.
            kwargs: Other settings of the calls, such as `response_format`.

        Raises:
            RequestError: A tool cannot be described, `tool_choice` names none of them, or a
                setting is unknown or of the wrong kind.
        """
        known = described(tools, strict=strict)
        settings: dict[str, Any] = {"tools": list(known), **kwargs}
        if tool_choice is not None:
            settings["tool_choice"] = chosen(tool_choice, known).as_given
        if parallel_tool_calls is not None:
            settings["parallel_tool_calls"] = parallel_tool_calls
        settings_for(self._sampling_fields, None, self._named_by(settings)[1])
        return self.bind(**settings)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """This model, answering in the shape of `schema`.

        Args:
            schema: A pydantic class (v2 or v1), a TypedDict, a JSON schema, or a tool's schema in
                the form of OpenAI's or Anthropic's.
            method: `"json_schema"`: a grammar keeps the text to the schema. `"function_calling"`:
                the schema is shown as a tool, and its call is forced. `"json_mode"`: any JSON
                object; with a schema, one in that shape.
            include_raw: Whether the result is `{"raw", "parsed", "parsing_error"}`.
            strict: Handed on with the schema. Answers keep to it in any case.
            kwargs: Settings of the calls, and `tools`, which the answer may call instead
                (`"json_schema"` with `include_raw=True` only).

        Returns:
            A runnable whose result is an object of the pydantic class, or a dict.

        Raises:
            ValueError: An argument is unknown, or arguments contradict each other.
        """
        settings_for(self._sampling_fields, None, self._named_by(kwargs)[1])
        return structured(
            self, schema, method=method, include_raw=include_raw, strict=strict, given=kwargs
        )

    def _named_by(self, given: Mapping[str, Any]) -> tuple[SideQuestChatModel, dict[str, Any]]:
        """The model that a call names with `model=...`, and the call's other settings.

        It is this one with other weights, which stay loaded as long as this one is held.
        """
        name = given.get("model")
        if not isinstance(name, str) or name == self.model or self.engines.given is not None:
            return self, dict(given)  # weights of the caller's cannot be changed: refused later
        others = {key: value for key, value in given.items() if key != "model"}
        return self.model_copy(update={"model": name}), others

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
        model, given = self._named_by(kwargs)
        call = model._prepare(messages, stop, run_manager, given)
        results = run_all(call.engine, call.requests)
        return chat_result(call, results, model.model)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        model, given = self._named_by(kwargs)
        call = await model._aprepare(messages, stop, run_manager, given)
        results = await arun_all(call.engine, call.requests)
        return chat_result(call, results, model.model)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        model, given = self._named_by(kwargs)
        call = model._prepare(messages, stop, run_manager, given)
        request = _only(call.requests)
        maker = ChunkMaker(call, request, model.model)
        with closing(call.engine.stream(request)) as events:
            for event in events:
                for chunk in maker.chunks_of(event):
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
        model, given = self._named_by(kwargs)
        call = await model._aprepare(messages, stop, run_manager, given)
        request = _only(call.requests)
        maker = ChunkMaker(call, request, model.model)
        async with aclosing(call.engine.astream(request)) as events:
            async for event in events:
                for chunk in maker.chunks_of(event):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk


def _only(requests: Sequence[GenerationRequest]) -> GenerationRequest:
    if len(requests) > 1:
        msg = f"n={len(requests)} samples cannot be streamed; use generate(..., n=...)"
        raise RequestError(msg)
    return requests[0]
