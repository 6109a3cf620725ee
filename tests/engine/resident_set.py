"""A program: fills an engine's cache, releases it, and prints what the process gave back.

    python -m tests.engine.resident_set one|many|branches

Its own process, since another test's garbage would be counted along. The last line is JSON:
bytes freed by the books, and by how much the resident set fell.
"""

from __future__ import annotations

import gc
import json
import sys

import psutil
import torch

from sidequest_langchain.engine.engine import Engine
from tests.engine.driving import ask, ids, run
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

N_TOKENS = 1200


def wide_engine() -> Engine:
    """Narrow but for its K/V: 32 KiB a token."""
    model = tiny_model(
        "llama",
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2 * N_TOKENS,
    )
    return Engine(model, byte_tokenizer())


def fill(engine: Engine, shape: str) -> list[str]:
    """Store about `N_TOKENS` rows; returns the names to release, one after another."""
    if shape == "one":
        run(engine, ask(long(N_TOKENS), 1, call="0"))
        return ["0"]
    if shape == "many":
        # Each far smaller than what the allocator gives back by itself.
        for n in range(40):
            run(engine, ask(ids(30, seed=n), 1, call=str(n), scope=str(n)))
        return [str(n) for n in range(40)]
    run(engine, ask(long(600), 1, call="trunk"))
    for n in range(10):
        run(engine, ask([*long(600), *ids(60, seed=n)], 1, call=str(n)))
    return ["trunk", *(str(n) for n in range(10))]


def long(n: int) -> list[int]:
    """Ids whose pattern does not repeat within `n`."""
    return [(13 * i * i + 7 * i + i // 400) % 400 for i in range(n)]


def main() -> None:
    torch.set_num_threads(1)
    process = psutil.Process()
    engine = wide_engine()
    run(engine, ask(long(N_TOKENS), 1, call="warm-up"))
    engine.kv.clear()
    names = fill(engine, sys.argv[1])
    gc.collect()
    n_bytes, before = engine.kv.usage().n_bytes, process.memory_info().rss
    freed = sum(engine.kv.release(name).freed_bytes for name in names)
    gc.collect()
    after = process.memory_info().rss
    left = engine.kv.usage().n_bytes
    engine.close()
    sys.stdout.write(
        json.dumps({"held": n_bytes, "freed": freed, "left": left, "rss_fell": before - after})
    )


if __name__ == "__main__":
    main()
