"""LangChain's local chat models as contestants: one call after the other.

`generate` on one model is not safe from several threads, and neither is a llama.cpp context;
both classes leave it to their caller to ask in turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gguf import LlamaFileType
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from .contestant import Contestant, Held, Source
from .work import Answer, Asked, Work

_KINDS: dict[str, type[BaseMessage]] = {
    "system": SystemMessage,
    "user": HumanMessage,
    "assistant": AIMessage,
}
_SLACK_TOKENS = 64
_MOST_STREAMED_TOKENS = 2048
"""Longer prompts are answered by `ChatHuggingFace` in one piece."""


class InTurn(Contestant):
    """A chat model that answers one call after the other."""

    chat: BaseChatModel

    def answer(self, calls: Sequence[Asked], *, is_streamed: bool) -> list[Answer]:
        """In turn; whoever comes last waits longest for a first token."""
        began_s = time.perf_counter()
        return [self.one(call, began_s, is_streamed=is_streamed) for call in calls]

    def one(self, call: Asked, began_s: float, *, is_streamed: bool) -> Answer:
        """One call through LangChain's own entry points.

        Args:
            call: What is asked.
            began_s: When the calls of this step were due.
            is_streamed: Whether to stream.
        """
        messages = [_KINDS[m["role"]](content=m["content"]) for m in call.messages]
        settings = self.settings(call)
        first_s = None
        if is_streamed:
            parts = []
            for chunk in self.chat.stream(messages, **settings):
                if first_s is None and chunk.text:
                    first_s = time.perf_counter() - began_s
                parts.append(str(chunk.text))
            text = "".join(parts)
        else:
            text = str(self.chat.invoke(messages, **settings).text)
        n_prompt, n_generated = self.count(call, text)
        return Answer(
            text=text,
            n_prompt_tokens=n_prompt,
            n_generated_tokens=n_generated,
            first_token_s=first_s,
        )

    def settings(self, call: Asked) -> dict[str, Any]:
        """What a call sets."""
        raise NotImplementedError

    def count(self, call: Asked, text: str) -> tuple[int, int]:
        """Tokens of the prompt and of the answer of the call that just ended."""
        raise NotImplementedError


class HuggingFace(InTurn):
    """`ChatHuggingFace` over a `HuggingFacePipeline`, fp32."""

    weights = "float32"

    def __init__(self, source: Source, n_threads: int) -> None:
        super().__init__(source, n_threads)
        from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline  # noqa: PLC0415
        from transformers import pipeline  # noqa: PLC0415

        from .peers_transformers import Generate  # noqa: PLC0415

        self._inner = Generate(source, n_threads)
        self._inner.model.generation_config = self._inner.settings(64)
        tokenizer = self._inner.tokenizer
        pipe = pipeline("text-generation", model=self._inner.model, tokenizer=tokenizer)
        self.chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=pipe), tokenizer=tokenizer)
        self.row_bytes = self._inner.row_bytes
        self.forget()

    def forget(self) -> None:
        """Forget what was counted."""
        self._n_prompt_tokens = self._most_tokens = 0

    def one(self, call: Asked, began_s: float, *, is_streamed: bool) -> Answer:
        """Streamed if the prompt is short: its streamer gives up after 60 s without a token."""
        is_short = len(self._inner.ids_of(call)) <= _MOST_STREAMED_TOKENS
        return super().one(call, began_s, is_streamed=is_streamed and is_short)

    def settings(self, call: Asked) -> dict[str, Any]:
        """Greedy, and without the prompt in the answer."""
        given: dict[str, Any] = {"max_new_tokens": call.max_tokens, "do_sample": False}
        return {"pipeline_kwargs": {**given, "return_full_text": False}}

    def count(self, call: Asked, text: str) -> tuple[int, int]:
        """By the tokenizer; one more where the answer ended by itself."""
        n_prompt = len(self._inner.ids_of(call))
        n_text = len(self._inner.tokenizer.encode(text, add_special_tokens=False))
        n_generated = min(n_text + 1, call.max_tokens)
        self._n_prompt_tokens += n_prompt
        self._most_tokens = max(self._most_tokens, n_prompt + n_generated - 1)
        return n_prompt, n_generated

    def held(self) -> Held:
        """The cache of `generate` is out of reach: it goes when a call ends."""
        return Held(
            kv_bytes=self._most_tokens * self.row_bytes,
            kv_how="computed: tokens of the longest call",
            n_prefilled_tokens=self._n_prompt_tokens,
            facts={},
        )


class LlamaCpp(InTurn):
    """`ChatLlamaCpp` over the `.gguf` file, its context as long as the workload needs."""

    def __init__(self, source: Source, n_threads: int) -> None:
        super().__init__(source, n_threads)
        self._n_context = 0
        self._load(512)
        # KV rows are fp16 by default
        meta = self._llama.metadata
        name = meta["general.architecture"]
        n_layers = int(meta[f"{name}.block_count"])
        n_heads = int(meta[f"{name}.attention.head_count"])
        n_kv_heads = int(meta.get(f"{name}.attention.head_count_kv", n_heads))
        head_dim = int(meta[f"{name}.embedding_length"]) // n_heads
        self.row_bytes = n_layers * n_kv_heads * head_dim * 2 * 2
        self.weights = LlamaFileType(int(meta["general.file_type"])).name.removeprefix("MOSTLY_")
        self.forget()

    def prepare(self, work: Work) -> None:
        """A context as long as the longest call may become, and no longer."""
        answers = [call.max_tokens for call in work.calls]
        longest = 0
        for call in work.calls:
            known = "\n".join(turn.get("content", "") for turn in call.turns)
            unknown = sum(answers[t["answer_of"]] for t in call.turns if "answer_of" in t)
            n_tokens = len(self._llama.tokenize(known.encode(), special=True))
            longest = max(longest, n_tokens + unknown + 8 * len(call.turns) + call.max_tokens)
        n_context = -(-(longest + _SLACK_TOKENS) // 256) * 256
        if n_context != self._n_context:
            self._load(n_context)

    def forget(self) -> None:
        """Forget the context, so that a round does not hit what the last one left."""
        self._llama.reset()
        self._n_prefilled = 0

    def settings(self, call: Asked) -> dict[str, Any]:
        """Greedy comes from the model's own temperature."""
        self._reset_clock()
        return {"max_tokens": call.max_tokens}

    def count(self, call: Asked, text: str) -> tuple[int, int]:
        """By llama.cpp's own counters: what it evaluated, and what is in the context now."""
        import llama_cpp  # noqa: PLC0415

        n_text = len(self._llama.tokenize(text.encode(), add_bos=False))
        n_generated = min(n_text + 1, call.max_tokens)
        self._n_prefilled += int(llama_cpp.llama_perf_context(self._llama.ctx).n_p_eval)
        # The last token sampled was not evaluated, nor is an end-of-turn token kept.
        return int(self._llama.n_tokens) - n_generated + 1, n_generated

    def held(self) -> Held:
        """The context is allocated at once."""
        return Held(
            kv_bytes=self._n_context * self.row_bytes,
            kv_how=f"computed: a context of {self._n_context} tokens, allocated at once, fp16",
            n_prefilled_tokens=self._n_prefilled,
            facts={"n_context": self._n_context},
        )

    def close(self) -> None:
        """Free the context."""
        self._llama.close()

    @property
    def _llama(self) -> Any:
        chat: Any = self.chat
        return chat.client

    def _load(self, n_context: int) -> None:
        from langchain_community.chat_models import ChatLlamaCpp  # noqa: PLC0415

        self.chat = ChatLlamaCpp(
            model_path=str(self.source.gguf),
            n_ctx=n_context,
            n_batch=512,
            n_threads=self.n_threads,
            temperature=0.0,
            top_k=1,
            top_p=1.0,
            repeat_penalty=1.0,
            verbose=False,
        )
        self._n_context = n_context

    def _reset_clock(self) -> None:
        import llama_cpp  # noqa: PLC0415

        llama_cpp.llama_perf_context_reset(self._llama.ctx)
