"""Which paths go when a step or a run ends. It must not know how a run is followed.

a step ends well       what its earlier attempts left goes (an interrupt's own paths stay
                       until the resumed attempt has ended well: it hits them); of those that
                       failed also what finished in their subgraphs and tasks: a retry begins anew
a run ends             retain="run": everything it made, and what interrupted runs before it
                       made on the same thread; retain="thread": only what steps made that
                       failed or were cancelled, for that is nobody's history (and what had
                       finished inside of them, unless the run failed too: it may be resumed)
a run is interrupted   nothing goes
a call ends later      than the run it belongs to: what it made goes if the run's went

Namespaces select the paths: they are unique, whatever the thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from sidequest_langchain.config import Retain
from sidequest_langchain.graph.effects import Post
from sidequest_langchain.graph.runs import Root, Serials, Step, Unfinished, heard
from sidequest_langchain.labels import PathSelector

K = TypeVar("K")
V = TypeVar("V")

MAX_THREADS = 1024
"""Threads remembered between their runs; the least recently used are forgotten."""


class Recent(Generic[K, V]):
    """A bounded memory: the least recently used entries are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The entry of `key`, used just now."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def setdefault(self, key: K, make: Callable[[], V]) -> V:
        """The entry of `key`, made if there is none."""
        if key not in self._entries:
            self._entries[key] = make()
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: K, value: V) -> None:
        """Remember `value`."""
        self.setdefault(key, lambda: value)

    def pop(self, key: K) -> V | None:
        """Take the entry of `key` out."""
        return self._entries.pop(key, None)


class Retention:
    """Decides by `CacheConfig.retain`."""

    def __init__(self, retain: Retain | None) -> None:
        self._retain = retain
        self._paused: Recent[str | None, set[str]] = Recent(MAX_THREADS)
        """By thread: where interrupted runs made paths that wait for a resume."""

    def is_for_run(self, thread_id: str | None) -> bool:
        """Whether the segments of this thread live as long as the run that made them."""
        if self._retain is None:
            return thread_id is None
        return self._retain == "run"

    def after_step(self, step: Step) -> list[Post]:
        """What earlier attempts at a visit left, once an attempt has ended well."""
        root, ref = step.root, step.ref
        failed = root.unfinished.pop(ref.checkpoint_ns, None)
        may_repeat = root.may_repeat(step)
        root.n_starts.pop(ref.checkpoint_ns, None)
        if not may_repeat:
            return []
        abandoned = Post(
            selector=PathSelector(at_ns=ref.checkpoint_ns),
            before=step.serials,
            reason="attempt abandoned",
            name=ref.checkpoint_ns,
            root=root,
            step=step,
            audience=heard(step.audience),
        )
        if failed is None or not failed.graphs:
            return [abandoned]
        return [
            abandoned,
            replace(abandoned, selector=_inside(failed), since=failed.since, before=failed.until),
        ]

    def after_failure(self, step: Step, serials: Serials) -> None:
        """An attempt failed or was cancelled: remember what it may have left.

        Args:
            step: The attempt.
            serials: Paths begun before it ended.
        """
        root, ref = step.root, step.ref
        before = root.unfinished.get(ref.checkpoint_ns)
        root.unfinished[ref.checkpoint_ns] = Unfinished(
            thread_id=ref.thread_id,
            graphs=frozenset(step.graphs) | (before.graphs if before else frozenset()),
            since=before.since if before else step.serials,
            until=serials,
        )

    def after_run(self, root: Root, *, has_ended_well: bool) -> list[Post]:
        """What nobody wants once a root run has ended."""
        posts: list[Post] = []
        for thread_id, namespaces in root.namespaces.items():
            # Without a thread there is nothing that a resume could find.
            if thread_id in root.interrupted and thread_id is not None:
                if self.is_for_run(thread_id):
                    self._paused.setdefault(thread_id, set).update(namespaces)
            elif self.is_for_run(thread_id):
                namespaces |= self._paused.pop(thread_id) or set()
                root.swept.add(thread_id)
                selector = PathSelector(under_ns=frozenset(namespaces))
                posts.append(_sweep(root, selector, "run ended", str(root.run_id)))
        for checkpoint_ns, failed in root.unfinished.items():
            if failed.thread_id in root.swept:
                continue
            selector = PathSelector(at_ns=checkpoint_ns)
            posts.append(_sweep(root, selector, "step did not finish", checkpoint_ns))
            if failed.graphs and has_ended_well and not root.interrupted:
                sweep = _sweep(root, _inside(failed), "step did not finish", checkpoint_ns)
                posts.append(replace(sweep, since=failed.since, before=failed.until))
        return posts

    def after_call(self, step: Step) -> list[Post]:
        """What a call left that ended only after its run had."""
        root, ref = step.root, step.ref
        if not root.is_given_up(step):
            return []
        selector = PathSelector(at_ns=ref.checkpoint_ns)
        return [_sweep(root, selector, "run ended before", ref.checkpoint_ns)]


def _inside(failed: Unfinished) -> PathSelector:
    """What finished in the subgraphs and tasks of failed attempts."""
    return PathSelector(under_ns=failed.graphs, thread_id=failed.thread_id)


def _sweep(root: Root, selector: PathSelector, reason: str, name: str) -> Post:
    return Post(
        selector=selector, reason=reason, name=name, root=root, audience=heard(root.audience)
    )
