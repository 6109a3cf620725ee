"""The seam for constrained decoding: what a grammar must answer; it must not know any library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Constraint(ABC):
    """Restricts which token may come next. One object serves one sample.

    It is called in the engine's thread only. What it raises fails its own request.
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

    def best(self, logits: Tensor, best_id: int) -> int:
        """The most likely token that is allowed; the lowest of several equally likely ones.

        Args:
            logits: fp32 logits of one sample, `[V]`; not changed.
            best_id: Where they are largest, whether it is allowed or not.
        """
        return int(self.mask(logits.clone()).argmax())

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, each the only one allowed in its place; may be none.

        They are fed together, and each is still chosen, from its own mask, before it counts: a
        wrong one costs time and changes nothing.
        """
        return ()

    def n_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, guessed to come next, are worth trying; changes nothing."""
        return len(token_ids)
