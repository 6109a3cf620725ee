"""The engine as the floors above see it: submit a request, stream its events."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from typing import TypeAlias

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.clearing import Clearer
from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.engine.grammar import Grammars
from sidequest_langchain.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Sink,
    TextDelta,
)
from sidequest_langchain.engine.saving import ThreadFiles
from sidequest_langchain.engine.segments import KVSegments
from sidequest_langchain.engine.self_test import self_test
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.engine.workers import give_workers_back
from sidequest_langchain.errors import ContextLengthError, RequestError
from sidequest_langchain.policy.manager import EXACT

ChatTemplate: TypeAlias = str | dict[str, str] | None


class Ticket:
    """A request that was handed in."""

    def __init__(self, core: EngineCore, sequence: Sequence) -> None:
        self._core = core
        self._sequence = sequence

    def cancel(self) -> None:
        """End the request at the next step boundary and undo what it stored.

        Idempotent, from any thread, does not wait; whoever still listens gets a
        `RequestCancelledError`.
        """
        if not self._sequence.is_over:
            self._sequence.is_cancelled = True
            self._core.wake()


class Engine:
    """One model served by one thread over one segment tree.

    The thread ends, and the memory is free, when the engine is closed or nobody holds it.

    Raises:
        UnsupportedModelError: The architecture cannot be served exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        config: CacheConfig | None = None,
        name: str = "",
        chat_template: ChatTemplate = None,
    ) -> None:
        adapter = ModelAdapter(model)
        try:
            self_test(adapter)
            self.tokenizer = ChatTokenizer(tokenizer, chat_template=chat_template)
        except BaseException:
            adapter.close()
            raise
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or "model"
        self.config = config or CacheConfig()
        self.context_length = adapter.context_length
        self.vocab_size = adapter.vocab_size
        eos = tokenizer.eos_token_id
        self.eos_ids = adapter.eos_ids | (frozenset() if eos is None else {int(eos)})
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_ids)
        self._core = EngineCore(adapter, self.config, self.tokenizer, self.name)
        self.origin: object = None
        """What the weights came from; kept alive with the engine."""
        self.replies = self._core.replies
        self._clearer = Clearer(self._core, self.tokenizer, is_hidden=self.config.mask_only)
        files = ThreadFiles(self._core, self.tokenizer, self.config)
        self.kv = KVSegments(self._core, self._clearer.log, files)
        self._core._scheduler.foresee = self.kv.prefetcher.prompt
        give_workers_back()
        self._core.start()
        # Also at exit of the interpreter: a thread inside of torch must not outlive it.
        self._finalizer = weakref.finalize(self, self._core.stop)

    def submit(self, request: GenerationRequest, sink: Sink) -> Ticket:
        """Hand in a request; returns at once.

        Args:
            request: What to generate.
            sink: Gets the events, in the engine's thread; must neither block nor raise.

        Raises:
            ContextLengthError: The prompt leaves no room for an answer.
            RequestError: The prompt is empty or holds ids outside of the vocabulary.
            EngineClosedError: The engine was closed.
        """
        self._check(request)
        if request.exact and self._core.manager is not None:
            # Rows that others agreed to lose must not be missing here.
            request = replace(request, scope=request.scope + EXACT)
        sequence = Sequence(
            request,
            sink,
            self.tokenizer,
            context_length=self.context_length,
            eos_ids=self.eos_ids,
        )
        if request.clearing is not None:
            self._check(request.clearing.instead)
            sequence.prepare = self._clearer.resolve
        give_workers_back()
        self._core.add(sequence)
        return Ticket(self._core, sequence)

    def stream(self, request: GenerationRequest) -> Generator[TextDelta | Finished]:
        """Run a request and yield its events; closing the iterator cancels it.

        Raises:
            Exception: What the request failed with, as it was raised in the engine.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            ticket.cancel()

    async def astream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta | Finished]:
        """Run a request and yield its events; cancelling the task cancels it.

        Raises:
            Exception: What the request failed with, as it was raised in the engine.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = self.submit(request, sink)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            ticket.cancel()

    def close(self) -> None:
        """Stop the thread and free the cache; running requests fail. Idempotent."""
        self._finalizer()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def _check(self, request: GenerationRequest) -> None:
        ids = request.prompt_ids
        if not ids:
            msg = "the prompt has no tokens; give at least one message with text"
            raise RequestError(msg)
        if len(ids) >= self.context_length:
            raise ContextLengthError(len(ids), self.context_length)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            strange = min(ids) if min(ids) < 0 else max(ids)
            msg = (
                f"the prompt holds token id {strange}, but the model's vocabulary goes from 0 to "
                f"{self.vocab_size - 1}; the tokenizer does not belong to this model"
            )
            raise RequestError(msg)
