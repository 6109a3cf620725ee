"""Known tokens forced upon a model, and its logits at each: how far a cache moved its words.

It must not know tasks or messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest, SamplingParams
from sidequest_langchain.labels import StepLabel


class Recording(Constraint):
    """Keeps the log-probabilities of every step, and forces the tokens it is given.

    Without tokens it forces nothing and ends nothing: it records a free answer. One object
    serves one sample; rows stay on the CPU, 4 bytes for each id of the vocabulary.
    """

    def __init__(self, forced: Sequence[int] | None = None) -> None:
        self._forced = None if forced is None else tuple(forced)
        self._rows: list[Tensor] = []
        self.token_ids: list[int] = []
        """What was chosen, the end-of-turn token included."""

    def mask(self, logits: Tensor) -> Tensor:
        """Record, and leave nothing but the next forced token."""
        self._rows.append(torch.log_softmax(logits, -1).cpu())
        if self._forced is not None:
            wanted = self._forced[len(self.token_ids)]
            logits.fill_(-torch.inf)
            logits[wanted] = 0.0
        return logits

    def accept(self, token_id: int) -> None:
        """Go on to the next token."""
        self.token_ids.append(token_id)

    @property
    def is_done(self) -> bool:
        """Whether all forced tokens were taken."""
        return self._forced is not None and len(self.token_ids) >= len(self._forced)

    def log_probs(self) -> Tensor:
        """Log-probabilities before each chosen token, fp32 `[n, V]`."""
        return torch.stack(self._rows)


def teacher_forced(
    engine: Engine, ids: Sequence[int], n_from: int, *, scope: str = "teacher-forced"
) -> Tensor:
    """Log-probabilities of an engine's model at known tokens, as its cache lets it see them.

    The first `n_from` ids are a prompt, fed in chunks; each later one is fed alone, as if it had
    been generated. What is stored stays in `scope` until it is released.

    Args:
        engine: Runs the model over its cache, managed or not.
        ids: The whole text.
        n_from: How many of them are the prompt; at least 1, fewer than all.
        scope: Prefixes are reused inside of it.

    Returns:
        Log-probabilities of the ids from `n_from` on, fp32 `[len(ids) - n_from, V]`.

    Raises:
        ValueError: `n_from` leaves no prompt or nothing to force.
    """
    if not 1 <= n_from < len(ids):
        msg = f"n_from must be from 1 to {len(ids) - 1} for {len(ids)} ids, found {n_from}"
        raise ValueError(msg)
    recording = Recording(ids[n_from:])
    request = GenerationRequest(
        prompt_ids=tuple(ids[:n_from]),
        sampling=SamplingParams(max_tokens=len(ids) - n_from, ignore_eos=True),
        label=StepLabel(call_id=f"teacher-forced-{uuid.uuid4().hex}"),
        scope=scope,
        constraint=recording,
    )
    for _ in engine.stream(request):
        pass
    return recording.log_probs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How far a managed cache moved the model's words, over `n_tokens` known tokens."""

    n_tokens: int
    kl: float
    """Mean KL from the full cache's distribution to the managed one's, in nats."""
    kl_max: float
    top1: float
    """Share of tokens at which both have the same best one."""
    nll: float
    """Mean negative log-likelihood of the tokens, managed, in nats."""
    nll_full: float
    """The same with the full cache."""


def divergence(full: Tensor, managed: Tensor, ids: Sequence[int]) -> Divergence:
    """Compare two records of the same tokens.

    Args:
        full: Log-probabilities with the full cache, `[n, V]`.
        managed: With the managed one, `[n, V]`.
        ids: The tokens themselves, `n`.

    Raises:
        ValueError: They are not of the same tokens.
    """
    if full.shape != managed.shape or len(full) != len(ids) or not ids:
        msg = (
            f"records of {len(full)} and {len(managed)} steps were given for {len(ids)} tokens; "
            "force the same tokens upon both caches"
        )
        raise ValueError(msg)
    kls, nlls = [], []
    for row, other in zip(full, managed, strict=True):  # row by row: [n, V] is large
        kls.append(float((row.exp() * (row - other)).sum().clamp(min=0)))
    for record in (full, managed):
        nlls.append(-float(record[torch.arange(len(ids)), torch.tensor(list(ids))].mean()))
    return Divergence(
        n_tokens=len(ids),
        kl=sum(kls) / len(kls),
        kl_max=max(kls),
        top1=float((full.argmax(-1) == managed.argmax(-1)).float().mean()),
        nll=nlls[1],
        nll_full=nlls[0],
    )
