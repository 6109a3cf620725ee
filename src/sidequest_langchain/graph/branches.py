"""Which branches of thought a thread has opened, and which one continues which.

Declared by the application with `branch(id, parent=...)`: nothing in LangGraph links a `Send`
to the candidate it extends. It must not know a graph or a cache.
"""

from __future__ import annotations

from collections.abc import Iterable


class BranchLedger:
    """The branches of one thread (or of one run that has no thread)."""

    def __init__(self) -> None:
        self._parents: dict[str, str | None] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, branch: str) -> bool:
        return branch in self._parents

    def open(self, branch: str, parent: str | None) -> None:
        """Note that `branch` was opened; a parent once declared stays until another is."""
        if parent is None:
            self._parents.setdefault(branch, None)
        else:
            self._parents[branch] = parent

    def forget(self, branches: Iterable[str]) -> None:
        """Forget branches that were pruned."""
        for branch in branches:
            self._parents.pop(branch, None)

    def parent_of(self, branch: str) -> str | None:
        """The declared parent, `None` for a top-level or an unknown branch."""
        return self._parents.get(branch)

    def lineage(self, branch: str) -> tuple[str, ...]:
        """`branch`, its parent, and so on up; a cycle ends where it closes."""
        line = [branch]
        while (parent := self._parents.get(line[-1])) is not None and parent not in line:
            line.append(parent)
        return tuple(line)

    def children_of(self, parent: str | None) -> tuple[str, ...]:
        """The branches opened right under `parent`, in the order they were opened."""
        return tuple(b for b, above in self._parents.items() if above == parent)

    def descendants(self, branches: Iterable[str]) -> tuple[str, ...]:
        """Everything declared below `branches`, without them, in the order it was opened."""
        asked = set(branches)
        below: dict[str | None, list[str]] = {}
        for branch, above in self._parents.items():
            below.setdefault(above, []).append(branch)
        found, frontier = set(asked), list(asked)
        while frontier:
            for child in below.get(frontier.pop(), ()):
                if child not in found:
                    found.add(child)
                    frontier.append(child)
        return tuple(b for b in self._parents if b in found and b not in asked)

    def rivals(self, kept: Iterable[str], under: Iterable[str | None] | None) -> tuple[str, ...]:
        """What `keep_only(*kept)` gives up: the children of the same parents, without `kept`.

        Args:
            kept: Branches that stay. What they descend from stays too.
            under: The parents whose children are meant; `None` means those of `kept`.
        """
        kept = tuple(kept)
        parents = {self.parent_of(b) for b in kept} if under is None else set(under)
        safe = {above for branch in kept for above in self.lineage(branch)}
        return tuple(b for b, above in self._parents.items() if above in parents and b not in safe)
