"""Real models with int8 weights: near their dense selves, and served exactly as they are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from sidequest_langchain.engine.registry import engine_over
from sidequest_langchain.models.loading import LoadedModel, load
from tests.engine.driving import ask, run_together
from tests.support.oracle import greedy, least_margin
from tests.support.real import load_real

ROOT = Path(__file__).parents[2]
NAMES = ["smollm2-135m", "qwen2.5-coder-0.5b"]


@cache
def int8(name: str) -> LoadedModel:
    load_real(name)  # skips where the files are missing
    return load(name, device="cpu", quantization="int8")


def text_ids(loaded: LoadedModel, n: int) -> list[int]:
    """Prose and code: half of each."""
    ids: list[int] = []
    for file in ("README.md", "src/sidequest_langchain/kv/segment.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        ids += loaded.tokenizer.encode(text)[: n // 2]
    assert len(ids) == n
    return ids


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
def test_divergence_over_2000_tokens(name: str) -> None:
    dense, ints = load_real(name), int8(name)
    assert ints.quantised is not None
    assert ints.quantised.kl < 0.01
    ids = text_ids(dense, 2000)
    total = n_same = 0.0
    for at in range(0, 2000, 500):  # the logits of all at once take gigabytes
        part = torch.tensor([ids[at : at + 500]])
        with torch.no_grad():
            expected = torch.log_softmax(dense.model(part, use_cache=False).logits[0], -1)
            got = torch.log_softmax(ints.model(part, use_cache=False).logits[0], -1)
        total += float((expected.exp() * (expected - got)).sum())
        n_same += float((expected.argmax(-1) == got.argmax(-1)).sum())

    assert total / 2000 <= 0.01
    assert n_same / 2000 >= 0.93


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_says_what_the_same_modules_say(name: str) -> None:
    """Greedy, token for token, alone and as siblings over a shared trunk, prefilled in chunks."""
    loaded = int8(name)
    trunk = text_ids(loaded, 180)
    prompts = [trunk, *(trunk + loaded.tokenizer.encode(f"\n{i}. The") for i in range(3))]
    engine = engine_over(loaded.model, loaded.tokenizer)
    results = run_together(engine, [ask(ids, 24) for ids in prompts])

    for prompt, result in zip(prompts, results, strict=True):
        expected = greedy(loaded.model, prompt, 24)
        assert least_margin(loaded.model, prompt, expected) > 1e-3  # no tie on the way
        assert list(result.token_ids) == expected
