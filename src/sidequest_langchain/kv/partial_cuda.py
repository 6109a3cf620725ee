"""`Partial` through PyTorch's fused CUDA kernels, which return the log-sum-exp."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sidequest_langchain.kv.partial import math_partial

_HALVES = (torch.float16, torch.bfloat16)


def is_fused(q: Tensor, k: Tensor, v: Tensor, *, is_masked: bool, softcap: float | None) -> bool:
    """Whether the flash kernel takes these inputs: half precision, a head dim it was built for."""
    dim = q.shape[-1]
    fits = q.dtype in _HALVES and dim % 8 == 0 and dim <= 256 and k.shape[2] == v.shape[2]
    return fits and not is_masked and softcap is None and _has_flash(q.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether the flash kernel runs on a device; it was built for Ampere and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def cuda_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`Partial` by the flash kernel; what it cannot do goes to `math_partial`."""
    if not is_fused(q, k, v, is_masked=visible is not None, softcap=softcap):
        return math_partial(
            q, k, v, scaling=scaling, is_causal=is_causal, visible=visible, softcap=softcap
        )
    n_heads, n_queries, dim = q.shape
    n_kv = k.shape[0]
    if is_causal:
        k = k.repeat_interleave(n_heads // n_kv, 0)
        v = v.repeat_interleave(n_heads // n_kv, 0)
    else:
        q = q.reshape(n_kv, n_heads // n_kv * n_queries, dim)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q[None], k[None], v[None], 0.0, is_causal, scale=scaling
    )
    return out[0].reshape(n_heads, n_queries, dim), lse[0].float().reshape(n_heads, n_queries)
