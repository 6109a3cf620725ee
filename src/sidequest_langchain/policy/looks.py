"""What the sampled layers of one step gave one segment, while the step runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sidequest_langchain.kv.segment import Segment


@dataclass(frozen=True, slots=True)
class LogShares:
    """Shares that are yet to be formed: one call for many steps costs no more than for one."""

    lses: Sequence[Tensor]
    """Of each segment, `[H, G * R]`."""
    sums: Tensor
    """Of parts that are everything together, `[P, Hq, R]`."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What one layer gave some segments in one step."""

    segments: Sequence[Segment]
    rows: Sequence[tuple[int, ...]]
    """Of the step, those that read each of them."""
    shares: Tensor | LogShares
    """Of the attention, mean over heads, summed over these rows."""


def formed(told: Sequence[Shares]) -> Iterator[list[float]]:
    """The shares of each, in order, as numbers; waits for the device once for those alike."""
    alike: dict[tuple[int, torch.Size, torch.Size], list[int]] = {}
    found: dict[int, list[float]] = {}
    for i, one in enumerate(told):
        if isinstance(one.shares, LogShares):
            key = len(one.shares.lses), one.shares.lses[0].shape, one.shares.sums.shape
            alike.setdefault(key, []).append(i)
        else:
            found[i] = one.shares.tolist()
    for (n_parts, shape, (_, n_heads, _)), members in alike.items():
        logs = [told[i].shares for i in members]
        lses = torch.stack([t for log in logs if isinstance(log, LogShares) for t in log.lses])
        sums = torch.stack([log.sums for log in logs if isinstance(log, LogShares)])
        over = torch.logsumexp(sums, 1).view(len(members), 1, *shape)
        shares = torch.exp(lses.view(-1, n_parts, *shape) - over).sum((2, 3))
        found.update(zip(members, (shares / n_heads).tolist(), strict=True))
    return iter([found[i] for i in range(len(told))])


@dataclass(slots=True)
class Look:
    """What the sampled layers of one step gave one segment; summed up in place."""

    total: Tensor
    """Sum of probabilities, mean over heads, over queries and layers, `[n]`."""
    n_queries: Tensor
    """Queries that could see each token, `[n]`, summed over layers."""
    last: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the probabilities of the last query that saw each token, `[n]`."""
    is_prefill: bool = False
    heads: dict[int, Tensor] = field(default_factory=dict)
    """By layer, mean over the query heads of each KV head, `[H, n]`, summed over queries."""
    head_queries: dict[int, Tensor] = field(default_factory=dict)
    """By layer, queries that could see each token, `[H, n]`."""

    def last_of(self, layer: int) -> Tensor:
        """The last query's probabilities in a layer, to be written to."""
        if layer not in self.last:
            self.last[layer] = torch.zeros_like(self.total)
        return self.last[layer]

    def heads_of(self, layer: int, n_heads: int) -> tuple[Tensor, Tensor]:
        """A layer's sums by head and its counts, to be written to."""
        if layer not in self.heads:
            for of in (self.heads, self.head_queries):
                of[layer] = self.total.new_zeros(n_heads, len(self.total))
        return self.heads[layer], self.head_queries[layer]


def grown(old: Look | None, n: int, device: torch.device) -> Look:
    """A look that holds `n` tokens, with what the old one saw."""
    new = Look(torch.zeros(n, device=device), torch.zeros(n, device=device))
    if old is not None:
        m = len(old.total)
        new.total[:m], new.n_queries[:m] = old.total, old.n_queries
        for layer, last in old.last.items():
            new.last_of(layer)[:m] = last
        for layer, heads in old.heads.items():
            for into, before in zip(
                new.heads_of(layer, heads.shape[0]), (heads, old.head_queries[layer]), strict=True
            ):
                into[:, :m] = before
    return new
