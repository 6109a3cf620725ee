"""How much a step takes on, by device: the size of prefill chunks, and of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.scheduler import Scheduler
from sidequest_langchain.kv.layout import bytes_per_token
from sidequest_langchain.kv.packed import GROUP
from sidequest_langchain.kv.tree import SegmentTree

PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}
"""Prompt tokens fed in one step, by device."""

CHUNKS_OF_BUDGET = 8
"""Chunks that a managed budget holds, about, where they would be smaller than usual."""

N_GUESSES = 7
"""Tokens guessed ahead for one request in one step."""

GUESS_ROOM = {"cpu": 8}
"""Tokens of a step, guesses included, up to which one more costs little, by device."""


def prefill_chunk_of(adapter: ModelAdapter, config: CacheConfig) -> int:
    """Prompt tokens fed in one step.

    Where a budget is managed, a small share of it: by a chunk at full precision it is exceeded
    for a step.
    """
    chunk = config.prefill_chunk or PREFILL_CHUNK.get(adapter.device.type, 512)
    if config.prefill_chunk is not None or not config.is_managed or config.observe:
        return chunk
    n_rows = [config.budget_tokens] if config.budget_tokens else []
    if config.budget_bytes is not None:
        n_rows.append(config.budget_bytes // bytes_per_token(adapter.layout))
    # Whole groups: what is left of one beside it stays at full precision.
    groups = [max(1, n // CHUNKS_OF_BUDGET // GROUP) for n in n_rows]
    return min([chunk, *(n * GROUP for n in groups)])


def scheduler_for(
    adapter: ModelAdapter,
    tree: SegmentTree,
    config: CacheConfig,
    prepare: Callable[[str, Sequence[int]], None] | None = None,
) -> Scheduler:
    """A scheduler at the pace of this model on its device; `prepare` is `Scheduler`'s."""
    chosen = N_GUESSES if adapter.reads_ahead_cheaply else 0
    room = GUESS_ROOM.get(adapter.device.type, 64)
    return Scheduler(
        tree,
        config,
        prefill_chunk=prefill_chunk_of(adapter, config),
        n_guesses=chosen if config.prompt_lookup is None else config.prompt_lookup,
        guess_room=room if config.prompt_lookup is None else 2**20,
        prepare=prepare,
    )
