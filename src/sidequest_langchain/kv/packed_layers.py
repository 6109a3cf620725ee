"""Layers of a packed block that are alike, in a few tensors; they must not know offsets.

`ExactLayers` are exempt from packing, `GridLayers` are quantised. Each gives the same numbers for
a row whatever it is loaded with, and whatever was cut off beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sidequest_langchain.kv import quantise
from sidequest_langchain.kv.quantise import GROUP, Grid

Rows = tuple[Tensor, Tensor]
"""K `[H, n, D]` and V `[H, n, Dv]` of one layer."""
Places: TypeAlias = Sequence[Tensor] | None
"""Where the rows of each of some parts go, `[n]` long on the CPU; `None`: one after another."""


class Layers(Protocol):
    """Rows of some layers that have one shape, dtype and device."""

    def load(self, place: int, first: int, last: int) -> Rows:
        """Rows `first..last` of the layer at `place`."""
        ...

    def cut(self, first: int, last: int) -> Layers:
        """Rows `first..last` in storages of their own."""
        ...

    def kept(self, rows: Tensor) -> Layers:
        """Some rows, ascending, `[n]` long on the CPU, in storages of their own."""
        ...

    def moved_to(self, device: torch.device) -> Layers:
        """The same on a device; itself where it is there."""
        ...

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal in layers that are joined."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All that is stored."""
        ...


