"""The KV of a thread's checkpoints: what is held of one, and letting go of what no one needs.

It must not know how checkpoints are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sidequest_langchain.errors import EngineClosedError
from sidequest_langchain.graph.lifecycle import Cache, Lifecycle
from sidequest_langchain.graph.lineage import Key, Lineage
from sidequest_langchain.kv.receipts import ReleaseReceipt, SegmentInfo
from sidequest_langchain.labels import PathSelector, StepLabel

logger = logging.getLogger(__name__)

KVState: TypeAlias = Literal["resident", "archived", "saved", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKV:
    """What is held of the KV that a run from a checkpoint can begin with."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str | None
    """`None` if there is no such checkpoint."""
    state: KVState
    """* `"resident"`: in memory, and reused as far as the next prompts begin alike;
    * `"archived"`: some of it is in a slower tier, from where it comes back when it is used;
    * `"saved"`: in the thread's file only, loaded when a new process first uses the thread;
    * `"gone"`: nothing is held; what a run from it needs is computed from the text."""
    n_tokens: int
    """Tokens of the segments; what two paths share counts once."""
    n_bytes: int
    """Bytes of the segments, counted likewise."""
    segments: tuple[int, ...]
    """Ids of the segments, as in `model.kv.segments()`, parents first."""
    paths: tuple[str, ...]
    """The calls that led to it and are held: ids of the messages they returned."""


class ThreadKV:
    """Knows the caches of one model; each method waits for the engine."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def held(self, thread_id: str, lineage: Lineage, key: Key, *, is_saved: bool) -> CheckpointKV:
        """What is held of a checkpoint.

        Args:
            thread_id: Its thread.
            lineage: Of that thread.
            key: The checkpoint.
            is_saved: Whether the thread has a file.
        """
        found: list[tuple[list[SegmentInfo], list[StepLabel]]] = []
        for cache in self._lifecycle.caches():
            with suppress(EngineClosedError):
                infos = cache.segments()
                labels = lineage.paths_at(key, _reusable(infos, thread_id))
                found.append((_under(infos, labels), labels))
        # The settings of a call may choose another engine: the one that holds most is meant.
        infos, labels = max(found, key=lambda pair: _n_tokens(pair[0]), default=([], []))
        n_tokens = _n_tokens(infos)
        state: KVState = "saved" if is_saved else "gone"
        if n_tokens:
            state = "archived" if any(info.n_archived for info in infos) else "resident"
        return CheckpointKV(
            thread_id=thread_id,
            checkpoint_ns=key[0],
            checkpoint_id=key[1] if key in lineage.keys else None,
            state=state,
            n_tokens=n_tokens,
            n_bytes=sum(info.n_bytes for info in infos),
            segments=tuple(info.segment_id for info in infos),
            paths=tuple(label.call_id for label in labels),
        )

    def end(self, thread_id: str, reason: str) -> None:
        """Free all that a thread holds; what a running call reads goes when the call ends."""
        self._lifecycle.forget_thread(thread_id)
        selector = PathSelector(thread_id=thread_id)
        _carry_out(self._lifecycle.caches(), lambda _: [selector], reason, thread_id)

    def settle(self, thread_id: str, before: Lineage, living: Iterable[Key], reason: str) -> None:
        """Free what no living checkpoint of a thread would go on from.

        Args:
            thread_id: The thread.
            before: Its checkpoints, those included that have gone since.
            living: Those that are left.
            reason: For the receipts.
        """
        kept = frozenset(living)
        is_busy = self._lifecycle.is_busy(thread_id)

        def unwanted(cache: Cache) -> list[PathSelector]:
            infos = cache.segments(thread_id)
            labels = [lb for info in infos for lb in info.labels if lb.thread_id == thread_id]
            wanted = before.wanted(kept, labels)
            if is_busy:  # what is under way is in no checkpoint yet
                wanted |= before.unplaced(labels)
            calls = [lb.call_id for lb in labels if lb.call_id not in wanted]
            return [PathSelector(path_id=call, thread_id=thread_id) for call in calls]

        _carry_out(self._lifecycle.caches(), unwanted, reason, thread_id)


def _carry_out(
    caches: Sequence[Cache],
    choose: Callable[[Cache], list[PathSelector]],
    reason: str,
    thread_id: str,
) -> None:
    releases: list[Future[ReleaseReceipt]] = []
    for cache in caches:
        with suppress(EngineClosedError):  # then it holds nothing any more
            for selector in choose(cache):
                name = selector.path_id or thread_id
                releases.append(cache.post_release(selector, reason=reason, name=name))
    receipts: list[ReleaseReceipt] = []
    for release in releases:
        with suppress(EngineClosedError):
            receipts.append(release.result())
    if any(receipt.is_known for receipt in receipts):
        logger.info(
            "release thread %r (%s): %d tokens, %d bytes of %d paths",
            thread_id,
            reason,
            sum(receipt.freed_tokens for receipt in receipts),
            sum(receipt.freed_bytes for receipt in receipts),
            sum(receipt.n_paths for receipt in receipts),
        )


def _reusable(infos: Iterable[SegmentInfo], thread_id: str) -> list[StepLabel]:
    """The paths that a thread may reuse: its own, and those of scopes that threads share."""
    return [
        label
        for info in infos
        for label in info.labels
        if label.thread_id == thread_id or not info.scope.startswith('["thread"')
    ]


def _under(infos: Sequence[SegmentInfo], labels: Sequence[StepLabel]) -> list[SegmentInfo]:
    """The segments of some paths, parents first."""
    calls = {label.call_id for label in labels}
    by_id = {info.segment_id: info for info in infos}
    wanted: set[int | None] = {None}
    for info in infos:
        if not calls.isdisjoint(label.call_id for label in info.labels):
            at: SegmentInfo | None = info
            while at is not None and at.segment_id not in wanted:
                wanted.add(at.segment_id)
                at = by_id.get(at.parent_id) if at.parent_id is not None else None
    return [info for info in infos if info.segment_id in wanted]


def _n_tokens(infos: Iterable[SegmentInfo]) -> int:
    return sum(info.n_tokens for info in infos)
