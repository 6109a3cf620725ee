"""The K/V rows of one segment in all layers: what is allocated, copied and freed at once.

It must not know tokens or the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sidequest_langchain.kv.layout import KVLayout


Views = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Rows of K and of V in every layer, `[H, n, D]` and `[H, n, Dv]` each."""
MOST_KEPT = 16
"""Views of a storage that are kept: paths that share it may see other rows each."""


class Storage:
    """Room for `capacity` rows of K and V in every layer.

    Layers that are alike lie in one allocation, so that growing, cutting and freeing cost one
    operation, not two a layer; layers that differ have two tensors each.

    All copies are made before anything is let go: where memory ends, nothing has happened.
    """

    __slots__ = ("_keys", "_kept", "_values", "_whole", "capacity")

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], capacity: int, whole: Tensor | None = None
    ) -> None:
        self._keys, self._values = keys, values
        self.capacity = capacity
        self._whole = whole
        """K of all layers, then V, `[2 L, H, capacity, D]`; `None` where layers differ."""
        self._kept: dict[tuple[int, int], Views] = {}

    @classmethod
    def of(cls, layout: KVLayout, capacity: int) -> Storage:
        """Room for `capacity` rows; their values are undefined."""
        if _is_even(layout):
            layer = layout[0]
            shape = (2 * len(layout), layer.n_kv_heads, capacity, layer.key_dim)
            return cls._of_whole(torch.empty(shape, dtype=layer.dtype, device=layer.device))
        keys, values = (
            [
                torch.empty((s.n_kv_heads, capacity, dim), dtype=s.dtype, device=s.device)
                for s, dim in zip(layout, dims, strict=True)
            ]
            for dims in ([s.key_dim for s in layout], [s.value_dim for s in layout])
        )
        return cls(keys, values, capacity)

    @classmethod
    def _of_whole(cls, whole: Tensor) -> Storage:
        return cls([], [], whole.shape[2], whole)

    @classmethod
    def joined(cls, storages: Sequence[Storage], places: Sequence[tuple[int, int]]) -> Storage:
        """A new storage with rows `first..last` of each of some storages, one after another."""
        wholes = [s._whole for s in storages]
        if wholes[0] is not None:
            cut = [
                whole.narrow(2, first, last - first)
                for whole, (first, last) in zip(wholes, places, strict=True)
                if whole is not None
            ]
            return cls._of_whole(torch.cat(cut, 2))
        parts = [s.views(*place) for s, place in zip(storages, places, strict=True)]
        keys = [torch.cat(layer, 1) for layer in zip(*(k for k, _ in parts), strict=True)]
        values = [torch.cat(layer, 1) for layer in zip(*(v for _, v in parts), strict=True)]
        return cls(keys, values, sum(last - first for first, last in places))

    def tensors(self, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """Rows `first..last`, by default all, by name, as views; for `from_tensors`."""
        n = (self.capacity if last is None else last) - first
        if self._whole is not None:
            return {"rows": self._whole.narrow(2, first, n)}
        keys = {f"key.{layer}": t.narrow(1, first, n) for layer, t in enumerate(self._keys)}
        values = {f"value.{layer}": t.narrow(1, first, n) for layer, t in enumerate(self._values)}
        return keys | values

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: KVLayout) -> Storage:
        """The storage that `tensors` were of, moved to where the layers run; not to be written.

        Copies in page-locked memory move beside the computation; PyTorch keeps them until then.

        Raises:
            ValueError: They are not those of a storage of this layout.
        """
        try:
            if _is_even(layout):
                return cls._of_whole(tensors["rows"].to(layout[0].device, non_blocking=True))
            keys, values = (
                [
                    tensors[f"{name}.{layer}"].to(s.device, non_blocking=True)
                    for layer, s in enumerate(layout)
                ]
                for name in ("key", "value")
            )
        except KeyError as error:
            msg = f"these tensors are not the rows of {len(layout)} layers: {error} is missing"
            raise ValueError(msg) from error
        return cls(keys, values, keys[0].shape[1])

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
        """Bytes allocated."""
        if self._whole is not None:
            return self._whole.untyped_storage().nbytes()
        return sum(t.untyped_storage().nbytes() for t in (*self._keys, *self._values))

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
        if self._whole is not None:
            views = self._whole.narrow(2, first, last - first).unbind(0)
            n_layers = len(views) // 2
            return views[:n_layers], views[n_layers:]
        return _cut(self._keys, first, last), _cut(self._values, first, last)

    def copy(self, first: int, last: int) -> Storage:
        """A new storage that holds rows `first..last` and has no room for more."""
        if self._whole is not None:
            return Storage._of_whole(_cloned(self._whole.narrow(2, first, last - first)))
        keys = [_cloned(t) for t in _cut(self._keys, first, last)]
        values = [_cloned(t) for t in _cut(self._values, first, last)]
        return Storage(keys, values, last - first)

    def gathered(self, rows: Sequence[int]) -> Storage:
        """A new storage that holds copies of some rows, in the order given, and no more."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and _is_ascending(rows):
            return self.copy(rows[0], rows[-1] + 1)
        if self._whole is not None:
            return Storage._of_whole(_chosen(self._whole, rows))
        keys = [_chosen(t, rows) for t in self._keys]
        values = [_chosen(t, rows) for t in self._values]
        return Storage(keys, values, len(rows))

    def gathered_by_head(self, rows: Tensor) -> Storage:
        """A new storage that holds copies of rows of their own for each layer and head.

        Args:
            rows: Which, long `[L, H, n]`; all layers have `H` heads.
        """
        if self._whole is not None:
            both = torch.cat([rows, rows]).to(self._whole.device).unsqueeze(-1)
            index = both.expand(-1, -1, -1, self._whole.shape[3])
            return Storage._of_whole(self._whole.gather(2, index))
        keys, values = (
            [
                t.gather(1, of_layer.to(t.device).unsqueeze(-1).expand(-1, -1, t.shape[2]))
                for t, of_layer in zip(tensors, rows, strict=True)
            ]
            for tensors in (self._keys, self._values)
        )
        return Storage(keys, values, rows.shape[2])

    def write(self, rows: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Put K and V, `[H, len(rows), D]` a layer, at some rows."""
        for mine, given in ((self.keys, keys), (self.values, values)):
            for tensor, new in zip(mine, given, strict=True):
                index = torch.tensor(rows, dtype=torch.long, device=tensor.device)
                tensor.index_copy_(1, index, new)

    def resized(self, n_rows: int, capacity: int) -> Storage:
        """A new storage with the first `n_rows` rows and room for `capacity`."""
        if self._whole is not None:
            return Storage._of_whole(_resized(self._whole, n_rows, capacity))
        keys = [_resized(t, n_rows, capacity) for t in self._keys]
        values = [_resized(t, n_rows, capacity) for t in self._values]
        return Storage(keys, values, capacity)


def _is_even(layout: KVLayout) -> bool:
    """Whether K and V of all layers have one shape, dtype and device."""
    return len(set(layout)) == 1 and layout[0].key_dim == layout[0].value_dim


def _cut(tensors: list[Tensor], first: int, last: int) -> list[Tensor]:
    return [t[:, first:last] for t in tensors]


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _chosen(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    index = torch.tensor(rows, dtype=torch.long, device=tensor.device)
    return tensor.index_select(-2, index)


def _is_ascending(rows: Sequence[int]) -> bool:
    return all(b - a == 1 for a, b in pairwise(rows))


def _resized(old: Tensor, n_rows: int, capacity: int) -> Tensor:
    shape = (*old.shape[:-2], capacity, old.shape[-1])
    new = torch.empty(shape, dtype=old.dtype, device=old.device)
    new.narrow(-2, 0, n_rows).copy_(old.narrow(-2, 0, n_rows))
    return new
