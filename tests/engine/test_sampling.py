"""What is drawn follows the distribution that transformers' own warpers give the same logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import SamplingParams
from sidequest_langchain.engine.sampling import Sampler
from tests.engine.driving import ask, ids, model_of, run_together
from tests.support import oracle

N_DRAWS = 4000
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
]


def warped(logits: Tensor, settings: dict[str, Any]) -> Tensor:
    """Probabilities as `generate(do_sample=True)` has them, `[V]`."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(min(settings["top_k"], logits.shape[-1])))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    no_ids = torch.zeros(1, 1, dtype=torch.long)
    return torch.softmax(processors(no_ids, logits.unsqueeze(0).clone())[0], -1)


def check_drawn(drawn: Counter[int], expected: Tensor) -> None:
    """Only possible tokens, all likely ones, and their shares by a chi-square test."""
    n = sum(drawn.values())
    possible = {int(i) for i in expected.nonzero()}
    assert set(drawn) <= possible, "a token outside of the support was drawn"
    likely = {i for i in possible if n * float(expected[i]) > 20}
    assert likely <= set(drawn)
    counted = torch.tensor([float(drawn[i]) for i in likely])
    wanted = torch.tensor([n * float(expected[i]) for i in likely])
    chi_square = float(((counted - wanted) ** 2 / wanted).sum())
    degrees = max(1, len(likely) - 1)
    # Mean and variance of chi-square: five standard deviations above is one in 100,000 or less.
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 10


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_warped_distribution(settings: dict[str, Any]) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.1, 0.0, 1.9, -0.5, 1.5])
    sampler = Sampler(SamplingParams(seed=1, **settings))
    before = logits.clone()
    drawn = Counter(sampler.draw(logits) for _ in range(N_DRAWS))
    assert torch.equal(logits, before)
    check_drawn(drawn, warped(logits, settings))


@pytest.mark.parametrize(("spread", "top_p"), [(0.3, 0.9), (6.0, 0.5), (6.0, 0.9), (6.0, 0.999)])
def test_top_p_over_a_large_vocabulary(spread: float, top_p: float) -> None:
    """More ids than are looked at first: a flat distribution needs them all, a steep one few."""
    logits = spread * torch.randn(3000, generator=torch.Generator().manual_seed(2))
    settings = {"temperature": 1.0, "top_p": top_p}
    sampler = Sampler(SamplingParams(seed=1, **settings))
    expected = warped(logits, settings)
    # No token is drawn often enough to be judged alone: ten neighbours in rank are one group.
    rank = expected.argsort(descending=True).argsort()
    n_possible = int((expected > 0).sum())
    group = torch.where(expected > 0, rank * 10 // n_possible, 10)
    shares = torch.zeros(11).index_add_(0, group, expected)
    check_drawn(Counter(int(group[sampler.draw(logits)]) for _ in range(1000)), shares)


def test_equal_seeds_draw_alike() -> None:
    logits = torch.zeros(400)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.0))
        return [sampler.draw(logits) for _ in range(20)]

    before = torch.get_rng_state()
    assert draw(5) == draw(5) != draw(6)
    assert draw(None) != draw(None)
    assert torch.equal(torch.get_rng_state(), before), "the global random state was touched"


@pytest.mark.parametrize("settings", [SETTINGS[5], SETTINGS[6]], ids=str)
def test_first_tokens_of_an_engine(
    make_engine: Callable[..., Engine], settings: dict[str, Any]
) -> None:
    """Three hundred seeds over one prompt: the distribution of the plain model's logits."""
    engine = make_engine(model_of("llama"))
    requests = [ask(ids(30), 1, seed=i, ignore_eos=True, **settings) for i in range(300)]
    drawn = Counter(result.token_ids[0] for result in run_together(engine, requests))
    check_drawn(drawn, warped(oracle.logits(model_of("llama"), ids(30))[-1], settings))
