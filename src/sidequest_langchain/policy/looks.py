"""What the sampled layers of one step gave one segment, while the step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Look:
    """What the sampled layers of one step gave one segment; summed up in place."""

    total: Tensor
    """Sum of probabilities, mean over heads, over queries and layers, `[n]`."""
    last: Tensor
    """Those of the last query, `[n]`, summed over layers."""
    n_queries: Tensor
    """Queries that could see each token, `[n]`, summed over layers."""
    is_prefill: bool = False
    heads: dict[int, Tensor] = field(default_factory=dict)
    """By layer, mean over the query heads of each KV head, `[H, n]`, summed over queries."""


def grown(old: Look | None, n: int, device: torch.device) -> Look:
    """A look that holds `n` tokens, with what the old one saw."""
    total, last, n_queries = (torch.zeros(n, device=device) for _ in range(3))
    new = Look(total, last, n_queries)
    if old is not None:
        for name in ("total", "last", "n_queries"):
            before: Tensor = getattr(old, name)
            getattr(new, name)[: len(before)] = before
        for layer, heads in old.heads.items():
            new.heads[layer] = heads.new_zeros(heads.shape[0], n)
            new.heads[layer][:, : heads.shape[1]] = heads
    return new
