"""Names branches of thought inside of nodes. It must not know how they are given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.runnables import RunnableConfig

from sidequest_langchain.chat.step import BRANCH
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph.here import here


@contextmanager
def branch(
    id: str,
    parent: str | None = None,
    *,
    config: RunnableConfig | None = None,
) -> Iterator[str]:
    """Name the branch that the model calls inside of the `with` block belong to.

    A branch id names one branch within a thread (within a run, if it has no thread); opening
    it again adds to it. Nested blocks nest: the inner one continues the outer one.

    Args:
        id: The name to prune it by.
        parent: The branch that it continues; pruning that one prunes this one too. `None`
            means the branch around this block, if there is one.
        config: The node's config; needed only where the context was lost.

    Yields:
        The id.

    Raises:
        ConfigError: The id is empty or no string, or it is its own parent.
    """
    names: tuple[object, ...] = (id,) if parent is None else (id, parent)
    for name in names:
        if not isinstance(name, str) or not name:
            msg = f"a branch is named by a string that is not empty, found {name!r}"
            raise ConfigError(msg)
    if parent is None:
        outer = BRANCH.get()
        parent = outer[0] if outer is not None and outer[0] != id else None
    if parent == id:
        msg = f"branch {id!r} cannot continue itself; give its parent another id"
        raise ConfigError(msg)
    place = here(config)
    for watch in place.watches:
        watch.open_branch(id, parent)
        watch.foresee((id,) if parent is None else (id, parent))
    token = BRANCH.set((id, parent))
    try:
        yield id
    finally:
        BRANCH.reset(token)
