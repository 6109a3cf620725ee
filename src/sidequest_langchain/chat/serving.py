"""A chat model's engine, and its calls up to the point where the engine takes over.

It must not know how answers are handed to LangChain.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage

from sidequest_langchain.chat.call import Call
from sidequest_langchain.chat.clearing import (
    FedResults,
    Reusing,
    n_most_prompt_tokens,
    replies_after_cleared,
)
from sidequest_langchain.chat.fields import ModelFields
from sidequest_langchain.chat.managed import ManagedActs
from sidequest_langchain.chat.prompt import Prompt, PromptAssembler
from sidequest_langchain.chat.settings import CallSettings, settings_for
from sidequest_langchain.chat.step import HasMetadata, current_label, scope_of
from sidequest_langchain.chat.tools import Described, described
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.registry import engine_for
from sidequest_langchain.engine.request import GenerationRequest
from sidequest_langchain.engine.segments import KVSegments

_QUICK_CHARS, _QUICK_MESSAGES = 12_000, 60
"""Prompts up to this size are made on the event loop: that takes a few milliseconds."""
_loader = ThreadPoolExecutor(1, thread_name_prefix="sidequest-load")
"""Loads for async callers; a crowd of them must not fill the event loop's own threads."""


class ServedModel(ModelFields):
    """A chat model with its engine."""

    @property
    def engine(self) -> Engine:
        """The engine that serves this model; loads the weights if they are not there yet."""
        if self.engines.given is not None:
            return self.engines.given
        return self.engines.get(
            self._engine_key,
            lambda: engine_for(
                self.model,
                revision=self.revision,
                dtype=self.dtype,
                device=self.device,
                device_map=self.device_map,
                quantization=self.quantization,
                config=self.cache_config,
            ),
        )

    @property
    def kv(self) -> KVSegments:
        """The KV cache: its segments, and what may be done with them."""
        kv = self.engine.kv
        return kv if self.chat_template is None else kv.for_template(self.chat_template)

    def prompt_ids(self, input: LanguageModelInput, *, tools: Sequence[Any] = ()) -> list[int]:
        """The token ids that a call with `input` feeds to the model.

        Args:
            input: As for `invoke`.
            tools: Tools the call would be given.

        Raises:
            MessageError: A message has no text form.
            TemplateError: There is no template, or it refuses these messages.
        """
        messages = self._convert_input(input).to_messages()
        return list(self._assembler.assemble(messages, described(tools)).ids)

    @property
    def _engine_key(self) -> str:
        names = ("model", "revision", "dtype", "quantization", "device", "device_map")
        weights = json.dumps([getattr(self, name) for name in names], default=str)
        return f"{weights} {self.cache_config}"

    @property
    def _assembler(self) -> PromptAssembler:
        engine, template = self.engine, self.chat_template

        def make() -> PromptAssembler:
            tokenizer = engine.tokenizer
            return PromptAssembler(
                tokenizer if template is None else tokenizer.with_template(template),
                find_reply=engine.replies.get,
                name=self.model,
                control_tokens=self.control_tokens,
            )

        form = json.dumps([template, self.control_tokens], sort_keys=True)
        return self.engines.get((engine, form), make)

    def _prepare(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: HasMetadata | None,
        given: Mapping[str, Any],
    ) -> Call:
        settings = settings_for(self._sampling_fields, stop, given)
        config, engine, assembler = self.cache_config, self.engine, self._assembler
        tools = settings.tools_told
        prompt = assembler.assemble(
            messages,
            tools,
            with_kinds=config.is_managed,
            marked=config.protection.protect_text,
            told=settings.told,
        )
        plan = assembler.dialect.plan(settings, prompt.opened)
        scope = scope_of(config.isolation, run_manager)
        reusing = self._reusing(messages, settings, tools, scope, prompt)
        requests = [
            GenerationRequest(
                prompt_ids=prompt.ids,
                sampling=settings.sampling_of(sample),
                label=current_label(f"sq-{uuid.uuid4().hex}", run_manager),
                scope=scope,
                constraint=settings.new_constraint()
                if plan.grammar is None
                else engine.grammars.constraint(plan.grammar),
                superseded=(*prompt.superseded, *replies_after_cleared(messages)),
                kinds=prompt.kinds,
                spans=prompt.tool_results,
                shown=plan.shown,
                exact=settings.exact,
            )
            for sample in range(settings.n)
        ]
        for request in requests:
            assembler.remember(request.label.call_id, prompt)
        if reusing is not None:
            requests = [self._cleared(request, reusing, prompt) for request in requests]
        return Call(
            engine=engine,
            requests=tuple(requests),
            managed=ManagedActs(engine.kv),
            plan=plan,
            has_numbered_blocks=self.output_version == "v1",
        )

    def _reusing(
        self,
        messages: list[BaseMessage],
        settings: CallSettings,
        tools: Sequence[Described],
        scope: str,
        prompt: Prompt,
    ) -> Reusing | None:
        """The prompt that keeps the texts of cleared results, if the call asks for it."""
        if not settings.is_reusing_edits:
            return None
        engine = self.engine
        fed = self.engines.get((engine, "fed results"), FedResults)
        fed.note(scope, messages)
        return fed.reusing(
            scope,
            messages,
            lambda whole: self._assembler.assemble(
                whole,
                tools,
                with_kinds=True,
                marked=self.cache_config.protection.protect_text,
                told=settings.told,
            ),
            n_most_tokens=n_most_prompt_tokens(
                engine.context_length, settings.sampling.max_tokens, len(prompt.ids)
            ),
        )

    def _cleared(
        self, request: GenerationRequest, reusing: Reusing, replaced: Prompt
    ) -> GenerationRequest:
        """The request that clears in the cache; which prompt is fed, the engine decides."""
        assembler, call_id = self._assembler, request.label.call_id
        if reusing.prompt is not None:
            assembler.remember(call_id, reusing.prompt)
        return reusing.request(request, on_instead=lambda: assembler.remember(call_id, replaced))

    async def _aprepare(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: HasMetadata | None,
        given: Mapping[str, Any],
    ) -> Call:
        settings = settings_for(self._sampling_fields, stop, given)
        if not self._is_loaded:
            await asyncio.get_running_loop().run_in_executor(_loader, lambda: self.engine)
        is_small = len(messages) <= _QUICK_MESSAGES and _n_chars(messages) <= _QUICK_CHARS
        if is_small and not settings.is_held:  # a new grammar takes milliseconds, the first more
            return self._prepare(messages, stop, run_manager, given)
        return await asyncio.to_thread(self._prepare, messages, stop, run_manager, given)

    @property
    def _is_loaded(self) -> bool:
        return self.engines.given is not None or self.engines.has(self._engine_key)


def _n_chars(messages: Sequence[BaseMessage]) -> int:
    return sum(len(str(message.content)) for message in messages)
