"""Drives conversations of which results are cleared, and says what is right then.

What is right: a full cache in which no query that came after the clearing sees the cleared rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sidequest_langchain.engine.request import (
    Clearing,
    GenerationRequest,
    GenerationResult,
    ToolResultSpan,
)
from tests.engine.driving import ask
from tests.engine.managing import Sight, plain_model, sight

INSTEAD = [7, 9]
"""What stands in place of a cleared result where its text is replaced."""


def clear(
    request: GenerationRequest,
    *runs: tuple[int, int],
    history: Sequence[str] = (),
    on_instead: Callable[[], None] = lambda: None,
) -> GenerationRequest:
    """The request with results to clear, given as first tokens and those after the last ones."""
    ids = request.prompt_ids
    text: list[int] = []
    at = 0
    for first, last in runs:
        text += [*ids[at:first], *INSTEAD]
        at = last
    clearing = Clearing(
        runs=tuple(
            ToolResultSpan(first=first, last=last, tool_call_id=f"result-{first}")
            for first, last in runs
        ),
        instead=replace(request, prompt_ids=(*text, *ids[at:])),
        history=frozenset(history),
        on_instead=on_instead,
    )
    return replace(request, clearing=clearing)


@dataclass(frozen=True)
class Cleared:
    """A run of tokens that queries from `since` on do not see."""

    first: int
    last: int
    since: int


def masked_logprobs(
    family: str, ids: Sequence[int], cleared: Sequence[Cleared], n_last: int
) -> Tensor:
    """Log-probabilities after each of the last `n_last` tokens but the last, `[n_last - 1, V]`.

    Of plain transformers over all of `ids`, in one forward.
    """
    model = plain_model(family)
    config = model.config
    n_layers = config.num_hidden_layers
    n_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sights = []
    moments = sorted({0, *(one.since for one in cleared), len(ids)})
    for begin, end in itertools.pairwise(moments):
        hidden = torch.zeros(n_layers, n_heads, len(ids), dtype=torch.bool)
        for one in cleared:
            if one.since <= begin:
                hidden[..., one.first : one.last] = True
        sights.append(Sight(list(range(begin, end)), hidden, {}))
    with torch.no_grad(), sight(sights):
        logits = model(
            input_ids=torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            use_cache=False,
        ).logits[0]
    return torch.log_softmax(logits[-n_last - 1 : -1].float(), -1)


def differs(
    family: str,
    request: GenerationRequest,
    result: GenerationResult,
    cleared: Sequence[Cleared],
) -> float:
    """How far what a result tells of its tokens is from what is right; asks for top_logprobs."""
    n = len(result.logprobs)
    expected = masked_logprobs(
        family, [*map(int, request.prompt_ids), *result.token_ids], cleared, n
    )
    worst = 0.0
    for row, told in zip(expected, result.logprobs, strict=True):
        worst = max(worst, abs(float(row[told.token_id]) - told.logprob))
        for token_id, _, _, logprob in told.top:
            worst = max(worst, abs(float(row[token_id]) - logprob))
    return worst


def asked(prompt: Sequence[int], n: int = 8, **given: Any) -> GenerationRequest:
    """A request that tells log-probabilities, as `differs` wants them."""
    return ask(prompt, n, ignore_eos=True, top_logprobs=5, **given)
