"""Rows of several packed blocks, dequantised together; it must not know segments or queries.

A cut or thinned cache has many short blocks, and a dozen operations for each in every layer would
cost more than the rows. Their codes and grids are laid side by side first, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sidequest_langchain.kv import quantise
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.packed_layers import ExactLayers, GridLayers
from sidequest_langchain.kv.quantise import GROUP, Grid

Piece = tuple[PackedBlock, int, int]
"""A block, and which of its rows, `first..last`."""


class PackedRows:
    """Some rows of packed blocks, one block's after another's. For the step at hand.

    What it loads is what the blocks would load, bit for bit. It changes nothing.
    """

    __slots__ = ("_pieces", "_readers")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Take rows of `pieces`, whose blocks are of one `kind`."""
        self._pieces = pieces
        self._readers: dict[int, _Grids | _Exact] = {}

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """K `[H, n, D]` and V `[H, n, Dv]` of a layer, in new memory, in the dtype they had."""
        number, place = self._pieces[0][0].place_of(layer)
        reader = self._readers.get(number)
        if reader is None:
            reader = self._readers[number] = self._reader(number)
        return reader.load(place)

    def _reader(self, number: int) -> _Grids | _Exact:
        grids: list[tuple[GridLayers, int, int]] = []
        exact: list[tuple[ExactLayers, int, int]] = []
        for block, first, last in self._pieces:
            bundle = block.bundle(number)
            if isinstance(bundle, GridLayers):
                grids.append((bundle, first, last))
            elif isinstance(bundle, ExactLayers):
                exact.append((bundle, first, last))
        return _Grids(grids) if grids else _Exact(exact)


class _Exact:
    """Layers at full precision."""

    def __init__(self, pieces: Sequence[tuple[ExactLayers, int, int]]) -> None:
        self._pieces = pieces

    def load(self, place: int) -> tuple[Tensor, Tensor]:
        rows = [layers.load(place, first, last) for layers, first, last in self._pieces]
        return torch.cat([k for k, _ in rows], 1), torch.cat([v for _, v in rows], 1)


class _Grids:
    """Quantised layers."""

    def __init__(self, pieces: Sequence[tuple[GridLayers, int, int]]) -> None:
        one = pieces[0][0]
        self._bits = one.bits
        self._dims = one.key_zero.shape[-1], one.value_dim
        self._dtype = one.key_zero.dtype
        codes, keys, values = [], [], []
        lines, n_groups, before, sizes = [], 0, [], []
        for layers, first, last in pieces:
            start, end = 0, layers.key_scale.shape[2]
            if layers.groups is None:
                row = layers.skip + first
                start, end = row // GROUP, (layers.skip + last - 1) // GROUP + 1
                at = torch.arange(row, layers.skip + last, device=layers.codes.device)
                lines.append(at.div_(GROUP, rounding_mode="floor"))
            else:
                lines.append(layers.groups[first:last].long())
            codes.append(layers.codes[:, :, :, first:last].unbind(0))
            for grid in (layers.key_scale, layers.key_zero):
                keys.append(grid[:, :, start:end].unbind(0))
            for grid in (layers.value_scale, layers.value_zero):
                values.append(grid[:, :, first:last].unbind(0))
            before.append(n_groups - start)
            sizes.append(last - first)
            n_groups += end - start
        # Turned from pieces to layers, each of which is read with one call for all pieces.
        self._codes = list(zip(*codes, strict=True))
        self._keys = list(zip(*keys[0::2], *keys[1::2], strict=True))
        self._values = list(zip(*values[0::2], *values[1::2], strict=True))
        shifts = torch.repeat_interleave(torch.tensor(before), torch.tensor(sizes))
        at = torch.cat(lines).add_(shifts.to(lines[0].device))
        self._lines = torch.cat([at, at + n_groups])
        """Of every row, its key's scale, then its zero."""

    def load(self, place: int) -> tuple[Tensor, Tensor]:
        codes = torch.cat(self._codes[place], 2)
        keys, values = quantise.taken_out(codes, self._bits, self._dims)
        # Scales and zeros, side by side: in float32, which holds either exactly.
        of_keys = torch.cat(self._keys[place], 1).index_select(1, self._lines)
        quantise.put_rows(keys, Grid(*of_keys.chunk(2, 1)))
        quantise.put_rows(values, Grid(*torch.cat(self._values[place], 1).chunk(2, 1)))
        return keys.to(self._dtype), values.to(self._dtype)
