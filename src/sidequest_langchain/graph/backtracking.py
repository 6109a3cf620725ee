"""Goes back to an earlier branch: routing and prune in one value that a node returns.

It must not know how a step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command

from sidequest_langchain.chat.step import BRANCH
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.here import Here, here
from sidequest_langchain.graph.pruning import (
    Pending,
    PruneReceipt,
    asettled,
    ask,
    names_of,
    settled,
)

Given = str | BaseMessage | Sequence[str | BaseMessage]


def backtrack(
    to: str | None = None,
    *,
    update: Any = None,
    goto: Any = (),
    graph: str | None = None,
    prune: Given = (),
    reason: str = "backtracked",
    immediate: bool = False,
    config: RunnableConfig | None = None,
) -> Command[Any]:
    """Leave a dead end: give up what led there, and say where the graph goes on.

    Return it from a node. What is given up is given up as by `prune`: when the node has ended
    well.

    Args:
        to: The branch to go on from; it and what it descends from stay. Called inside of
            `branch(...)`, below `to`, this gives up the child of `to` that leads there.
        update: Update of the state, as in `Command`.
        goto: Next nodes or `Send`s, as in `Command`.
        graph: `Command.PARENT` to go on in the parent graph, as in `Command`.
        prune: What to give up, instead of what `to` implies.
        reason: For the receipts and events.
        immediate: Do not wait for the node to end; waits for the engine's running step.
        config: The node's config; needed only where the context was lost.

    Raises:
        ConfigError: `prune` would give up `to` itself, or names no branch.
    """
    receipt, pending = _leave(here(config), to, prune, reason, immediate=immediate)
    settled(receipt, pending)
    return Command(graph=graph, update=update, goto=goto)


async def abacktrack(
    to: str | None = None,
    *,
    update: Any = None,
    goto: Any = (),
    graph: str | None = None,
    prune: Given = (),
    reason: str = "backtracked",
    immediate: bool = False,
    config: RunnableConfig | None = None,
) -> Command[Any]:
    """`backtrack` that does not hold up the event loop while it waits for the engine."""
    receipt, pending = _leave(here(config), to, prune, reason, immediate=immediate)
    await asettled(receipt, pending)
    return Command(graph=graph, update=update, goto=goto)


def _leave(
    place: Here, to: str | None, prune: Given, reason: str, *, immediate: bool
) -> tuple[PruneReceipt, Pending]:
    names = names_of((prune,) if isinstance(prune, (str, BaseMessage)) else prune)
    if to is not None:
        line = _lineage(place, to)
        lost = [name for name in names if name in line]
        if lost:
            msg = (
                f"cannot go back to {to!r} and give up {lost[0]!r}, which it is or descends "
                "from; prune what was tried below it"
            )
            raise ConfigError(msg)
        names = names or _way_down(place, to)
        for watch in place.watches:
            watch.foresee((to,))
    return ask(place, names, reason, immediate=immediate, back_to=to)


def _lineage(place: Here, branch: str) -> tuple[str, ...]:
    return place.read_branches(lambda ledger: ledger.lineage(branch)) or (branch,)


def _way_down(place: Here, to: str) -> tuple[str, ...]:
    """The child of `to` that leads to the branch around this call, if there is one."""
    around = BRANCH.get()
    if around is None:
        return ()
    line = _lineage(place, around[0])
    return (line[line.index(to) - 1],) if to in line[1:] else ()
