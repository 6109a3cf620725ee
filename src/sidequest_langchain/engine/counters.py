"""Counters of what an engine did since it started."""

from __future__ import annotations

from dataclasses import dataclass

from sidequest_langchain.engine.request import GenerationResult


@dataclass(slots=True)
class Counters:
    """Totals over all finished requests; written by the engine's thread only."""

    n_prompt_tokens: int = 0
    n_reused_tokens: int = 0
    n_generated_tokens: int = 0
    n_steps: int = 0
    n_guessed_tokens: int = 0
    """Tokens guessed ahead by prompt lookup."""
    n_right_guesses: int = 0
    """Those of them that the model chose, too."""

    def count_guesses(self, n: int, n_right: int) -> None:
        """Add the guesses of one request in one step."""
        self.n_guessed_tokens += n
        self.n_right_guesses += n_right

    def count(self, result: GenerationResult) -> None:
        """Add one finished request."""
        self.n_prompt_tokens += result.n_prompt_tokens
        self.n_reused_tokens += result.n_reused_tokens
        self.n_generated_tokens += result.n_generated_tokens
