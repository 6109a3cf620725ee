"""transformers as contestants: `generate`, and its continuous batching. Weights in fp32.

It must not import this package: see `work`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from .contestant import Contestant, Held, Source
from .work import Answer, Asked, Work, plain

_PAGE_TOKENS, _BATCH_TOKENS = 256, 2048


class Transformers(Contestant):
    """A model and tokenizer as the documentation of transformers loads them, in fp32."""

    weights = "float32"

    def __init__(self, source: Source, n_threads: int) -> None:
        super().__init__(source, n_threads)
        torch.set_num_threads(n_threads)
        log: Any = transformers.utils.logging
        log.disable_progress_bar()
        log.set_verbosity_error()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(source.folder, padding_side="left")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model: Any = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
        self.model.train(mode=False)
        ends = self.model.generation_config.eos_token_id
        self.ends = frozenset([ends] if isinstance(ends, int) else ends)
        self.row_bytes = kv_row_bytes(self.model.config)
        self._most_kv_bytes = 0
        self._n_prompt_tokens = 0

    def forget(self) -> None:
        """Forget what was counted; nothing is kept between calls."""
        self._most_kv_bytes = self._n_prompt_tokens = 0

    def ids_of(self, call: Asked) -> list[int]:
        """The token ids of a call's prompt, by the chat template."""
        return list(
            self.tokenizer.apply_chat_template(
                plain(call.messages), add_generation_prompt=True, return_dict=False
            )
        )

    def settings(self, max_tokens: int) -> Any:
        """Greedy; without the checkpoint's own sampling settings, as for everybody."""
        make: Any = transformers.GenerationConfig
        return make(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )


class Generate(Transformers):
    """`model.generate`: the calls of a step as one batch, padded on the left."""

    def answer(self, calls: Sequence[Asked], *, is_streamed: bool) -> list[Answer]:
        """One batch; every call gets as many tokens as the longest may have, then is cut."""
        prompts = [self.ids_of(call) for call in calls]
        batch = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        longest = max(call.max_tokens for call in calls)
        clock = _Clock() if is_streamed else None
        with torch.inference_mode():
            done = self.model.generate(
                **batch,
                generation_config=self.settings(longest),
                return_dict_in_generate=True,
                streamer=clock,
            )
        self._most_kv_bytes = max(self._most_kv_bytes, _cache_bytes(done.past_key_values))
        self._n_prompt_tokens += sum(map(len, prompts))
        n_padded = batch["input_ids"].shape[1]
        sequences = zip(done.sequences, calls, strict=True)
        new = [ids[n_padded:][: call.max_tokens] for ids, call in sequences]
        return [
            Answer(
                text=self.tokenizer.decode(ids, skip_special_tokens=True),
                n_prompt_tokens=len(prompt),
                n_generated_tokens=n_to_the_end(ids.tolist(), self.ends),
                first_token_s=clock.first_s if clock else None,
            )
            for ids, prompt in zip(new, prompts, strict=True)
        ]

    def held(self) -> Held:
        """The cache objects that `generate` returned."""
        return Held(
            kv_bytes=self._most_kv_bytes,
            kv_how="measured",
            n_prefilled_tokens=self._n_prompt_tokens,
            facts={},
        )


class Continuous(Transformers):
    """A `ContinuousBatchingManager` that stays up for a round, sharing blocks of equal heads."""

    _manager: Any = None
    _n_blocks = 0

    def prepare(self, work: Work) -> None:
        """Blocks enough for all calls of the largest step at once, twice; more is never used.

        By default it takes 90 % of the free memory, which no neighbour on a machine survives.
        """
        n_tokens = max(
            sum(_guess_tokens(call.turns, self.tokenizer) + call.max_tokens for call in step.calls)
            for step in work.steps
        )
        self._n_blocks = 2 * -(-n_tokens // _PAGE_TOKENS) + 8

    def forget(self) -> None:
        """A new manager with an empty cache."""
        super().forget()
        self.close_round()
        cache = transformers.ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS, num_blocks=self._n_blocks, max_batch_tokens=_BATCH_TOKENS
        )
        self._manager = self.model.init_continuous_batching(
            generation_config=self.settings(64), continuous_batching_config=cache
        )
        self._manager.start()

    def answer(self, calls: Sequence[Asked], *, is_streamed: bool) -> list[Answer]:
        """All at the same time."""
        began_s = time.perf_counter()
        for i, call in enumerate(calls):
            self._manager.add_request(
                self.ids_of(call),
                request_id=f"{began_s}-{i}",
                max_new_tokens=call.max_tokens,
                record_timestamps=is_streamed,
            )
        done: dict[str, Any] = {}
        while len(done) < len(calls):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    msg = "the manager's thread ended without an answer"
                    raise RuntimeError(msg)
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = result
        return [self._answer(done[f"{began_s}-{i}"], began_s) for i in range(len(calls))]

    def held(self) -> Held:
        """The cache is one tensor, as large as it was asked to be."""
        cache = self._manager.batch_processor.cache
        return Held(
            kv_bytes=int(cache.cache_tensor.nbytes),
            kv_how="measured (allocated at once)",
            n_prefilled_tokens=None,
            facts={"n_blocks": self._n_blocks},
        )

    def close_round(self) -> None:
        """Stop the manager."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
            self._manager = None

    def _answer(self, result: Any, began_s: float) -> Answer:
        stamps = result.timestamps
        return Answer(
            text=self.tokenizer.decode(result.generated_tokens, skip_special_tokens=True),
            n_prompt_tokens=len(result.prompt_ids),
            n_generated_tokens=len(result.generated_tokens),
            first_token_s=stamps[0] - began_s if stamps else None,
        )


class _Clock(BaseStreamer):
    """Notes when the first token came; the prompt is put before it."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._n_puts = 0
        self.first_s: float | None = None

    def put(self, value: Any) -> None:
        self._n_puts += 1
        if self._n_puts == 2:
            self.first_s = time.perf_counter() - self._began_s

    def end(self) -> None:
        """Nothing."""


def kv_row_bytes(config: Any, n_value_bytes: int = 4) -> int:
    """Bytes of keys and values of one token, by a model's config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * heads * size * 2 * n_value_bytes)


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def n_to_the_end(ids: Sequence[int], ends: frozenset[int]) -> int:
    """Tokens up to the one that ends the turn, with that one but without the padding after it."""
    return next((i for i, token in enumerate(ids, start=1) if token in ends), len(ids))


def _guess_tokens(turns: Sequence[Any], tokenizer: Any) -> int:
    """Tokens of a prompt, with room for answers that are not known yet."""
    texts = [turn.get("content", "word " * 64) for turn in turns]
    return len(tokenizer.encode("\n".join(texts))) + 8 * len(texts)
