"""What goes into the engine and what comes out: plain frozen facts, no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.errors import RequestError
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.labels import StepLabel

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sample is drawn. `temperature=0` is greedy.

    Raises:
        RequestError: A value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    """Seed of this sample's own generator; batch-mates cannot change what it draws."""
    max_tokens: int | None = None
    """Most tokens to generate; `None` is up to the end of the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the answer ends right before the earliest one."""
    top_logprobs: int | None = None
    """`None`: no log-probabilities. `k`: those of each token chosen, and of the best `k`."""
    ignore_eos: bool = False
    """Go on past the end-of-turn token: for benchmarks of a fixed length."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            "temperature must be a finite number of at least 0",
            self.temperature,
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p must be above 0 and at most 1",
            self.top_p,
        )
        for name in ("top_k", "max_tokens"):
            value = getattr(self, name)
            _require(
                value is None or (_is_whole(value) and value >= 1),
                f"{name} must be a whole number of at least 1",
                value,
            )
        _require(
            self.seed is None or (_is_whole(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed must be a whole number of 64 bits",
            self.seed,
        )
        _require(_are_strings(self.stop), "stop must be strings that are not empty", self.stop)
        _require(
            self.top_logprobs is None
            or (_is_whole(self.top_logprobs) and 0 <= self.top_logprobs <= 20),
            "top_logprobs must be from 0 to 20",
            self.top_logprobs,
        )


def _require(ok: bool, what: str, found: object) -> None:  # noqa: FBT001
    if not ok:
        msg = f"{what}, found {found!r}"
        raise RequestError(msg)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_strings(values: object) -> bool:
    # One string alone would be taken for as many stops as it has letters.
    return isinstance(values, tuple) and all(isinstance(s, str) and s for s in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResultSpan:
    """The tokens `first` to `last`, without `last`, of a prompt: one tool's result."""

    first: int
    last: int
    tool_call_id: str | None = None
    name: str | None = None
    """The tool's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearing:
    """Results of tools that a prompt still holds whole, and whose rows shall leave the cache.

    What follows them stays as it was computed. Lossy.
    """

    runs: tuple[ToolResultSpan, ...]
    """Tokens of the prompt to clear, ascending; a result may be several runs."""
    instead: GenerationRequest
    """What to serve if the prompt is not resident up to the end of the last run: the same call
    with the results' texts replaced. It clears nothing, and is exact."""
    history: frozenset[str] = frozenset()
    """Call ids of the replies that the conversation holds: their paths agree."""
    on_instead: Callable[[], None] = lambda: None
    """Called in the engine's thread where `instead` is served; must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearingReport:
    """What became of a request's `Clearing`."""

    is_reused: bool
    """Whether what follows the cleared results was reused; else `instead` was served."""
    n_rows: int = 0
    """Rows that left now."""
    freed_bytes: int = 0
    cleared: tuple[str, ...] = ()
    """Tool calls of which the results are cleared, now or before."""
    kept: tuple[tuple[str, str], ...] = ()
    """Tool calls of which the results stay in the cache, and why."""
    why: str = ""
    """Why `instead` was served."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values, for an answer's metadata."""
        if not self.is_reused:
            return {"on_edit": "recompute", "why": self.why}
        return {
            "on_edit": "reuse",
            "cleared": list(self.cleared),
            "kept": dict(self.kept),
            "evicted_rows": self.n_rows,
            "freed_bytes": self.freed_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sample to generate. `n` samples of a prompt are `n` requests: they share its KV.

    Raises:
        RequestError: `kinds` or `spans` do not fit the prompt.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    label: StepLabel
    scope: str = ""
    """Prefixes are reused inside one scope only."""
    constraint: Constraint | None = None
    """Restricts which token may come next (grammar, choice)."""
    superseded: tuple[str, ...] = ()
    """Call ids of earlier replies that this prompt holds in another rendering: what their
    paths hold beyond the common prefix is released."""
    kinds: bytes = b""
    """A `TokenKind` for each token of the prompt; empty if they are unknown."""
    spans: tuple[ToolResultSpan, ...] = ()
    """Where the prompt holds results of tools, in order."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are text of the answer all the same: tags of calls and thoughts."""
    exact: bool = False
    """Whether this call does not agree to lossy acts on what it reads."""
    clearing: Clearing | None = None
    """What of the prompt shall leave the cache."""
    why_not_cleared: str = ""
    """Why results were replaced in the text, though clearing them in the cache was asked for."""

    def __post_init__(self) -> None:
        n = len(self.prompt_ids)
        _require(
            len(self.kinds) in (0, n),
            f"kinds must be one byte for each of the {n} tokens of the prompt, or empty",
            self.kinds,
        )
        _require(
            not self.kinds or max(self.kinds) <= max(TokenKind),
            f"kinds must be from 0 to {max(TokenKind):d}",
            self.kinds,
        )
        for span in self.spans:
            _require(
                0 <= span.first < span.last <= n,
                f"spans must be of tokens of the prompt, which has {n}",
                span,
            )
        if self.clearing is not None:
            self._check_clearing(self.clearing, n)

    def _check_clearing(self, clearing: Clearing, n: int) -> None:
        _require(not self.exact, "exact=True agrees to no clearing", clearing.runs)
        ends = [at for run in clearing.runs for at in (run.first, run.last)]
        _require(
            bool(ends) and ends == sorted(ends) and ends[0] >= 0 and ends[-1] < n,
            f"runs to clear must ascend and end before the last of the prompt's {n} tokens",
            clearing.runs,
        )
        _require(clearing.instead.clearing is None, "instead must clear nothing", clearing.instead)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a chosen token, and of the best alternatives.

    Those of the model itself: temperature, top-k and top-p do not enter.
    """

    token_id: int
    token: str
    raw: bytes
    """The token's own bytes."""
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    """(id, text, bytes, log-probability), best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One finished sample."""

    text: str
    token_ids: tuple[int, ...]
    """Every token generated, without the end-of-turn token."""
    kept_ids: tuple[int, ...]
    """The longest head of `token_ids` whose text is wholly inside `text`: what a later prompt
    that holds this reply re-encodes it with."""
    finish_reason: FinishReason
    n_prompt_tokens: int
    n_reused_tokens: int
    """Tokens of the prompt whose K/V came from the tree."""
    n_generated_tokens: int
    """Tokens sampled, the end-of-turn token included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    segment_id: int | None = None
    """The tip of this call's path; `None` if nothing was stored."""
    queue_s: float = 0.0
    first_token_s: float = 0.0
    """Seconds from submission to the first token."""
    total_s: float = 0.0
    clearing: ClearingReport | None = None
    """What became of what the request asked to clear."""

    @property
    def n_prefilled_tokens(self) -> int:
        """Tokens of the prompt that were computed: prompt = reused + prefilled."""
        return self.n_prompt_tokens - self.n_reused_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Text that can no longer change, and the log-probabilities that became known."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a request that went well."""

    result: GenerationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last event of a request that did not; `error` is the original exception."""

    error: BaseException = field(repr=True)


Event: TypeAlias = TextDelta | Finished | Failed
Sink: TypeAlias = Callable[[Event], None]
"""Called in the engine's thread; must not block and must not raise."""
