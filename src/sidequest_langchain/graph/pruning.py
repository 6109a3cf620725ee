"""Gives up branches: `prune`, `keep_only` and their asynchronous twins.

Exact: what was released is recomputed if it comes back, so a prune too many costs time and
never changes an answer. It must not know how a step ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from sidequest_langchain.engine.registry import live_engines
from sidequest_langchain.errors import ConfigError, EngineClosedError
from sidequest_langchain.graph.here import Here, here
from sidequest_langchain.graph.runs import PrunePlan
from sidequest_langchain.kv.receipts import ReleaseReceipt
from sidequest_langchain.labels import PathSelector

Pending = list[Future[ReleaseReceipt]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReceipt:
    """What a prune did, or will do when its node ends."""

    status: Literal["staged", "applied", "ignored"]
    """`staged`: takes effect when the node ends well, and not at all otherwise. `applied`: it
    took effect, see `releases`. `ignored`: it named nothing."""
    paths: tuple[str, ...]
    """What was given up: what was asked for, and the branches declared below it."""
    reason: str
    releases: tuple[ReleaseReceipt, ...] = field(default=())
    """One for each path and model, if it was applied; `n_paths=0` says that nothing was known
    by that name."""

    @property
    def freed_bytes(self) -> int:
        """Bytes freed, if it was applied."""
        return sum(release.freed_bytes for release in self.releases)


def prune(
    *branches: str | BaseMessage,
    reason: str = "pruned",
    immediate: bool = False,
    config: RunnableConfig | None = None,
) -> PruneReceipt:
    """Give up branches, and everything declared below them.

    Inside a node of an attached graph this takes effect when the node ends well (or leaves by
    `Command(graph=Command.PARENT)`); if the node fails or is interrupted it does not, so a
    retried node prunes once. Elsewhere it applies at once to every live model: in a graph that
    is not attached, to the thread that runs; outside of a graph there is no thread to tell
    branches of one name apart by, and all of that name go.

    Args:
        *branches: Branch ids; or task ids, namespaces, messages of the model or their ids.
        reason: For the receipts and events.
        immediate: Do not wait for the node to end; waits for the engine's running step.
        config: The node's config; needed only where the context was lost.

    Raises:
        ConfigError: Something that is neither a name nor a message with an id.
    """
    receipt, pending = ask(here(config), names_of(branches), reason, immediate=immediate)
    return settled(receipt, pending)


async def aprune(
    *branches: str | BaseMessage,
    reason: str = "pruned",
    immediate: bool = False,
    config: RunnableConfig | None = None,
) -> PruneReceipt:
    """`prune` that does not hold up the event loop while it waits for the engine."""
    receipt, pending = ask(here(config), names_of(branches), reason, immediate=immediate)
    return await asettled(receipt, pending)


def keep_only(
    *branches: str,
    under: str | Sequence[str] | None = None,
    reason: str = "not kept",
    immediate: bool = False,
    config: RunnableConfig | None = None,
) -> PruneReceipt:
    """Give up the rivals of some branches: the other children of the same parents.

    Rivals are the branches that were opened with `branch` in this thread (in this run, if it
    has no thread), by attached graphs of this process, under a parent that one of `branches`
    has, and not pruned since; top-level branches are rivals of each other. What `branches`
    descend from is never given up. A name that was never opened has no rivals of its own but
    counts as top-level.

    Args:
        *branches: Branch ids that stay.
        under: The parents whose children are meant, instead of those of `branches`; with no
            `branches`, all their children go.
        reason: For the receipts and events.
        immediate: Do not wait for the node to end.
        config: The node's config; needed only where the context was lost.

    Raises:
        ConfigError: Something that is no name.
    """
    place = here(config)
    rivals = _rivals(place, names_of(branches), under)
    receipt, pending = ask(place, rivals, reason, immediate=immediate)
    return settled(receipt, pending)


async def akeep_only(
    *branches: str,
    under: str | Sequence[str] | None = None,
    reason: str = "not kept",
    immediate: bool = False,
    config: RunnableConfig | None = None,
) -> PruneReceipt:
    """`keep_only` that does not hold up the event loop while it waits for the engine."""
    place = here(config)
    rivals = _rivals(place, names_of(branches), under)
    receipt, pending = ask(place, rivals, reason, immediate=immediate)
    return await asettled(receipt, pending)


# -- shared with `backtrack` -------------------------------------------------------------


def names_of(given: Sequence[str | BaseMessage]) -> tuple[str, ...]:
    """The names that were given, each once.

    Raises:
        ConfigError: Something that is neither a name nor a message with an id.
    """
    names: dict[str, None] = {}
    for one in given:
        name = one.id if isinstance(one, BaseMessage) else one
        if not (isinstance(name, str) and name):
            msg = (
                f"branches are named by strings that are not empty, or by messages with an id; "
                f"found {one!r}"
            )
            raise ConfigError(msg)
        names[name] = None
    return tuple(names)


def ask(
    place: Here,
    names: tuple[str, ...],
    reason: str,
    *,
    immediate: bool,
    back_to: str | None = None,
) -> tuple[PruneReceipt, Pending]:
    """Stage a prune or set it going."""
    if not names:
        return PruneReceipt(status="ignored", paths=(), reason=reason), []
    pending: Pending = []
    is_staged = False
    below = place.read_branches(lambda ledger: ledger.descendants(names))
    plan = PrunePlan(paths=names, reason=reason, back_to=back_to, thread_id=place.thread_id)
    for watch in place.watches:
        if not immediate and watch.stage(plan):
            is_staged = True
        else:
            pending += watch.prune_now(plan)
    if not place.watches:
        pending = _release_everywhere(names, place.thread_id, reason)
    status: Literal["staged", "applied"] = "staged" if is_staged else "applied"
    return PruneReceipt(status=status, paths=(*names, *below), reason=reason), pending


def settled(receipt: PruneReceipt, pending: Pending) -> PruneReceipt:
    """The receipt with what the engines did; waits for their running step."""
    return replace(receipt, releases=tuple(release.result() for release in pending))


async def asettled(receipt: PruneReceipt, pending: Pending) -> PruneReceipt:
    """`settled` that lets the event loop go on."""
    # Who gives up waiting does not take the release back: its branches are forgotten already.
    waits = [asyncio.shield(asyncio.wrap_future(release)) for release in pending]
    releases = await asyncio.gather(*waits)
    return replace(receipt, releases=tuple(releases))


def _release_everywhere(names: tuple[str, ...], thread_id: str | None, reason: str) -> Pending:
    pending: Pending = []
    for engine in live_engines():
        for name in names:
            selector = PathSelector(path_id=name, thread_id=thread_id)
            with suppress(EngineClosedError):
                pending.append(engine.kv.post_release(selector, reason=reason, name=name))
    return pending


def _rivals(
    place: Here, kept: tuple[str, ...], under: str | Sequence[str] | None
) -> tuple[str, ...]:
    parents = (under,) if isinstance(under, str) else under
    if parents is None and not kept:
        return ()
    return place.read_branches(lambda ledger: ledger.rivals(kept, parents))
