"""Rows of K and V in every layer, as they lie in memory, and views of them. It copies nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

Views = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Rows of K and of V in every layer, `[H, n, D]` and `[H, n, Dv]` each."""
MOST_KEPT = 16
"""Views of a storage that are kept: paths that share it may see other rows each."""


class LayerRows:
    """`capacity` rows of every layer, in one part or several: see `Storage`."""

    __slots__ = ("__weakref__", "_borrowers", "_is_even", "_kept", "_parts", "capacity")

    def __init__(self, parts: list[Tensor], capacity: int, *, is_even: bool) -> None:
        self._parts = parts
        self.capacity = capacity
        self._is_even = is_even
        """Whether K and V of a layer lie in one part, since all layers are alike."""
        self._kept: dict[tuple[int, int], Views] = {}
        self._borrowers: weakref.WeakSet[LayerRows] = weakref.WeakSet()

    @property
    def changes_by_layer(self) -> bool:
        """Whether `united` and `keep` may be called: it is by layer, and nobody borrows it."""
        return self._is_even and len(self._parts) > 1 and not self._borrowers

    @property
    def is_in_one(self) -> bool:
        """Whether `by_layer` may be called: all layers lie in one part."""
        return self._is_even and len(self._parts) == 1

    @property
    def is_borrowed(self) -> bool:
        """Whether somebody holds its rows as they are: see `lent`."""
        return bool(self._borrowers)

    @property
    def n_parts(self) -> int:
        """Allocations that it consists of."""
        return len(self._parts)

    @property
    def lengths(self) -> set[int]:
        """Rows of its parts: `capacity`, unless something went wrong."""
        return {t.shape[-2] for t in self._parts} or {self.capacity}

    @property
    def n_part_bytes(self) -> int:
        """Bytes of the largest of them: what is there twice while it changes by layer."""
        return max(t.numel() * t.element_size() for t in self._parts)

    @property
    def keys(self) -> list[Tensor]:
        """K of every layer, `[H, capacity, D]`."""
        return list(self.views(0, self.capacity)[0])

    @property
    def values(self) -> list[Tensor]:
        """V of every layer, `[H, capacity, Dv]`."""
        return list(self.views(0, self.capacity)[1])

    @property
    def n_bytes(self) -> int:
        """Bytes of its rows, those yet to be written included."""
        return sum(t.numel() * t.element_size() for t in self._parts)

    def kept_views(self, first: int, last: int) -> Views:
        """`views` that decoding asks for at every step: made once, until `forget_views`.

        Not for what is idle: the views of thousands of segments would be a hundred thousand objects
        for the garbage collector.
        """
        found = self._kept.get((first, last))
        if found is None:
            if len(self._kept) == MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[first, last] = self.views(first, last)
        return found

    def forget_views(self) -> None:
        """Nobody decodes over these rows, for now."""
        self._kept.clear()

    def views(self, first: int, last: int) -> Views:
        """Rows `first..last` of K and of V in every layer."""
        cut = list(self._cut(first, last))
        if not self._is_even:
            n = len(cut) // 2
            return cut[:n], cut[n:]
        if len(cut) == 1:
            both = cut[0].unbind(0)
            n = len(both) // 2
            return both[:n], both[n:]
        keys, values = zip(*(layer.unbind(0) for layer in cut), strict=True)
        return keys, values

    def layer(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Rows `first..last` of K and of V in one layer, as views."""
        n, parts = last - first, self._parts
        if not self._is_even:
            k, v = parts[layer], parts[len(parts) // 2 + layer]
            return k.narrow(1, first, n), v.narrow(1, first, n)
        if len(parts) == 1:
            whole = parts[0]
            k, v = whole[layer], whole[len(whole) // 2 + layer]
            return k.narrow(1, first, n), v.narrow(1, first, n)
        k, v = parts[layer].narrow(2, first, n).unbind(0)
        return k, v

    # -- inside --------------------------------------------------------------------------

    def _cut(self, first: int, last: int) -> Sequence[Tensor]:
        return [t.narrow(-2, first, last - first) for t in self._parts]
