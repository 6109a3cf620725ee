"""Guesses the tokens to come from those that are there: prompt lookup decoding.

Agents repeat what they read: names, numbers, code, whole sentences of a tool result. Where the
last few tokens occurred before, what followed them then is fed along with the last token; the
model's own choice at each place decides how many of the guesses were right. Exact: a guess saves
a step or is forgotten. It must not know the model.

Paper: Yang et al., arXiv:2304.04487, §2 (inference with reference). Saxena, Prompt Lookup Decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

N_GRAM = 3
"""Tokens that must have occurred before."""

LONG_N_GRAM = 8
"""Tokens that must have occurred before once guesses have mostly been wrong."""

LEAST_RATE = 0.15
"""Below this share of right guesses of late, only long repeats are guessed from."""

FAR_RATE = 0.6
"""Above this share, guesses reach as far ahead as they may, else `NEAR` tokens."""

NEAR = 3
"""A pass over so many more tokens costs a tenth more, on a CPU with int8 weights."""

_MEMORY = 0.8
"""How slowly the share of right guesses forgets."""


class Drafter:
    """One request's guesses. Memory: one table entry a token."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Make a drafter.

        Args:
            ids: What was read so far: the prompt.
        """
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """Where the last occurrence of each n-gram ends, but for one that ends now."""
        self._rate = 0.5
        self.add(ids)

    @property
    def n_read(self) -> int:
        """Tokens read so far."""
        return len(self._ids)

    def add(self, ids: Sequence[int]) -> None:
        """Read on."""
        known, ends = self._ids, self._ends
        for token in ids:
            if len(known) >= N_GRAM:
                ends[tuple(known[-N_GRAM:])] = len(known)
            known.append(token)

    def guess(self, n_most: int) -> list[int]:
        """Up to `n_most` tokens that may follow what was read; often none."""
        ids = self._ids
        if n_most < 1 or len(ids) <= N_GRAM:
            return []
        end = self._ends.get(tuple(ids[-N_GRAM:]))
        if end is None or not (self._rate >= LEAST_RATE or self._is_long(end)):
            return []
        reach = n_most if self._rate >= FAR_RATE else min(n_most, NEAR)
        return ids[end : end + reach]

    def learn(self, n_guessed: int, n_right: int) -> None:
        """Hear how many of the last guesses were right."""
        if n_guessed:
            self._rate = _MEMORY * self._rate + (1 - _MEMORY) * n_right / n_guessed

    def _is_long(self, end: int) -> bool:
        ids = self._ids
        n = LONG_N_GRAM
        return end >= n and ids[end - n : end] == ids[-n:]
