"""One request while it is served: what was fed, what was generated, what to tell the caller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from torch import Tensor

from sidequest_langchain.engine.detokenizer import Detokenizer
from sidequest_langchain.engine.drafting import Drafter
from sidequest_langchain.engine.kind_tracker import KindTracker
from sidequest_langchain.engine.request import (
    ClearingReport,
    Event,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Sink,
    TextDelta,
    TokenLogprob,
)
from sidequest_langchain.engine.sampling import Sampler, logprob_of
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.kv.clearing import without_marks
from sidequest_langchain.kv.segment import Path

logger = logging.getLogger(__name__)


class Sequence:
    """A request's state; touched by the engine's thread only, but for `is_cancelled`.

    The tokens of a sequence are its prompt and then what it generated; `n_resident` of them
    have K/V in the tree. The last token sampled never has: it is fed in the next step.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        tokenizer: ChatTokenizer,
        *,
        context_length: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.prepare: Callable[[Sequence], None] = lambda sequence: None
        """Called in the engine's thread before it begins; may have it serve another prompt."""
        why = request.why_not_cleared
        self.clearing = ClearingReport(is_reused=False, why=why) if why else None
        self.is_cancelled = False
        self.is_over = False
        self.is_released = False
        """Released while it waited: what it stores goes when it ends."""
        self.serial: int | None = None
        """Its path's number, given when it is queued."""
        self.path: Path | None = None
        self.n_resident = 0
        self._n_reused = 0
        self.generated: list[int] = []
        self._sink = sink
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._detokenizer = Detokenizer(tokenizer, request.sampling.stop, request.shown)
        self._sampler = Sampler(request.sampling)
        self._logprobs: list[TokenLogprob] = []
        self._n_sampled = 0
        self._drafter: Drafter | None = None
        self._are_forced = False
        """Whether the last guesses are the grammar's."""
        self._broken: Exception | None = None
        self._tracker: KindTracker | None = None
        self._context_length = context_length
        self.serve(request)
        self._begun = time.perf_counter()
        self._admitted = self._first = self._begun

    def serve(self, request: GenerationRequest) -> None:
        """Serve a request, in place of an earlier one of the same call; before it is admitted."""
        self.request = request
        self._kinds = bytearray(request.kinds or bytes(len(request.prompt_ids)))
        room = self._context_length - len(request.prompt_ids)
        self._n_most = min(request.sampling.max_tokens or room, room)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def n_known(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        return self.n_prompt + len(self.generated)

    @property
    def is_prefilling(self) -> bool:
        """Whether more than one token is left to feed before the next one can be sampled."""
        return self.n_resident < self.n_known - 1

    def known_ids(self, first: int = 0, last: int | None = None) -> tuple[int, ...]:
        """The tokens of the prompt, and those generated so far."""
        n, last = self.n_prompt, self.n_known if last is None else last
        new = self.generated[max(0, first - n) : max(0, last - n)]
        return (*self.request.prompt_ids[first:last], *new)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing but the largest logit decides."""
        return self._sampler.is_greedy and self.request.constraint is None

    @property
    def wants_logits(self) -> bool:
        """Whether the logits themselves are needed, not their largest alone."""
        return not self.is_greedy or self.request.sampling.top_logprobs is not None

    def admit(self, path: Path) -> None:
        """Begin to be served over `path`."""
        self.path = path
        self.n_resident = path.n_reused
        if self._admitted == self._begun:
            self._admitted = time.perf_counter()
            self._n_reused = path.n_reused

    @property
    def may_be_held_back(self) -> bool:
        """Whether it can begin again later with what it knows, as if nothing had happened."""
        path = self.path
        return path is not None and not path.tip.n_pins and self.request.clearing is None

    def hold_back(self) -> None:
        """Wait again: its path is gone, and its tokens are computed anew later. Exact."""
        assert self.path is not None
        self.is_released = self.path.is_released
        self.path = None
        self.n_resident = 0

    def next_tokens(self, n_most: int) -> tuple[list[int], bool]:
        """The tokens to feed in the next step, `n_most` at most, and whether to store them.

        What is resident to its end feeds its last token again without storing it.
        """
        first = self.n_resident
        if first < self.n_known:
            return list(self.known_ids(first, min(self.n_known, first + n_most))), True
        return list(self.known_ids(self.n_known - 1)), False

    def kinds_of(self, first: int, last: int) -> bytes:
        """The kinds of the sequence's tokens `first` to `last`, without `last`.

        Args:
            first: Counted from the prompt's first token.
            last: At most the number of tokens of the prompt and those generated so far.
        """
        if last > len(self._kinds):
            if self._tracker is None:
                self._tracker = KindTracker(self._tokenizer)
                self._tracker.read_prompt(self.request.prompt_ids, self.request.kinds)
            new = self.generated[len(self._kinds) - self.n_prompt : last - self.n_prompt]
            self._kinds.extend(map(self._tracker.push, new))
        return bytes(self._kinds[first:last])

    def forced(self, n_most: int) -> list[int]:
        """Up to `n_most` tokens that the grammar leaves no choice in; none of the first ones."""
        constraint, n_left = self.request.constraint, self._n_left
        if constraint is None or n_left < 1:
            return []
        found = self._asked(constraint.forced)[: min(n_most, n_left)]
        self._are_forced = bool(found)
        return found

    def guess(self, n_most: int) -> list[int]:
        """Up to `n_most` tokens that may come after the last one; none while the prompt is read."""
        n_left = self._n_left
        if n_left < 1:
            return []
        if self._drafter is None:
            self._drafter = Drafter(without_marks(self.request.prompt_ids))
        self._drafter.add(self.generated[self._drafter.n_read - self.n_prompt :])
        found = self._drafter.guess(min(n_most, n_left))
        constraint = self.request.constraint
        if constraint is None or not found:
            return found
        return self._asked(lambda: found[: constraint.n_allowed(found)])

    def learn(self, n_guessed: int, n_right: int) -> None:
        """Hear how many of the guesses were right."""
        if self._drafter is not None and not self._are_forced:
            self._drafter.learn(n_guessed, n_right)

    def choose(self, logits: Tensor, best_id: int) -> int:
        """Choose the next token.

        Args:
            logits: fp32 logits, `[V]`; not changed.
            best_id: Where they are largest.
        """
        constraint = self.request.constraint
        if self._broken is not None:
            raise self._broken
        if constraint is None:
            return self._sampler.draw(logits)
        if self._sampler.is_greedy:
            token_id = constraint.best(logits, best_id)
        else:
            # A mask may work in place; the log-probabilities are those of the model itself.
            token_id = self._sampler.draw(constraint.mask(logits.clone()))
        constraint.accept(token_id)
        return token_id

    def take(self, token_id: int, logits: Tensor | None) -> FinishReason | None:
        """Take a sampled token, tell the caller, and say whether the sequence is over."""
        self._n_sampled += 1
        if self._n_sampled == 1:
            self._first = time.perf_counter()
        if token_id in self._eos_ids and not self.request.sampling.ignore_eos:
            self._tell(self._detokenizer.finish())
            return "stop"
        self.generated.append(token_id)
        text = self._detokenizer.push(token_id)
        n_top = self.request.sampling.top_logprobs
        news: tuple[TokenLogprob, ...] = ()
        if n_top is not None and logits is not None:
            news = (self._logprob(logits, token_id, n_top),)
            self._logprobs.extend(news)
        reason = self._end()
        if reason is not None and not self._detokenizer.is_stopped:
            text += self._detokenizer.finish()
        self._tell(text, news)
        return reason

    def kept_ids(self) -> tuple[int, ...]:
        """The generated tokens that a later prompt can reuse: none reaches past a stop."""
        return self._detokenizer.kept_ids()

    def result(self, reason: FinishReason, segment_id: int | None) -> GenerationResult:
        """The finished sample."""
        assert self.path is not None
        now = time.perf_counter()
        return GenerationResult(
            text=self._detokenizer.text,
            token_ids=tuple(self.generated),
            kept_ids=self.kept_ids(),
            finish_reason=reason,
            n_prompt_tokens=self.n_prompt,
            n_reused_tokens=self._n_reused,
            n_generated_tokens=self._n_sampled,
            logprobs=tuple(self._logprobs),
            segment_id=segment_id,
            queue_s=self._admitted - self._begun,
            first_token_s=self._first - self._begun,
            total_s=now - self._begun,
            clearing=self.clearing,
        )

    def tell(self, event: Event) -> None:
        """Hand an event to the caller; a sink that fails cancels its own request only."""
        self.is_over = not isinstance(event, TextDelta)
        try:
            self._sink(event)
        except Exception:
            logger.debug("the caller of %s is gone", self.request.label.call_id, exc_info=True)
            self.is_cancelled = True

    @property
    def _n_left(self) -> int:
        """Tokens that may come after the next one; 0 while the prompt is read."""
        return max(0, self._n_most - len(self.generated) - 1) if self.generated else 0

    def _asked(self, ask: Callable[[], Iterable[int]]) -> list[int]:
        """What the constraint says of tokens to come; one that raises fails its own request.

        Raised where it is asked, before a step, the error would fail all of that step.
        """
        try:
            return list(ask())
        except Exception as error:
            self._broken = error
            return []

    def _end(self) -> FinishReason | None:
        constraint = self.request.constraint
        if self._detokenizer.is_stopped or (constraint is not None and constraint.is_done):
            return "stop"
        return "length" if len(self.generated) >= self._n_most else None

    def _tell(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        if text or logprobs:
            self.tell(TextDelta(text=text, logprobs=logprobs))

    def _logprob(self, logits: Tensor, token_id: int, n_top: int) -> TokenLogprob:
        tokenizer = self._tokenizer
        return logprob_of(
            logits,
            token_id,
            n_top,
            text_of=lambda i: tokenizer.decode([i], skip_special=False),
            bytes_of=tokenizer.token_bytes,
        )
