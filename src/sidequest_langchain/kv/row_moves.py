"""Rows of a tensor moved about, along its last axis but one. It must not know what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_one(layers: Sequence[Tensor]) -> Tensor:
    """Layers, `[2, H, n, D]` each, as `[2 L, H, n, D]`: K of all, then V."""
    return torch.cat([*(t[:1] for t in layers), *(t[1:] for t in layers)])


def moved_up(old: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, ascending, moved to the front of a tensor in place, as a view of it."""
    to = 0
    for row in rows:
        if row != to:
            old.narrow(-2, to, 1).copy_(old.narrow(-2, row, 1))
        to += 1
    return old.narrow(-2, 0, to)
