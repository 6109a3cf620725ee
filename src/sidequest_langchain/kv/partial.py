"""Attention of some queries to one block of keys: the seam between devices.

A partial result is (output, log-sum-exp); `merge` joins partials over disjoint keys exactly.
It must not know segments.

Paper: Hydragen, arXiv:2402.05099, §3.1; FlashAttention, arXiv:2205.14135, §3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Partial(Protocol):
    """Attention of `T` queries to `S` keys of one block.

    Args (positional): `q` `[Hq, T, D]`, `k` `[H, S, D]`, `v` `[H, S, Dv]`; query head `i` reads
    KV head `i // (Hq // H)`.

    Returns the output `[Hq, T, Dv]`, in any float dtype, and the log-sum-exp of the scores
    `[Hq, T]` in fp32. A query that may see no key of the block gets -inf and a finite output.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        is_causal: bool = False,
        visible: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See the class.

        Args:
            q: Queries, `[Hq, T, D]`.
            k: Keys, `[H, S, D]`.
            v: Values, `[H, S, Dv]`.
            scaling: Factor of the scores.
            is_causal: Query `i` sees keys `0..i` (T equals S); excludes `visible`.
            visible: Which keys each query sees, bool `[T, S]`, or by KV head `[H, T or 1, S]`;
                `None` is all.
            softcap: Scores become `softcap * tanh(score / softcap)`.
        """
        ...


class Partials(Protocol):
    """`Partial` of the same queries over several blocks, of which they see every key.

    Args (positional): `q` `[H, T, D]`, one query head a KV head; blocks of `k` `[H, S, D]` and `v`
    `[H, S, Dv]` each.

    Returns the outputs `[P, H, T, Dv]`, in any float dtype, and the log-sum-exps `[P, H, T]`, fp32.
    """

    def __call__(
        self, q: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], *, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """See the class.

        Args:
            q: Queries, `[H, T, D]`.
            blocks: K and V of each block.
            scaling: Factor of the scores.
        """
        ...


def one_by_one(partial: Partial) -> Partials:
    """`Partials` that call `partial` for each block."""

    def partials(
        q: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], *, scaling: float
    ) -> tuple[Tensor, Tensor]:
        found = [partial(q, k, v, scaling=scaling) for k, v in blocks]
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])

    return partials


KEY_BLOCK = 2048
"""Keys scored at once: bounds the score matrix of a long block."""


def math_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`Partial` by two matrix products, on any device and for every feature."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    if is_causal:
        visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).tril()
    elif visible is not None and visible.dim() == 3:
        visible = visible.repeat_interleave(q.shape[0] // k.shape[0], 0)
    parts = []
    for start in range(0, n_keys, KEY_BLOCK):
        block = slice(start, min(start + KEY_BLOCK, n_keys))
        seen = None if visible is None else visible[..., block]
        parts.append(_score(q, k[:, block], v[:, block], scaling, seen, softcap))
    return joined(parts)


def _score(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    visible: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    n_heads, n_queries, dim = q.shape
    n_kv = k.shape[0]
    # The query heads of a KV group become rows of one product: K and V are read once.
    grouped = (q * scaling).reshape(n_kv, n_heads // n_kv * n_queries, dim)
    scores = torch.matmul(grouped, k.transpose(1, 2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(n_heads, n_queries, -1)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    most = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(most.isinf(), 0.0, most))
    total = weights.sum(-1, keepdim=True)
    rows = (weights / total.clamp_min(1e-38)).to(v.dtype)
    out = torch.matmul(rows.view(n_kv, -1, rows.shape[-1]), v)
    lse = (torch.log(total) + torch.where(most.isinf(), 0.0, most)).squeeze(-1)
    return out.view(n_heads, n_queries, -1), lse


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Partials over disjoint keys as one partial; a query that saw nothing gets -inf."""
    if len(parts) == 1:
        return parts[0]
    outputs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    # Where every part saw nothing the weights would be 0 / 0; any finite output will do.
    least = torch.finfo(lses.dtype).min
    return merge(outputs, lses.clamp_min(least)), torch.logsumexp(lses, 0)


def merge(outputs: Tensor, lses: Tensor) -> Tensor:
    """Join partials over disjoint keys; exact up to rounding.

    Args:
        outputs: Partial outputs, `[P, ..., Dv]`.
        lses: Their log-sum-exps, fp32 `[P, ...]`; -inf where a partial saw nothing.

    Returns:
        The output over all keys, fp32 `[..., Dv]`.
    """
    weights = torch.softmax(lses, 0)
    return (weights.unsqueeze(-1) * outputs.float()).sum(0)
