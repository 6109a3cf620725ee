"""Attention probabilities formed again from queries, keys and log-sum-exps: `exp(q k - L)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kv.blocks import Block
from sidequest_langchain.kv.features import Features
from sidequest_langchain.kv.parts import Part, RowsByHead


def keys_of(block: Block, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """K `[H, S, D]` of some of a block's rows, and their offsets in the segment."""
    if block.part is None:
        keys = block.keys[layer][:, first - block.first : last - block.first]
        return keys, torch.arange(first, last, device=keys.device)
    if len(block.keys):
        keys = block.keys[layer][:, first - block.first : last - block.first]
    else:
        keys, _ = block.part.load(layer, first, last)
    return keys, offsets_of(block.part, layer, first, last, keys.device)


def offsets_of(part: Part, layer: int, first: int, last: int, device: torch.device) -> Tensor:
    """Offsets of some rows of a part, `[S]`, or `[H, S]` where heads differ."""
    if isinstance(part, RowsByHead):
        return part.keep[layer][:, first:last].to(device)
    if part.offsets is None:
        return torch.arange(first, last, device=device)
    return torch.tensor(part.offsets[first:last], dtype=torch.long, device=device)


def sampled_layers(wanted: int | Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Layers to look at: those given, or so many, evenly spread, neither first nor last.

    Args:
        wanted: Layers, or how many.
        n_layers: Of the model.

    Raises:
        ConfigError: The model has no such layer.
    """
    if not isinstance(wanted, int):
        strange = [layer for layer in wanted if layer >= n_layers]
        if strange:
            msg = (
                f"observed_layers names layer {strange[0]}, but this model's layers are 0 to "
                f"{n_layers - 1}"
            )
            raise ConfigError(msg)
        return tuple(sorted(set(wanted)))
    n = max(1, min(wanted, n_layers))
    return tuple(sorted({int((i + 0.5) * n_layers / n) for i in range(n)}))


def grouped_queries(q: Tensor, n_kv_heads: int) -> Tensor:
    """Queries `[Hq, T, D]` as `[H, G, T, D]`."""
    return q.reshape(n_kv_heads, -1, *q.shape[1:])


def probabilities(q: Tensor, keys: Tensor, total: Tensor, features: Features) -> Tensor:
    """`exp(q k - L)`, fp32 `[H, G, r, S]`, for `q` `[H, G, r, D]`, K `[H, S, D]`, L `[H, G, r]`."""
    scores = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).float()
    scores = scores.view(*q.shape[:3], -1) * features.scaling
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    shares: Tensor = scores.sub_(total.unsqueeze(-1)).exp_()
    return shares
