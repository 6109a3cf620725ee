"""This package as a contestant: the calls of a step at the same time, branches and releases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
)

from sidequest_langchain import SideQuestChatModel, branch

from .contestant import Contestant, Held, Source
from .work import Answer, Asked, Turn

_KINDS: dict[str, type[BaseMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AIMessage,
}


class Ours(Contestant):
    """`SideQuestChatModel` with its own settings; `is_dense` asks for fp32 weights instead."""

    def __init__(self, source: Source, n_threads: int, *, is_dense: bool = False) -> None:
        super().__init__(source, n_threads)
        torch.set_num_threads(n_threads)
        form: dict[str, Any] = {"dtype": "float32", "quantization": "none"} if is_dense else {}
        self._model = SideQuestChatModel(model=source.name, temperature=0.0, **form)
        layout = self._model.engine._core.tree.layout
        self.row_bytes = sum(layer.bytes_per_token for layer in layout)
        self.weights = weights_of(self._model)
        self._before = self._model.kv.usage()
        self._prompts: list[list[int]] = []

    def forget(self) -> None:
        """Empty the cache."""
        self._model.kv.clear()
        self._model.kv.reset_peak()
        self._before = self._model.kv.usage()
        self._prompts = []

    def answer(self, calls: Sequence[Asked], *, is_streamed: bool) -> list[Answer]:
        """All at the same time, each from a thread of its own, as a graph's branches are."""
        one = self._streamed if is_streamed else self._whole
        if len(calls) == 1:
            return [one(calls[0])]
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(one, calls))

    def release(self, branches: Sequence[str]) -> None:
        """As a prune does."""
        for name in branches:
            self._model.kv.release(name)

    def held(self) -> Held:
        """From the cache's own books."""
        now, before = self._model.kv.usage(), self._before
        return Held(
            kv_bytes=now.peak_resident_bytes,
            kv_how="measured",
            n_prefilled_tokens=now.n_prefilled_tokens - before.n_prefilled_tokens,
            facts={"n_steps": now.n_steps - before.n_steps},
        )

    def prompt_ids(self, call: Asked) -> list[int]:
        """The token ids of a call's prompt."""
        return self._model.prompt_ids([_message(turn) for turn in call.messages])

    def _whole(self, call: Asked) -> Answer:
        with _on_branch(call):
            reply = self._model.invoke(_messages(call), max_tokens=call.max_tokens)
        return _answer(reply, None)

    def _streamed(self, call: Asked) -> Answer:
        began_s, first_s = time.perf_counter(), None
        reply: AIMessageChunk | None = None
        with _on_branch(call):
            for chunk in self._model.stream(_messages(call), max_tokens=call.max_tokens):
                if first_s is None and chunk.text:
                    first_s = time.perf_counter() - began_s
                reply = chunk if reply is None else reply + chunk
        assert reply is not None
        return _answer(reply, first_s)


def dense(source: Source, n_threads: int) -> Ours:
    """Ours over fp32 weights: the very ones that transformers gets."""
    return Ours(source, n_threads, is_dense=True)


def fewest_tokens(prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens of prompts that must be computed if each head is computed once.

    Returns:
        The length of the head that all share, and the number of all distinct heads.
    """
    ordered = sorted(tuple(prompt) for prompt in prompts)
    shared = [_n_alike(a, b) for a, b in pairwise(ordered)]
    trunk = min(shared, default=len(ordered[0]))
    return trunk, sum(map(len, ordered)) - sum(shared)


def _n_alike(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def weights_of(model: SideQuestChatModel) -> str:
    """In which form the weights are kept."""
    loaded: Any = model.engine.origin
    if loaded.quantised is not None:
        return "int8"
    return str(loaded.model.dtype).removeprefix("torch.")


def _on_branch(call: Asked) -> Any:
    return branch(call.branch, parent=call.parent) if call.branch else nullcontext()


def _messages(call: Asked) -> list[BaseMessage]:
    return [_message(turn) for turn in call.messages]


def _message(turn: Turn) -> BaseMessage:
    # The message that the model returned, with its id: its tokens are known by that.
    own = turn["answer"].own if "answer" in turn else None
    return own if own is not None else _KINDS[turn["role"]](content=turn["content"])


def _answer(reply: AIMessage, first_s: float | None) -> Answer:
    usage: Any = reply.usage_metadata or {}
    own = AIMessage(content=reply.content, id=reply.id)
    return Answer(
        text=str(reply.text),
        n_prompt_tokens=usage.get("input_tokens", 0),
        n_generated_tokens=usage.get("output_tokens", 0),
        first_token_s=first_s,
        own=own,
    )
