"""The doors LangChain's callers come in by: the call's config is remembered, prompts run at once.

It must not know the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor

from sidequest_langchain.chat.output import summed_usage
from sidequest_langchain.chat.step import called_with


class Entries(BaseChatModel):
    """`invoke`, `stream`, their async twins and `generate`, as in LangChain but for two things.

    The config that a call was given is remembered while the call begins (see `called_with`),
    and the prompts of one `generate` run together instead of one after the other.
    """

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer `input`; see LangChain's `BaseChatModel.invoke`."""
        with called_with(config):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer `input`; cancelling the task cancels the generation."""
        with called_with(config):
            return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer `input` in chunks; closing the iterator cancels the generation."""
        with closing(super().stream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            with called_with(config):
                first = next(chunks, None)
            if first is not None:
                yield first
                yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Answer `input` in chunks; cancelling the task cancels the generation."""
        async with aclosing(super().astream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            with called_with(config):
                first = await anext(chunks, None)
            if first is not None:
                yield first
                async for chunk in chunks:
                    yield chunk

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several prompts at the same time, with `n` samples each."""
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, **kwargs)
        run_ids = [kwargs.pop("run_id", None), *[None] * (len(messages) - 1)]

        def one(prompt: list[BaseMessage], run_id: Any) -> LLMResult:
            return super(Entries, self).generate([prompt], stop, callbacks, run_id=run_id, **kwargs)

        with ContextThreadPoolExecutor(max_workers=len(messages)) as pool:
            results = list(pool.map(one, messages, run_ids))
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or []] or None,
        )

    def _combine_llm_outputs(self, _llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        outputs: list[Mapping[str, Any]] = [output for output in _llm_outputs if output]
        if not outputs:  # each was in LangChain's cache
            return {}
        usage = summed_usage([output["token_usage"] for output in outputs])
        return {"token_usage": usage, "model_name": outputs[0]["model_name"]}
