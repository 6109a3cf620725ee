"""The seam for constrained decoding: what a grammar must answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Constraint(ABC):
    """Restricts which token may come next. One object serves one sample.

    It is called in the engine's thread only.
    """

    @abstractmethod
    def mask(self, logits: Tensor) -> Tensor:
        """Set the logits of forbidden tokens to -inf.

        Args:
            logits: fp32 logits of one sample, `[V]`; may be changed in place.

        Returns:
            The masked logits, `[V]`.
        """

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Move on past `token_id`, which was sampled."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the text is complete and generation must stop."""
