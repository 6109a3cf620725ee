"""The logits of the tokens that were decoded last: what a canary would compute once more.

It must not know what they are for.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree

MOST_BYTES = 2**26
"""Of all logits that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    step: int
    n_changes: int
    """How often the cache had changed."""
    end: int
    """Tokens before the one that these logits are for."""
    logits: Tensor
    """`[V]`."""


class LastLogits:
    """Of what the last steps decoded, as long as the cache is what it was then."""

    def __init__(self, n_tokens: int, tree: SegmentTree) -> None:
        """Keep logits, of models that compute in fp32 at least.

        In half precision those of a step and of a chunk differ by more than acts are told by.

        Args:
            n_tokens: Of each path, and steps after which they are dropped; 0 keeps none.
            tree: Of the paths. It is not changed.
        """
        is_precise = all(layer.dtype.itemsize >= 4 for layer in tree.layout)
        self._n_tokens = n_tokens if is_precise else 0
        self._tree = tree
        self._n_steps = 0
        self._kept: weakref.WeakKeyDictionary[Segment, deque[_Kept]] = weakref.WeakKeyDictionary()

    def begin_step(self) -> None:
        """Drop what is too old: a path that idles needs no memory."""
        self._n_steps += 1
        for tip, kept in list(self._kept.items()):
            while kept and kept[0].step <= self._n_steps - self._n_tokens:
                kept.popleft()
            if not kept:
                del self._kept[tip]

    def note(self, tip: Segment, end: int, logits: Tensor) -> None:
        """Keep logits, without a copy; they must not be written to.

        Args:
            tip: Of a running path.
            end: Tokens of the path; the last logits are for the one after them.
            logits: `[n, V]`, of its last `n` tokens.
        """
        if not self._n_tokens or logits.untyped_storage().nbytes() * self._n_tokens > MOST_BYTES:
            return
        kept = self._kept.setdefault(tip, deque(maxlen=self._n_tokens))
        now, first = self._tree.n_changes, end - len(logits) + 1
        kept.extend(
            _Kept(step=self._n_steps, n_changes=now, end=first + i, logits=row)
            for i, row in enumerate(logits.unbind())
        )

    def of(self, tip: Segment, n: int) -> list[Tensor] | None:
        """Logits `[V]` for what follows each of the last `n` tokens of the path to `tip`.

        Returns:
            `None` unless all of them were computed with the cache as it is now.
        """
        empty = [s for s in tip.children if s in self._kept and not s.n_tokens]
        kept = list(self._kept.get(empty[0] if empty else tip, ()))[-n:]
        now = self._tree.n_changes
        wanted = [(now, tip.end - n + 1 + i) for i in range(n)]
        if [(one.n_changes, one.end) for one in kept] != wanted:
            return None
        return [one.logits for one in kept]

    def forget(self) -> None:
        """Drop all: the model is another one."""
        self._kept.clear()
