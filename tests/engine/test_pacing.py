"""Prefill chunks: what the device likes, and no more than a managed budget bears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.pacing import PREFILL_CHUNK, prefill_chunk_of
from sidequest_langchain.kv.layout import bytes_per_token
from sidequest_langchain.kv.quantise import GROUP
from tests.engine.driving import ask, ids, model_of, run, token_bytes

USUAL = PREFILL_CHUNK["cpu"]


def chunk(**settings: Any) -> int:
    adapter = ModelAdapter(model_of("llama"))
    try:
        if "rows" in settings:  # as bytes
            settings["budget_bytes"] = settings.pop("rows") * bytes_per_token(adapter.layout)
        return prefill_chunk_of(adapter, CacheConfig(**settings))
    finally:
        adapter.close()


@pytest.mark.parametrize("unit", ["budget_tokens", "rows"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [(100_000, USUAL), (8 * 200, 192), (8 * 128, 128), (8 * 127, 64), (100, GROUP)],
)
def test_a_managed_budget_holds_about_eight_chunks_of_whole_groups(unit, rows, expected):
    assert chunk(policy="staged", **{unit: rows}) == expected


def test_nothing_else_makes_chunks_smaller():
    assert chunk() == chunk(budget_tokens=100) == USUAL
    assert chunk(policy="staged", budget_tokens=100, observe=True) == USUAL
    assert chunk(policy="staged", budget_tokens=100, prefill_chunk=200) == 200


@pytest.mark.parametrize("n_chunk", [None, USUAL])
def test_rows_that_packing_keeps_are_not_evicted_for_room(
    n_chunk: int | None, make_engine: Callable[..., Engine]
) -> None:
    """A prompt whose packed rows fit: all stay, whatever its chunks take for a step."""
    n, share = 320, 0.4  # so few values to a head do not pack well
    model = model_of("llama")
    budget = int(share * n * token_bytes(model))
    config = CacheConfig(policy="staged", budget_bytes=budget, prefill_chunk=n_chunk)
    engine = make_engine(model, config=config)
    run(engine, ask(ids(n), 2))
    engine._core.call(lambda: None).result()  # the step's end comes after its result

    assert engine.kv.usage().n_bytes <= budget
    verbs = {r.verb for r in engine._core.manager.log.receipts()}
    assert verbs == {"compress"}
    chunk = USUAL if n_chunk else 64
    peak = engine.kv.usage().peak_resident_bytes
    assert peak <= budget + chunk * token_bytes(model)
