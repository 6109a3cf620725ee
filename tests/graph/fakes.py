"""A cache and a chat model without tensors: labels go in, and what is left can be read.

They know `PathSelector` and the step's label, so that they tell which paths a graph's events
let go; how many bytes that frees is for the tests on a real engine.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field, PrivateAttr

from sidequest_langchain.chat.step import current_label
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.kv.receipts import ReleaseReceipt
from sidequest_langchain.labels import PathSelector, StepLabel

BYTES = 100


class FakeKV:
    """Paths without segments: each costs `BYTES`."""

    def __init__(self) -> None:
        self.paths: dict[int, StepLabel] = {}
        self.serial = 0
        self.posted: list[tuple[PathSelector, str]] = []
        self.foreseen: list[PathSelector] = []
        self.is_held = False
        """Releases wait for `let_go`, as for an engine that is busy."""
        self._waiting: list[Any] = []
        self._lock = threading.Lock()

    def add(self, label: StepLabel) -> int:
        with self._lock:
            serial, self.serial = self.serial, self.serial + 1
            self.paths[serial] = label
            return serial

    def post_release(
        self, selector: PathSelector, *, reason: str, name: str = ""
    ) -> Future[ReleaseReceipt]:
        future: Future[ReleaseReceipt] = Future()

        def release() -> None:
            with self._lock:
                gone = [s for s, label in self.paths.items() if selector.selects(label, s)]
                for serial in gone:
                    del self.paths[serial]
            future.set_result(
                ReleaseReceipt(
                    path=name,
                    reason=reason,
                    freed_bytes=BYTES * len(gone),
                    freed_tokens=len(gone),
                    segments=tuple(gone),
                    n_paths=len(gone),
                    n_deferred=0,
                    is_known=True,
                )
            )

        self.posted.append((selector, reason))
        if self.is_held:
            self._waiting.append(release)
        else:
            release()
        return future

    def post_prefetch(self, selector: PathSelector) -> Future[tuple[()]]:
        self.foreseen.append(selector)
        future: Future[tuple[()]] = Future()
        future.set_result(())
        return future

    def let_go(self) -> None:
        """Run what waits, in another thread, as an engine would."""
        waiting, self._waiting = self._waiting, []
        thread = threading.Thread(target=lambda: [release() for release in waiting])
        thread.start()
        thread.join()

    def labels(self, thread_id: str | None = None) -> list[StepLabel]:
        return [lb for lb in self.paths.values() if thread_id in (None, lb.thread_id)]

    def branches(self, thread_id: str | None = None) -> list[str | None]:
        return sorted(str(label.branch) for label in self.labels(thread_id))

    def nodes(self) -> list[str | None]:
        return sorted(str(label.node) for label in self.labels())


class FakeCell:
    """Holds one engine, as a loaded model's cell does."""

    def __init__(self, kv: FakeKV) -> None:
        self.kv = kv

    def live(self) -> tuple[FakeCell, ...]:
        return (self,)


class FakeModel(BaseChatModel):
    """Answers `<n>`, and leaves a labelled path in its cache."""

    cache_config: CacheConfig = Field(default_factory=CacheConfig)
    engines: Any = Field(default_factory=lambda: FakeCell(FakeKV()))
    delay_s: float = 0.0
    _count: Any = PrivateAttr(default_factory=itertools.count)

    @property
    def _llm_type(self) -> str:
        return "fake-sidequest"

    @property
    def kv(self) -> FakeKV:
        return self.engines.kv

    def _reply(self, run_manager: Any) -> tuple[str, str, dict[str, Any]]:
        n = next(self._count)
        call_id = f"sq-{n}"
        label = current_label(call_id, run_manager)
        if self.delay_s:
            time.sleep(self.delay_s)
        serial = self.kv.add(label)
        figures = {"reused_tokens": 3, "prefilled_tokens": 2, "segment": serial}
        return call_id, f"<{n}>", {"sidequest": figures}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call_id, text, metadata = self._reply(run_manager)
        usage = {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6}
        message = AIMessage(text, id=call_id, response_metadata=metadata, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Any:
        call_id, text, metadata = self._reply(run_manager)
        usage = {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6}
        yield ChatGenerationChunk(message=AIMessageChunk(text, id=call_id))
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                "",
                id=call_id,
                response_metadata=metadata,
                usage_metadata=usage,
                chunk_position="last",
            )
        )


def fake_model(**settings: Any) -> FakeModel:
    """A model whose cache has these settings (`retain=...`)."""
    return FakeModel(cache_config=CacheConfig(**settings))
