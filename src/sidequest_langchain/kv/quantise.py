"""Grids of 256 or 16 steps for K and V, and how their codes lie in bytes; all of it is lossy.

Keys get one grid for each channel and group of 64 rows, since a few channels of some models are a
hundred times larger than the rest; values get one for each row and head. A grid starts at the
least number it covers and has steps of a 255th (a 15th) of the range: `x = zero + code * scale`,
so what is loaded is off by half a step at most, and a constant is exact. `zero` is one of the
numbers themselves and so keeps their dtype exactly; `scale` is float32, which neither overflows
nor rounds the grid short of its greatest number.

Nothing here knows segments or layers.

Paper: KIVI, arXiv:2402.02750, §3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64
"""Rows that share a key's grid."""

BITS = (8, 4)


class Grid(NamedTuple):
    """Where codes lie on the number line."""

    scale: Tensor
    """float32; a key's `[H, G, D]`, a value's `[H, S, 1]`."""
    zero: Tensor
    """Dtype of the numbers, same shape."""


def key_grid(keys: Tensor, bits: int) -> Grid:
    """One grid for each head, group of 64 rows and channel, of keys `[H, S, D]`.

    The last group holds what is left of the rows.
    """
    whole = keys.shape[1] // GROUP * GROUP
    blocks = []
    if whole:
        blocks.append(_grouped(keys[:, :whole], whole // GROUP))
    if whole < keys.shape[1]:
        blocks.append(keys[:, whole:].unsqueeze(1))
    least = torch.cat([block.amin(2) for block in blocks], 1)
    greatest = torch.cat([block.amax(2) for block in blocks], 1)
    return _grid(least, greatest, bits)


def value_grid(values: Tensor, bits: int) -> Grid:
    """One grid for each head and row, of values `[H, S, D]`."""
    return _grid(values.amin(2, keepdim=True), values.amax(2, keepdim=True), bits)


def _grid(least: Tensor, greatest: Tensor, bits: int) -> Grid:
    return Grid((greatest.float() - least.float()) / (2**bits - 1), least)


def key_codes(keys: Tensor, grid: Grid, bits: int) -> Tensor:
    """Codes of keys `[H, S, D]`, uint8 of the same shape."""
    codes = keys.float().clone(memory_format=torch.contiguous_format)
    steps = torch.where(grid.scale > 0, grid.scale, 1.0)
    for rows, groups in runs(0, keys.shape[1]):
        part = _grouped(codes[:, rows], groups.stop - groups.start)
        part.sub_(grid.zero[:, groups].unsqueeze(2)).div_(steps[:, groups].unsqueeze(2))
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def value_codes(values: Tensor, grid: Grid, bits: int) -> Tensor:
    """Codes of values `[H, S, D]`, uint8 of the same shape."""
    steps = torch.where(grid.scale > 0, grid.scale, 1.0)
    codes = (values.float() - grid.zero).div_(steps)
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def put_keys(codes: Tensor, grid: Grid, layer: int, first: int) -> None:
    """Turn codes into keys, in place; `first` is the first one's row, counted over whole groups.

    Args:
        codes: float32 `[H, n, D]`, becomes the keys.
        grid: Of all layers and groups, `[L, H, G, D]`.
        layer: Whose codes they are.
        first: Row of the first code, 0 being the first row of the first group.
    """
    n_rows = codes.shape[1]
    for rows, groups in runs(first, first + n_rows):
        run = codes if rows.stop - rows.start == n_rows else codes[:, rows]
        # One index takes half the time of a select, a narrow and an unsqueeze.
        lines = Grid(grid.scale[layer, :, groups, None], grid.zero[layer, :, groups, None])
        put_rows(_grouped(run, groups.stop - groups.start), lines)


def put_rows(codes: Tensor, grid: Grid) -> None:
    """Turn codes into numbers, in place.

    Args:
        codes: float32, becomes the numbers.
        grid: A line for each row, in a shape that broadcasts.
    """
    # One fused call would round otherwise in its vector part than in its rest, so that a row
    # would depend on what is loaded with it; a product and then a sum do not.
    codes.mul_(grid.scale).add_(grid.zero)


def runs(first: int, last: int) -> Iterator[tuple[slice, slice]]:
    """Rows `first..last` in at most three runs: the end of a group, whole groups, a beginning.

    Yields:
        The rows of a run, counted from `first`, and its groups.
    """
    row = first
    while row < last:
        group, inside = divmod(row, GROUP)
        whole = (last - row) // GROUP if inside == 0 else 0
        end = row + whole * GROUP if whole else min(last, (group + 1) * GROUP)
        yield slice(row - first, end - first), slice(group, group + max(whole, 1))
        row = end


def _grouped(rows: Tensor, n_groups: int) -> Tensor:
    """Rows `[H, n, D]` as `[H, groups, rows of a group, D]`, a view."""
    n_heads, n_rows, dim = rows.shape
    return rows.view(n_heads, n_groups, n_rows // n_groups, dim)


def laid_out(keys: Tensor, values: Tensor, bits: int) -> Tensor:
    """Codes of K and V as they are stored.

    Where a key is as long as a value, both are read with one operation: INT8 has two planes,
    INT4 has the key's code in the low half of a byte and the value's in the high half. Where
    they differ, a row is the key's codes and then the value's, in INT4 folded in the middle.

    Args:
        keys: uint8 `[H, S, D]`.
        values: uint8 `[H, S, Dv]`.
        bits: 8 or 4.

    Returns:
        uint8 `[2, H, S, D]`, `[1, H, S, D]`, `[1, H, S, D + Dv]` or
        `[1, H, S, (D + Dv + 1) // 2]`.
    """
    if keys.shape[2] == values.shape[2]:
        if bits == 8:
            return torch.stack((keys, values))
        return _nibbles(keys, values).unsqueeze(0)
    row = torch.cat((keys, values), 2)
    if bits == 8:
        return row.unsqueeze(0)
    low, high = row.chunk(2, 2)
    if high.shape[2] < low.shape[2]:
        high = torch.nn.functional.pad(high, (0, 1))
    return _nibbles(low, high).unsqueeze(0)


def _nibbles(low: Tensor, high: Tensor) -> Tensor:
    return torch.bitwise_left_shift(high, 4).bitwise_or_(low)


def taken_out(codes: Tensor, bits: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes of K `[H, n, D]` and V `[H, n, Dv]` as float32, in new memory.

    Args:
        codes: What `laid_out` made, or some rows of it.
        bits: 8 or 4.
        dims: `D` and `Dv`.
    """
    key_dim, value_dim = dims
    if key_dim == value_dim:
        if bits == 4:
            codes = _halves(codes[0])
        keys, values = codes.to(torch.float32).unbind(0)
        return keys, values
    row = codes[0] if bits == 8 else torch.cat(_halves(codes[0]).unbind(0), -1)
    values = row[..., key_dim : key_dim + value_dim]
    like = torch.contiguous_format
    return (
        row[..., :key_dim].to(torch.float32, memory_format=like),
        values.to(torch.float32, memory_format=like),
    )


def _halves(codes: Tensor) -> Tensor:
    """Low and high half of each byte, `[2, ...]`."""
    halves = codes.new_empty((2, *codes.shape))
    # Eight bytes at once where rows allow it: shifting bytes one by one takes four times as long.
    is_wide = codes.shape[-1] % 8 == 0 and codes.is_contiguous()
    dtype, mask = (torch.int64, 0x0F0F0F0F0F0F0F0F) if is_wide else (torch.uint8, 0x0F)
    source, low, high = (t.view(dtype) for t in (codes, halves[0], halves[1]))
    torch.bitwise_and(source, mask, out=low)
    torch.bitwise_right_shift(source, 4, out=high)
    high.bitwise_and_(mask)
    return halves
