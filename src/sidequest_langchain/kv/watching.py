"""What attention tells whoever watches it; it must not know what is made of that.

A watcher reads scores and changes nothing. For a query, `exp(lse - total)` of a block or segment is
its exact share of the attention, and `exp(q k - total)` that of one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.kv.blocks import Block
from sidequest_langchain.kv.features import Features
from sidequest_langchain.kv.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One layer's attention of the `R` decoding rows, `plan.decoding`."""

    q: Tensor
    """Queries after RoPE, `[Hq, R, D]`; query head `i` reads KV head `i // G`."""
    blocks: tuple[Block, ...]
    """What they saw; each is of one segment, and a segment may have several."""
    lses: list[Tensor]
    """Log-sum-exp of each block's scores, fp32 `[H, G * r]`: column `g * r + j` is head `g` of the
    group for the block's `j`-th row. -inf where it saw nothing."""
    sums: Tensor
    """Log-sum-exp over parts that are everything together, sinks included, fp32 `[P, Hq, R]`."""
    features: Features

    @property
    def total(self) -> Tensor:
        """Log-sum-exp over everything, fp32 `[Hq, R]`; formed anew each time."""
        return torch.logsumexp(self.sums, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """One layer's attention of one row's chunk of `T` tokens."""

    row: int
    """Which of the plan's rows."""
    q: Tensor
    """Queries after RoPE, `[Hq, T, D]`."""
    segments: list[Segment]
    """Of the path, those that some query saw."""
    lses: list[Tensor]
    """Log-sum-exp over each segment's rows, fp32 `[Hq, T]`; -inf where a query saw none."""
    own_lse: Tensor
    """Log-sum-exp over the chunk itself, fp32 `[Hq, T]`."""
    total: Tensor
    """Log-sum-exp over everything, sinks included, fp32 `[Hq, T]`."""
    features: Features
