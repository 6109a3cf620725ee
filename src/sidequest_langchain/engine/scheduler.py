"""Which requests run, and what each feeds in the next step: continuous batching.

It must not run the model.

Paper: Orca (OSDI 2022), §3.1, iteration-level scheduling; Sarathi, arXiv:2308.16369, §4.1,
chunked prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, replace

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.kv.segment import n_common
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.labels import PathSelector

WORTH_WAITING = 16
"""A request waits for another's prefill when that will spare it at least so many tokens."""

N_FORCED = 7
"""Most tokens a grammar forces that are fed together: one pass over eight is far less than eight
passes, on every device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one sequence feeds in the next step."""

    sequence: Sequence
    tokens: list[int]
    is_stored: bool
    n_guesses: int = 0
    """How many of the tokens, at their end, are guesses that the model has yet to confirm."""

    @property
    def is_last(self) -> bool:
        """Whether a token can be sampled after these."""
        sequence = self.sequence
        if not self.is_stored:
            return True
        return sequence.n_resident + len(self.tokens) >= sequence.n_known

    @property
    def n_wanted(self) -> int:
        """After how many of the tokens, the last ones, logits are needed."""
        return 1 + self.n_guesses if self.is_last else 0

    @property
    def guesses(self) -> list[int]:
        """The tokens that are guesses."""
        return self.tokens[len(self.tokens) - self.n_guesses :]


class Scheduler:
    """The waiting and the running sequences. First come, first served."""

    def __init__(
        self,
        tree: SegmentTree,
        config: CacheConfig,
        *,
        prefill_chunk: int,
        n_guesses: int,
        guess_room: int,
        prepare: Callable[[str, TokenIds[int]], None] | None = None,
    ) -> None:
        """Make a scheduler.

        Args:
            tree: Where prefixes are looked up.
            config: Settings.
            prefill_chunk: Prompt tokens fed in one step.
            n_guesses: Most tokens guessed ahead for one request in one step.
            guess_room: Tokens of a step, guesses included, up to which guesses are worth it.
            prepare: Told of the scope and the ids of a path that is about to begin.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._tree = tree
        self._config = config
        self._prefill_chunk = prefill_chunk
        self._n_guesses = n_guesses
        self._guess_room = guess_room
        self._prepare = prepare
        self.foresee: Callable[[str, TokenIds[int]], None] = lambda scope, ids: None
        """Told of the scope and the ids of a path that has to wait, once."""
        self._n_foreseen = 0
        """Serial of the first sequence that may not have been told of."""
        self._most_running = config.max_running
        self._n_ended = 0
        """Since `_most_running` changed."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs, and nobody waits."""
        return not (self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        sequence.serial = self._tree.next_serial()
        self.waiting.append(sequence)

    def waiting_for(self, selector: PathSelector) -> list[Sequence]:
        """The waiting sequences that a selector means: they have no path yet."""
        return [
            sequence
            for sequence in self.waiting
            if sequence.serial is not None
            and selector.selects(sequence.request.label, sequence.serial)
        ]

    def admit(self) -> list[tuple[Sequence, BaseException]]:
        """Let waiting sequences begin, each at the longest resident head of its prompt.

        One whose prompt another is computing right now waits for it: the shared head of
        simultaneous requests is computed once.

        Returns:
            Those that could not begin, with the reason.
        """
        delayed: deque[Sequence] = deque()
        failed: list[tuple[Sequence, BaseException]] = []
        while self.waiting and len(self.running) < self._most_running:
            sequence = self.waiting.popleft()
            if self._should_wait(sequence):
                delayed.append(sequence)
                continue
            try:
                self._begin(sequence)
            except BaseException as error:
                failed.append((sequence, error))
        delayed.extend(self.waiting)
        self.waiting = delayed
        for sequence in delayed:
            if sequence.serial is not None and sequence.serial >= self._n_foreseen:
                self._n_foreseen = sequence.serial + 1
                self.foresee(sequence.request.scope, sequence.request.prompt_ids)
        return failed

    def hold_back(self) -> bool:
        """Let the last to come of several who run wait again: the budget cannot hold them all.

        It begins again once another ended, with the tokens it has; exact. From then on fewer run
        at the same time, and with every so many that end one more.

        Returns:
            Whether somebody was held back.

        Paper: vLLM, arXiv:2309.06180, §4.5 (preemption by recomputation).
        """
        able = [sequence for sequence in self.running if sequence.may_be_held_back]
        if len(self.running) < 2 or not able:
            return False
        last = max(able, key=lambda sequence: sequence.serial or 0)
        assert last.path is not None
        self._tree.discard(last.path)
        self.running.remove(last)
        last.hold_back()
        self.waiting.appendleft(last)
        self._most_running, self._n_ended = len(self.running), 0
        return True

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that is over; what it stored goes, unless its path was committed."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self._n_ended += 1
        self._let_more_run()
        path = sequence.path
        if path is not None and path.is_running:
            self._tree.discard(path)

    def _let_more_run(self) -> None:
        if self.is_idle:
            self._most_running, self._n_ended = self._config.max_running, 0
        elif self._n_ended >= self._most_running < self._config.max_running:
            self._most_running, self._n_ended = self._most_running + 1, 0

    def _begin(self, sequence: Sequence) -> None:
        sequence.prepare(sequence)
        request, ids = sequence.request, sequence.known_ids()
        if self._prepare is not None:
            self._prepare(request.scope, ids)
        path = self._tree.begin(request.scope, ids, request.label, serial=sequence.serial)
        path.is_released = sequence.is_released
        sequence.admit(path)
        if request.superseded:
            self._tree.supersede(path, request.superseded)
        self.running.append(sequence)

    def _should_wait(self, sequence: Sequence) -> bool:
        request = sequence.request
        busy = [s for s in self.running if s.is_prefilling and s.request.scope == request.scope]
        if not busy:
            return False
        ids = list(request.prompt_ids)
        most = max(n_common(ids, s.request.prompt_ids) for s in busy)
        if most < WORTH_WAITING:  # asked at every step that it waits: the tree only if it matters
            return False
        _, n_resident = self._tree.match(request.scope, request.prompt_ids)
        return most >= n_resident + WORTH_WAITING

    def plan(self) -> list[Share]:
        """What every running sequence feeds next: decoding ones a token, prefills a chunk.

        Prefills share one chunk a step, oldest first, so that those who decode are not held up.
        """
        room = self._prefill_chunk
        shares = []
        for sequence in self.running:
            if sequence.is_prefilling and room <= 0:
                continue
            tokens, is_stored = sequence.next_tokens(max(room, 1))
            if sequence.is_prefilling:
                room -= len(tokens)
            shares.append(Share(sequence=sequence, tokens=tokens, is_stored=is_stored))
        return self._with_guesses(shares)

    def _with_guesses(self, shares: list[Share]) -> list[Share]:
        """Add tokens that grammars force, or that are guessed where the step has room for them."""
        room = self._guess_room - sum(len(share.tokens) for share in shares)
        n_most = min(self._n_guesses, room // max(len(shares), 1))
        found = []
        for share in shares:
            can_guess = share.is_stored and share.is_last
            guesses = share.sequence.forced(N_FORCED) if can_guess else []
            if not guesses and n_most > 0 and can_guess:
                guesses = share.sequence.guess(n_most)
            if guesses:
                tokens = [*share.tokens, *guesses]
                share = replace(share, tokens=tokens, n_guesses=len(guesses))
            found.append(share)
        return found
