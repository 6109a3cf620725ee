"""The K/V rows of one segment, or of some in a row, in all layers.

It must not know tokens or the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sidequest_langchain.kv.layer_rows import LayerRows
from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.row_moves import in_one, moved_up


class Storage(LayerRows):
    """Room for `capacity` rows of K and V in every layer.

    It consists of parts, each an allocation of its own, in one of three forms:

    * in one: K of all layers, then V, `[2 L, H, capacity, D]`, so that growing, cutting and freeing
      cost one operation, not two a layer;
    * by layer: K and V of one layer, `[2, H, capacity, D]`, so that a long storage can lose or take
      in rows while hardly more than a layer of it is there twice (`united`, `keep`);
    * K of every layer, then V of every layer, `[H, capacity, D]` each, where layers differ.

    All copies are made before anything is let go, but for `united` and `keep`: where memory ends,
    nothing has happened.
    """

    __slots__ = ()

    @classmethod
    def of(cls, layout: KVLayout, capacity: int) -> Storage:
        """Room for `capacity` rows; their values are undefined."""
        if _is_even(layout):
            layer = layout[0]
            shape = (2 * len(layout), layer.n_kv_heads, capacity, layer.key_dim)
            whole = torch.empty(shape, dtype=layer.dtype, device=layer.device)
            return cls([whole], capacity, is_even=True)
        parts = [
            torch.empty((s.n_kv_heads, capacity, dim), dtype=s.dtype, device=s.device)
            for dims in ([s.key_dim for s in layout], [s.value_dim for s in layout])
            for s, dim in zip(layout, dims, strict=True)
        ]
        return cls(parts, capacity, is_even=False)

    @classmethod
    def empty(cls) -> Storage:
        """A storage without rows or layers: that of what was freed."""
        return cls([], 0, is_even=False)

    @classmethod
    def joined(cls, storages: Sequence[Storage], places: Sequence[tuple[int, int]]) -> Storage:
        """A new storage with rows `first..last` of each of some storages, one after another."""
        n_parts = max(s.n_parts for s in storages)
        capacity = sum(last - first for first, last in places)
        cuts = [_in_parts(s._cut(*p), n_parts) for s, p in zip(storages, places, strict=True)]
        parts = [torch.cat(cut, -2) for cut in zip(*cuts, strict=True)]
        return cls(parts, capacity, is_even=storages[0]._is_even)

    @classmethod
    def united(cls, storages: Sequence[Storage]) -> Storage:
        """One storage with all rows of some that are by layer, one after another; they are gone.

        Rows are copied layer by layer, and what was copied is let go.

        Raises:
            RuntimeError: There was no memory for a layer (torch's own error). The storages are as
                they were; where there is none to part them again either, layers before that one
                are views of one buffer.
        """
        for s in storages:
            s.forget_views()  # they would keep every layer that was copied
        made: list[Tensor] = []
        try:
            for at in range(storages[0].n_parts):
                made.append(torch.cat([s._parts[at] for s in storages], -2))
                first = 0
                for s in storages:  # whole again, should there be no memory for the next layer
                    s._parts[at] = made[-1].narrow(-2, first, s.capacity)
                    first += s.capacity
        except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
            while made:
                made.pop()
                for s in storages:
                    s._parts[len(made)] = _cloned(s._parts[len(made)])
            raise
        return cls(made, sum(s.capacity for s in storages), is_even=True)

    def tensors(self, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """Rows `first..last`, by default all, by name, for `from_tensors`: views where they may."""
        cut = list(self._cut(first, self.capacity if last is None else last))
        if self._is_even:
            return {"rows": cut[0] if len(cut) == 1 else in_one(cut)}
        names = [f"{kind}.{n}" for kind in ("key", "value") for n in range(len(cut) // 2)]
        return dict(zip(names, cut, strict=True))

    def likes(self, first: int, last: int) -> dict[str, Tensor]:
        """What `tensors` would give, where that copies as tensors without rows: for their shapes.

        Args:
            first: Row.
            last: Row after the last.
        """
        if not self._is_even or len(self._parts) == 1:
            return self.tensors(first, last)
        n_heads, dim = self._parts[0].shape[1], self._parts[0].shape[3]
        shape = (2 * len(self._parts), n_heads, last - first, dim)
        return {"rows": torch.empty(shape, dtype=self._parts[0].dtype, device="meta")}

    def named(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Copies of some rows, ascending, by name, for `from_tensors`."""
        if not self._is_even or len(self._parts) == 1:
            return self.gathered(rows).tensors()
        n, likes = len(self._parts), self.likes(0, len(rows))["rows"]
        whole = torch.empty_like(likes, device=self._parts[0].device)
        for at, part in enumerate(self._parts):
            whole[at::n].copy_(_chosen(part, rows))
        return {"rows": whole}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: KVLayout) -> Storage:
        """The storage that `tensors` were of, moved to where the layers run; not to be written.

        Copies in page-locked memory move beside the computation; PyTorch keeps them until then.

        Raises:
            ValueError: They are not those of a storage of this layout.
        """
        try:
            if _is_even(layout):
                whole = tensors["rows"].to(layout[0].device, non_blocking=True)
                return cls([whole], whole.shape[-2], is_even=True)
            parts = [
                tensors[f"{name}.{layer}"].to(s.device, non_blocking=True)
                for name in ("key", "value")
                for layer, s in enumerate(layout)
            ]
        except KeyError as error:
            msg = f"these tensors are not the rows of {len(layout)} layers: {error} is missing"
            raise ValueError(msg) from error
        return cls(parts, parts[0].shape[-2], is_even=False)

    def lent(self) -> Storage:
        """What holds these rows as they are now, whatever becomes of the storage. Copies nothing.

        As long as it is there, the storage does not change layer by layer, which would need more
        memory, not less.
        """
        other = Storage(list(self._parts), self.capacity, is_even=self._is_even)
        self._borrowers.add(other)
        return other

    def is_of(self, other: Storage) -> bool:
        """Whether two have the same rows in memory, as one that was lent."""
        mine, theirs = self._parts, other._parts
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))

    def by_layer(self, n_rows: int) -> Storage:
        """A new storage by layer that holds the first rows, and has no room for more."""
        whole = self._parts[0].narrow(-2, 0, n_rows)
        n = len(whole) // 2
        return Storage([whole[at::n].contiguous() for at in range(n)], n_rows, is_even=True)

    def keep(self, rows: Sequence[int]) -> None:
        """Let all but some rows go, layer by layer; those left move up.

        A layer is copied and its old rows are let go before the next one is.

        Args:
            rows: Which stay, ascending.

        Raises:
            RuntimeError: There is no memory for one layer (torch's own error). Nothing was done.
        """
        self.forget_views()
        for at, old in enumerate(self._parts):
            try:
                self._parts[at] = _chosen(old, rows)
            except (MemoryError, RuntimeError):
                if not at:
                    raise
                # Not to be expected: there was memory for the layer before, and its old rows are
                # gone. Rows move where they are then, which needs no memory and gives none back;
                # what stays allocated for nothing is not counted.
                self._parts[at] = moved_up(old, rows)
        self.capacity = len(rows)

    def copy(self, first: int, last: int) -> Storage:
        """A new storage that holds rows `first..last` and has no room for more."""
        return self._made(_cloned, self._cut(first, last), last - first)

    def gathered(self, rows: Sequence[int]) -> Storage:
        """A new storage that holds copies of some rows, in the order given, and no more."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and _is_ascending(rows):
            return self.copy(rows[0], rows[-1] + 1)
        return self._made(lambda t: _chosen(t, rows), self._parts, len(rows))

    def gathered_by_head(self, rows: Tensor) -> Storage:
        """A new storage that holds copies of rows of their own for each layer and head.

        Args:
            rows: Which, long `[L, H, n]`; all layers have `H` heads.
        """
        n_layers = len(rows)
        if self._is_even:
            each = [torch.cat([rows, rows])] if len(self._parts) == 1 else list(rows)
        else:
            each = [rows[at % n_layers] for at in range(len(self._parts))]
        parts = [
            t.gather(-2, of_part.to(t.device).unsqueeze(-1).expand(*t.shape[:-2], -1, t.shape[-1]))
            for t, of_part in zip(self._parts, each, strict=True)
        ]
        return Storage(parts, rows.shape[2], is_even=self._is_even)

    def write(self, rows: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Put K and V, `[H, len(rows), D]` a layer, at some rows."""
        for mine, given in ((self.keys, keys), (self.values, values)):
            for tensor, new in zip(mine, given, strict=True):
                index = torch.tensor(rows, dtype=torch.long, device=tensor.device)
                tensor.index_copy_(1, index, new)

    def resized(self, n_rows: int, capacity: int) -> Storage:
        """A new storage with the first `n_rows` rows and room for `capacity`."""
        return self._made(lambda t: _resized(t, n_rows, capacity), self._parts, capacity)

    # -- inside --------------------------------------------------------------------------

    def _made(
        self, make: Callable[[Tensor], Tensor], parts: Sequence[Tensor], capacity: int
    ) -> Storage:
        return Storage([make(t) for t in parts], capacity, is_even=self._is_even)


def _in_parts(cut: Sequence[Tensor], n_parts: int) -> Sequence[Tensor]:
    """Rows in one part, or in as many as asked for, as that many: views."""
    if len(cut) == n_parts:
        return cut
    return [cut[0][at::n_parts] for at in range(n_parts)]


def _is_even(layout: KVLayout) -> bool:
    """Whether K and V of all layers have one shape, dtype and device."""
    return len(set(layout)) == 1 and layout[0].key_dim == layout[0].value_dim


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
