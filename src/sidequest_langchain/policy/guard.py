"""Measures what acts would do to the next token, before they are done.

The last tokens of a path are run again over the cache as it would be, and as it is unless that
was just done; nothing is changed, so that there is nothing to roll back when the guard says no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sidequest_langchain.config import Guard
from sidequest_langchain.kv.blocks import Row
from sidequest_langchain.kv.parts import Part
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.last_logits import LastLogits


class Forward(Protocol):
    """Runs rows over the tree."""

    def __call__(
        self,
        rows: Sequence[Row],
        ids: Sequence[int],
        wanted: Sequence[int] | None = None,
        *,
        overlay: Mapping[Segment, Sequence[Part]] | None = None,
    ) -> Tensor:
        """Logits of the wanted tokens, fp32 `[W, V]`; see the engine's adapter."""
        ...


class Canary:
    """Next-token distributions of a path's last tokens, with and without a what-if."""

    def __init__(
        self, forward: Forward, limits: Guard, last_logits: LastLogits | None = None
    ) -> None:
        """Make a canary.

        Args:
            forward: Runs rows over the tree.
            limits: How many tokens it looks at, and what it bears.
            last_logits: Those of the steps just run, which spares running the tokens again.
        """
        self._forward = forward
        self._last_logits = last_logits
        self._limits = limits

    @property
    def is_on(self) -> bool:
        """Whether anything is measured."""
        return self._limits.canary_tokens > 0

    def divergence(
        self, tips: Sequence[Segment], overlay: Mapping[Segment, Sequence[Part]]
    ) -> float | None:
        """Mean KL(now || then) of the next token, nats, of the path where it is largest.

        Args:
            tips: Of the paths to look at; those that the overlay does not touch say nothing.
            overlay: The cache as it would be.

        Returns:
            `None` where no path has enough tokens.
        """
        rows, ids, known = [], [], []
        for tip in tips:
            lineage = tip.path()
            if overlay.keys().isdisjoint(lineage):
                continue
            w = min(self._limits.canary_tokens, tip.end - 1)
            if w < 1:
                continue
            last = _last_tokens(lineage, w)
            position = tip.end - w
            rows.append(Row(tip=tip, n_new=w, position=position, is_stored=False, horizon=position))
            ids.append(last)
            known.append(None if self._last_logits is None else self._last_logits.of(tip, w))
        if not rows:
            return None
        fed = [token for tokens in ids for token in tokens]
        wanted = range(len(fed))
        now: list[Tensor] = [row for logits in known for row in logits or ()]
        if len(now) < len(fed):
            now = list(self._forward(rows, fed, wanted).unbind())
        then = self._forward(rows, fed, wanted, overlay=overlay).unbind()
        # One token at a time: distributions of all at once would be megabytes of new memory.
        kl = torch.stack([_divergence(p, q) for p, q in zip(now, then, strict=True)])
        means = [part.mean() for part in torch.split(kl, [len(tokens) for tokens in ids])]
        return max(0.0, float(torch.stack(means).max()))

    def objection(self, kl: float | None, mass: float) -> str:
        """What speaks against acts of this divergence and mass; empty if nothing does."""
        limits = self._limits
        if kl is not None and limits.max_kl is not None and not kl <= limits.max_kl:
            return f"divergence {kl:.3g} nats a token, allowed {limits.max_kl:.3g}"
        if limits.max_mass is not None and mass > limits.max_mass:
            return f"attention mass {mass:.3g}, allowed {limits.max_mass:.3g}"
        return ""


def _divergence(now: Tensor, then: Tensor) -> Tensor:
    """KL(now || then) of the distributions that logits `[V]` stand for, nats."""
    log_p, log_q = torch.log_softmax(now, -1), torch.log_softmax(then, -1)
    return log_p.exp().mul_(log_p.sub_(log_q)).sum()


def _last_tokens(lineage: Sequence[Segment], n: int) -> list[int]:
    found: list[int] = []
    for segment in reversed(lineage):
        found = segment.token_ids[-(n - len(found)) :] + found
        if len(found) >= n:
            break
    return found
