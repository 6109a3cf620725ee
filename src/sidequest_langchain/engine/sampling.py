"""Draws the next token of one sample from its logits; it must not know the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sidequest_langchain.engine.request import SamplingParams, TokenLogprob

HEAD = 1024
"""Tokens looked at first for top-p: sorting a whole vocabulary costs milliseconds."""


class Sampler:
    """One sample's way of choosing tokens, with a generator of its own.

    What it draws depends on its logits and its seed, never on batch-mates.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self._params.temperature == 0

    def draw(self, logits: Tensor) -> int:
        """Choose a token.

        Args:
            logits: fp32 logits, `[V]`; not changed.

        Returns:
            A token id; the lowest of several equally likely ones where greedy.
        """
        params = self._params
        if self.is_greedy:
            return int(logits.argmax())
        logits = logits.cpu()
        # From the best one down: a tiny temperature sends the others to -inf, never to a NaN.
        logits = (logits - logits.max()) / params.temperature
        values, ids = _head(logits, params.top_k, params.top_p)
        weights = torch.softmax(values, -1)
        if params.top_p < 1:
            # A token stays while the mass before it is below top_p: the first always does.
            before = weights.cumsum(-1) - weights
            weights = torch.where((before < params.top_p) | (before == 0), weights, 0.0)
        return int(ids[torch.multinomial(weights, 1, generator=self._generator)])


def _head(logits: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The tokens worth looking at, best first: `(logits, ids)`, normalised by the caller.

    With top-p alone, the head is enlarged to the whole vocabulary when it holds too little mass.
    """
    n_all = logits.shape[-1]
    if top_k is not None:
        values, ids = torch.topk(logits, min(top_k, n_all))
        return values, ids
    if top_p == 1:
        return logits, torch.arange(n_all)
    values, ids = torch.topk(logits, min(HEAD, n_all))
    mass = torch.exp(torch.logsumexp(values, -1) - torch.logsumexp(logits, -1))
    if mass < top_p:
        values, ids = torch.sort(logits, descending=True)
        return values, ids
    # The tail must still count in the mass that top_p is a share of.
    rest = torch.logsumexp(logits, -1) + torch.log1p(-mass.clamp_max(1 - 1e-7))
    return torch.cat([values, rest.unsqueeze(0)]), torch.cat([ids, ids[:1]])


def logprob_of(
    logits: Tensor,
    token_id: int,
    n_top: int,
    *,
    text_of: Callable[[int], str],
    bytes_of: Callable[[int], bytes],
) -> TokenLogprob:
    """The log-probability of a chosen token and of the best alternatives.

    Args:
        logits: fp32 logits, `[V]`.
        token_id: The token chosen.
        n_top: How many alternatives to name.
        text_of: Text of a token id.
        bytes_of: Bytes of a token id.
    """
    logprobs = torch.log_softmax(logits, -1)
    values, ids = torch.topk(logprobs, n_top)
    top = tuple(
        (i, text_of(i), bytes_of(i), value)
        for i, value in zip(ids.tolist(), values.tolist(), strict=True)
    )
    return TokenLogprob(
        token_id=token_id,
        token=text_of(token_id),
        raw=bytes_of(token_id),
        logprob=float(logprobs[token_id]),
        top=top,
    )
