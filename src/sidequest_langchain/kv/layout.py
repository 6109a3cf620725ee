"""What one token's K/V looks like, layer by layer; it must not know any token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of one attention layer's K/V, and where that layer runs."""

    n_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in this layer."""
        return self.n_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


KVLayout: TypeAlias = tuple[LayerShape, ...]
"""One `LayerShape` a layer, in the order of `layer_idx`; layers may differ."""


def bytes_per_token(layout: KVLayout) -> int:
    """Bytes of K and V of one token in all layers."""
    return sum(layer.bytes_per_token for layer in layout)