@dataclass(frozen=True, slots=True)
class ExactLayers:
    """Rows at full precision."""

    keys: Tensor
    """`[L, H, S, D]`."""
    values: Tensor
    """`[L, H, S, Dv]`."""

    @classmethod
    def pack(cls, layers: Sequence[Rows]) -> ExactLayers:
        """A copy of the rows."""
        return cls(torch.stack([k for k, _ in layers]), torch.stack([v for _, v in layers]))

    def load(self, place: int, first: int, last: int) -> Rows:
        """Rows `first..last`: views, not to be written."""
        n = last - first
        return self.keys[place].narrow(1, first, n), self.values[place].narrow(1, first, n)

    def cut(self, first: int, last: int) -> ExactLayers:
        """Rows `first..last`, exact."""
        return ExactLayers(*(_cut(t, first, last) for t in (self.keys, self.values)))

    def kept(self, rows: Tensor) -> ExactLayers:
        """Some rows, exact."""
        rows = rows.to(self.keys.device)
        return ExactLayers(self.keys.index_select(2, rows), self.values.index_select(2, rows))

    @classmethod
    def joined(cls, parts: Sequence[ExactLayers], places: Places) -> ExactLayers:
        """Rows of layers of one kind in storages of their own, exact."""
        return cls(_laid([p.keys for p in parts], places), _laid([p.values for p in parts], places))

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal in layers that are joined."""
        return "exact", *(k for t in (self.keys, self.values) for k in _kind(t))

    def moved_to(self, device: torch.device) -> ExactLayers:
        """The same on a device."""
        return ExactLayers(self.keys.to(device), self.values.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """K and V."""
        return {"keys": self.keys, "values": self.values}


@dataclass(frozen=True, slots=True)
class GridLayers:
    """Quantised rows.

    Rows of a group are neighbours, and as long as nothing was dropped from their middle, row `r`
    is in group `(skip + r) // 64`. Otherwise `groups` says where it is.
    """

    bits: int
    value_dim: int
    codes: Tensor
    """uint8 `[L, planes, H, S, bytes]`, see `quantise.laid_out`."""
    key_scale: Tensor
    """float32 `[L, H, G, D]`."""
    key_zero: Tensor
    """`[L, H, G, D]`; its dtype is the rows'."""
    value_scale: Tensor
    """float32 `[L, H, S, 1]`."""
    value_zero: Tensor
    """`[L, H, S, 1]`."""
    skip: int = 0
    """Rows of the first group that are not here any more."""
    groups: Tensor | None = None
    """int32 `[S]`; of rows that were joined out of their order, they need not ascend."""

    @classmethod
    def pack(cls, layers: Sequence[Rows], bits: int) -> GridLayers:
        """Quantise the rows, one layer after the other: a float32 copy of one layer at a time.

        Raises:
            ValueError: A row holds NaN or infinity, or spans more than float32 does.
        """
        made = []
        for keys, values in layers:
            k, v = quantise.key_grid(keys, bits), quantise.value_grid(values, bits)
            finite = torch.isfinite(k.scale).all() & torch.isfinite(v.scale).all()
            if not finite:
                msg = "K/V rows hold NaN or infinity; nothing was packed"
                raise ValueError(msg)
            codes = quantise.laid_out(
                quantise.key_codes(keys, k, bits), quantise.value_codes(values, v, bits), bits
            )
            made.append((codes, *k, *v))
        codes, *grid = (torch.stack(parts) for parts in zip(*made, strict=True))
        key_scale, key_zero, value_scale, value_zero = grid
        return cls(bits, layers[0][1].shape[2], codes, key_scale, key_zero, value_scale, value_zero)

    def load(self, place: int, first: int, last: int) -> Rows:
        """Rows `first..last` in new memory, in the dtype they had, rounded once."""
        dims = (self.key_zero.shape[-1], self.value_dim)
        keys, values = quantise.taken_out(self.codes[place, :, :, first:last], self.bits, dims)
        if self.groups is None:
            grid = Grid(self.key_scale, self.key_zero)
            quantise.put_keys(keys, grid, place, self.skip + first)
        else:
            lines, of_layer = self.groups[first:last], (self.key_scale[place], self.key_zero[place])
            quantise.put_rows(keys, Grid(*(t.index_select(1, lines) for t in of_layer)))
        scale, zero = self.value_scale[place, :, first:last], self.value_zero[place, :, first:last]
        quantise.put_rows(values, Grid(scale, zero))
        dtype = self.key_zero.dtype
        if dtype == torch.float32:
            return keys, values
        return keys.to(dtype), values.to(dtype)

    def cut(self, first: int, last: int) -> GridLayers:
        """Rows `first..last`; what they load is the same, bit for bit."""
        if self.groups is not None:
            return self.kept(torch.arange(first, last))
        start, skip = divmod(self.skip + first, GROUP)
        end = (self.skip + last - 1) // GROUP + 1
        return replace(
            self,
            codes=_cut(self.codes, first, last),
            key_scale=_cut(self.key_scale, start, end),
            key_zero=_cut(self.key_zero, start, end),
            value_scale=_cut(self.value_scale, first, last),
            value_zero=_cut(self.value_zero, first, last),
            skip=skip,
        )

    def kept(self, rows: Tensor) -> GridLayers:
        """Some rows; what they load is the same, bit for bit. Groups without a row go too."""
        device = self.codes.device
        lines = (rows + self.skip) // GROUP if self.groups is None else self.groups.cpu()[rows]
        used, groups = torch.unique(lines, return_inverse=True)
        rows, used = rows.to(device), used.to(device)
        return replace(
            self,
            codes=self.codes.index_select(3, rows),
            key_scale=self.key_scale.index_select(2, used),
            key_zero=self.key_zero.index_select(2, used),
            value_scale=self.value_scale.index_select(2, rows),
            value_zero=self.value_zero.index_select(2, rows),
            skip=0,
            groups=groups.to(device, torch.int32),
        )

    @classmethod
    def joined(cls, parts: Sequence[GridLayers], places: Places) -> GridLayers:
        """Rows of layers of one kind in storages of their own; what they load is the same.

        Where parts meet at the end of a group they take the bytes they took, else four more a row.
        """
        groups = None
        if places is not None or not _meet_at_groups(parts):
            lines, n_groups = [], 0
            for part in parts:
                lines.append(part._lines() + n_groups)
                n_groups += part.key_scale.shape[2]
            groups = _laid(lines, places, 0)
        return replace(
            parts[0],
            codes=_laid([p.codes for p in parts], places),
            key_scale=torch.cat([p.key_scale for p in parts], 2),
            key_zero=torch.cat([p.key_zero for p in parts], 2),
            value_scale=_laid([p.value_scale for p in parts], places),
            value_zero=_laid([p.value_zero for p in parts], places),
            skip=parts[0].skip if groups is None else 0,
            groups=groups,
        )

    def _lines(self) -> Tensor:
        """The group of every row, int32 `[S]`."""
        if self.groups is not None:
            return self.groups
        rows = torch.arange(self.codes.shape[3], dtype=torch.int32, device=self.codes.device)
        return (rows + self.skip) // GROUP

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal in layers that are joined."""
        return "grid", self.bits, self.value_dim, *_kind(self.codes), *_kind(self.key_zero)

    def moved_to(self, device: torch.device) -> GridLayers:
        """The same on a device."""
        there = {name: t.to(device) for name, t in self.tensors().items()}
        return GridLayers(bits=self.bits, value_dim=self.value_dim, skip=self.skip, **there)

    def tensors(self) -> dict[str, Tensor]:
        """Codes and grids."""
        found = {
            "codes": self.codes,
            "key_scale": self.key_scale,
            "key_zero": self.key_zero,
            "value_scale": self.value_scale,
            "value_zero": self.value_zero,
        }
        return found if self.groups is None else {**found, "groups": self.groups}


def join_layers(parts: Sequence[Layers], places: Places) -> Layers:
    """Rows of several layers of one kind in storages of their own; exact."""
    grids = [part for part in parts if isinstance(part, GridLayers)]
    if grids:
        return GridLayers.joined(grids, places)
    return ExactLayers.joined([part for part in parts if isinstance(part, ExactLayers)], places)


def _cut(tensor: Tensor, first: int, last: int) -> Tensor:
    """Rows of `[..., S, D]` in a storage of their own."""
    part = tensor.narrow(-2, first, last - first)
    return part.clone(memory_format=torch.contiguous_format)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return *tensor.shape[:-2], tensor.shape[-1], tensor.dtype, tensor.device


def _laid(tensors: Sequence[Tensor], places: Places, dim: int = -2) -> Tensor:
    """Rows of some tensors in one, each part's at its places; one copy of each."""
    if places is None:
        return torch.cat(tuple(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(len(at) for at in places)
    new = tensors[0].new_empty(shape)
    for tensor, at in zip(tensors, places, strict=True):
        new.index_copy_(dim, at.to(new.device), tensor)
    return new


def _meet_at_groups(parts: Sequence[GridLayers]) -> bool:
    """Whether row `r` of all of them together is in group `(skip + r) // 64`."""
    if any(part.groups is not None for part in parts):
        return False
    return all(
        one.skip + one.codes.shape[3] == one.key_scale.shape[2] * GROUP and other.skip == 0
        for one, other in pairwise(parts)
    )
