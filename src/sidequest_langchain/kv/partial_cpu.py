"""`Partial` through PyTorch's fused CPU kernel, which returns the log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sidequest_langchain.kv.partial import math_partial, one_by_one


def cpu_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`Partial` by the fused kernel; what it cannot do goes to `math_partial`."""
    is_by_head = visible is not None and visible.dim() == 3
    if softcap is not None or is_by_head or k.shape[2] != v.shape[2]:
        return math_partial(
            q, k, v, scaling=scaling, is_causal=is_causal, visible=visible, softcap=softcap
        )
    n_heads, n_queries, dim = q.shape
    n_kv = k.shape[0]
    mask = None
    blind = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        blind = ~visible.any(-1)
    is_folded = n_heads != n_kv and not is_causal and mask is None
    if is_folded:
        # The heads of a KV group are queries of one head: K and V are read once for them.
        q = q.reshape(n_kv, n_heads // n_kv * n_queries, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        0.0,
        is_causal,
        attn_mask=mask,
        scale=scaling,
    )
    out, lse = out.squeeze(0), lse.squeeze(0).float()
    if is_folded:
        out, lse = out.reshape(n_heads, n_queries, dim), lse.reshape(n_heads, n_queries)
    if blind is not None:  # the kernel says 0 for a query that saw nothing
        lse = lse.masked_fill(blind, float("-inf"))
    return out, lse


def cpu_partials(
    q: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], *, scaling: float
) -> tuple[Tensor, Tensor]:
    """`Partials` by the fused kernel.

    A token's attention over a managed path is many calls for little: here nothing surrounds them.
    """
    if any(k.shape[2] != v.shape[2] for k, v in blocks):
        return one_by_one(cpu_partial)(q, blocks, scaling=scaling)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    batched = q.unsqueeze(0)
    found = [kernel(batched, k.unsqueeze(0), v.unsqueeze(0), scale=scaling) for k, v in blocks]
    if len(found) == 1:
        return found[0][0], found[0][1].float()
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found]).float()
