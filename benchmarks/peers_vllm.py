"""vLLM on a CPU as a contestant, in an environment of its own: see `lineup`.

It must not import this package, nor LangChain.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from .contestant import Contestant, Held, Source
from .work import Answer, Asked, plain

_KV_GIB = 1
_CONTEXT_TOKENS = 9216


class VLLM(Contestant):
    """`LLM.chat` with the calls of a step in one list, fp32, prefix caching as by default."""

    weights = "float32"

    def __init__(self, source: Source, n_threads: int) -> None:
        super().__init__(source, n_threads)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # one process, so that its peak is its own
        )
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_KV_GIB)
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        self._vllm: Any = importlib.import_module("vllm")  # reads the environment
        self._llm = self._vllm.LLM(
            model=source.folder,
            dtype="float32",
            max_model_len=_CONTEXT_TOKENS,
            disable_log_stats=False,  # the time of the first token is in the statistics
        )
        self.forget()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._llm.reset_prefix_cache()
        self._n_prefilled = 0

    def answer(self, calls: Sequence[Asked], *, is_streamed: bool) -> list[Answer]:
        """All at the same time."""
        make = self._vllm.SamplingParams
        settings = [make(max_tokens=call.max_tokens, temperature=0.0) for call in calls]
        prompts = [plain(call.messages) for call in calls]
        done = self._llm.chat(prompts, settings, use_tqdm=False)
        self._n_prefilled += sum(
            len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in done
        )
        return [
            Answer(
                text=output.outputs[0].text,
                n_prompt_tokens=len(output.prompt_token_ids),
                n_generated_tokens=len(output.outputs[0].token_ids),
                first_token_s=getattr(output.metrics, "first_token_latency", None)
                if is_streamed
                else None,
            )
            for output in done
        ]

    def held(self) -> Held:
        """Its cache is allocated at once."""
        return Held(
            kv_bytes=_KV_GIB * 2**30,
            kv_how=f"computed: {_KV_GIB} GiB, allocated at once",
            n_prefilled_tokens=self._n_prefilled,
            facts={},
        )
