"""What a layer asks of attention beyond queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a layer asks of attention beyond queries, keys and values."""

    scaling: float
    window: int | None = None
    """A token sees the last `window` positions, its own included; `None` is all."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """One logit a query head without a value, `[Hq]`."""
