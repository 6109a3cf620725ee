"""One forward pass over the tree for what the scheduler chose, inside the budget.

It counts nothing and tells nobody: `core` does, when the pass went well.
"""

from __future__ import annotations

import logging
import traceback

from torch import Tensor

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.managing import budget_of
from sidequest_langchain.engine.scheduler import Share
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.step_plan import Row
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.manager import Manager

logger = logging.getLogger(__name__)


class Passes:
    """Runs forward passes of one model over one tree."""

    def __init__(
        self,
        adapter: ModelAdapter,
        tree: SegmentTree,
        config: CacheConfig,
        manager: Manager | None = None,
    ) -> None:
        self._adapter = adapter
        self._manager = manager
        self._tree = tree
        self._budget_bytes = budget_of(adapter, config)
        self._budget_tokens = config.budget_tokens
        self._has_warned = False
        self._together: list[Share] = []
        """Shares of the step at hand, which run alone where they failed together."""

    def attempt(self, shares: list[Share]) -> Tensor | BaseException:
        """The logits of a pass, or what it failed with.

        The error is returned, not handled where it is caught: as long as it is being handled
        it keeps the activations of the failed pass, which a second try may need the room of.
        """
        if len(shares) > 1 or not any(share is shares[0] for share in self._together):
            self._together = shares
        try:
            return self._forward(shares)
        except BaseException as error:
            let_go(error)
            return error

    def _forward(self, shares: list[Share]) -> Tensor:
        self._make_room(shares)
        rows, ids = [], []
        for share in shares:
            sequence = share.sequence
            assert sequence.path is not None
            if share.is_stored:
                self._tree.reserve(sequence.path, len(share.tokens), share.n_guesses)
            position = sequence.n_resident if share.is_stored else sequence.n_resident - 1
            rows.append(
                Row(
                    tip=sequence.path.tip,
                    n_new=len(share.tokens),
                    position=position,
                    is_stored=share.is_stored,
                )
            )
            ids.extend(share.tokens)
        wanted: list[int] = []
        n = 0
        for share in shares:
            n += len(share.tokens)
            wanted.extend(range(n - share.n_wanted, n))
        if self._manager is None:
            return self._adapter.forward(rows, ids, wanted)
        self._manager.begin_step()
        return self._adapter.forward(rows, ids, wanted, watcher=self._manager.monitor)

    def heard(self, share: Share, logits: Tensor) -> None:
        """The logits after a share's last tokens, those of wrong guesses left out, `[n, V]`."""
        sequence = share.sequence
        # A token that was run again saw its stored row, which may have lost something.
        if self._manager is not None and sequence.path is not None and share.is_stored:
            self._manager.last_logits.note(sequence.path.tip, sequence.n_resident, logits)

    def ended(self, shares: list[Share]) -> None:
        """A pass went well, and what it computed is counted."""
        if self._manager is not None:
            paths = [s.sequence.path for s in shares if s.sequence.path is not None]
            n = sum(len(s.tokens) for s in shares if s.sequence.is_prefilling or len(s.tokens) > 8)
            self._manager.end_step(paths, n)

    def _make_room(self, shares: list[Share]) -> None:
        """Release what is idle until the rows to come fit into the budget."""
        tree = self._tree
        n_rows = n_tokens = 0
        for share in (s for s in shares if s.is_stored):
            assert share.sequence.path is not None
            tip = share.sequence.path.tip
            n_rows += tip.capacity_for(len(share.tokens), share.n_guesses) - tip.capacity
            n_tokens += len(share.tokens)
        n_bytes = n_rows * tree.bytes_per_token
        if self._manager is None:
            self.keep_budget(n_bytes=n_bytes, n_tokens=n_tokens)
        else:
            try:
                self._manager.make_room(n_bytes, is_prefill=n_tokens > len(shares))
            except BudgetExceeded:
                # Of those in one step the one that holds most is refused, and not the others.
                heaviest = max(self._together, key=_own_bytes)
                if len(shares) > 1 or shares[0] is heaviest or not _is_running(heaviest):
                    raise

    def keep_budget(self, *, n_bytes: int = 0, n_tokens: int = 0) -> None:
        """Release what is idle until so much more fits into the budget."""
        tree = self._tree
        if self._manager is not None:
            self._manager.node_ended()
            return
        if self._budget_bytes is None and self._budget_tokens is None:
            return
        most_bytes = self._budget_bytes or float("inf")
        most_tokens = self._budget_tokens or float("inf")

        def is_over() -> bool:
            bytes_then, tokens_then = tree.n_bytes + n_bytes, tree.n_tokens + n_tokens
            return bytes_then > most_bytes or tokens_then > most_tokens

        tree.sweep(is_over)
        if is_over() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the running requests alone need more than the cache's budget (%s bytes, %s "
                "tokens): it is exceeded until they end",
                self._budget_bytes,
                self._budget_tokens,
            )


def _is_running(share: Share) -> bool:
    path = share.sequence.path
    return path is not None and path.is_running


def _own_bytes(share: Share) -> int:
    """Bytes that only this request needs; 0 once it is over."""
    path = share.sequence.path
    if path is None or not path.is_running:
        return 0
    n_bytes = 0
    at: Segment | None = path.tip
    while at is not None and len(at.children) <= 1 and at.paths <= {path}:
        n_bytes += at.n_bytes
        at = at.parent
    return n_bytes


def let_go(error: BaseException) -> None:
    """Empty the frames that an error remembers: they hold activations.

    Those of the errors it was raised from too; whoever keeps the error must not keep tensors.
    """
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        at = pending.pop()
        if at is not None and at not in chain:
            chain.append(at)
            traceback.clear_frames(at.__traceback__)
            pending += [at.__cause__, at.__context__]
