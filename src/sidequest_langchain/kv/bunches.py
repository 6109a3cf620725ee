"""Blocks that the same decoding rows see, read side by side with one call of attention's kernel.

A managed path consists of many short blocks, and a call for each in every layer would cost more
than the rows. It must not know a query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from sidequest_langchain.kv.blocks import Block
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.packed_reading import PackedRows
from sidequest_langchain.kv.parts import LOAD_ROWS

COPY_BYTES = 2**15
"""K and V of one layer up to which copying rows beside others costs less than a call for them."""

Load = Callable[[int], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""K and V of a layer, in one or more pieces: `[H, n, D]` and `[H, n, Dv]` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows `first..last` of a block's part."""

    at: int
    """Place of the block among all."""
    block: Block
    first: int
    last: int
    kind: object
    """Equal in pieces that are loaded with one call."""

    @property
    def n_rows(self) -> int:
        """How many."""
        return self.last - self.first


class Bunch:
    """Pieces of blocks, at most `LOAD_ROWS` rows together, every one of which is seen."""

    __slots__ = ("_loads", "_shares", "pieces", "rows")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.rows = pieces[0].block.rows
        """As of each of the blocks."""
        self._loads = [_load(list(run)) for _, run in groupby(pieces, attrgetter("kind"))]
        self._shares: Tensor | None = None

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """K `[H, n, D]` and V `[H, n, Dv]` of a layer; a view where one piece lies in a storage."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for load in self._loads:
            k, v = load(layer)
            keys.extend(k)
            values.extend(v)
        if len(keys) == 1:
            return keys[0], values[0]
        return torch.cat(keys, 1), torch.cat(values, 1)

    def members(self, device: torch.device) -> Tensor:
        """Which piece each row is of, as 0 and 1, fp32 `[n, pieces]`; made once."""
        if self._shares is None:
            sizes = torch.tensor([piece.n_rows for piece in self.pieces])
            self._shares = torch.eye(len(sizes)).repeat_interleave(sizes, 0).to(device)
        return self._shares


@dataclass(frozen=True, slots=True)
class Reads:
    """All blocks of a step's decoding rows, as they are read."""

    blocks: tuple[Block, ...]
    alone: tuple[int, ...]
    """Places of blocks that are read each with its own call."""
    bunches: tuple[Bunch, ...]

    calls: tuple[Block | Bunch, ...]
    """What is read, one call of the kernel each."""
    are_whole: bool
    """Whether every decoding row sees every row of all blocks, in all heads."""

    def slots(self, n_rows: int) -> list[int]:
        """A number for each call, as low as may be, that no other call for one of its rows has.

        Args:
            n_rows: Decoding rows.
        """
        taken: list[set[int]] = []
        found = []
        for call in self.calls:
            rows = range(n_rows) if call.rows is None else call.rows
            slot = next((n for n, who in enumerate(taken) if who.isdisjoint(rows)), len(taken))
            if slot == len(taken):
                taken.append(set())
            taken[slot].update(rows)
            found.append(slot)
        return found

    def by_block(self, of_calls: Sequence[Tensor], of_pieces: Sequence[Tensor]) -> list[Tensor]:
        """Log-sum-exps of every block, from those of all calls and of all pieces of bunches."""
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for at, lse in zip(self.alone, of_calls, strict=False):
            found[at].append(lse)
        pieces = (piece for bunch in self.bunches for piece in bunch.pieces)
        for piece, lse in zip(pieces, of_pieces, strict=True):
            found[piece.at].append(lse)
        return [
            some[0] if len(some) == 1 else torch.logsumexp(torch.stack(some), 0) for some in found
        ]


def reads_of(blocks: tuple[Block, ...]) -> Reads:
    """Lay short blocks together.

    Blocks whose heads differ in what is seen stay alone, and so do long ones that are read where
    they lie.
    """
    alone: list[int] = []
    together: dict[tuple[int, ...] | None, dict[object, list[Piece]]] = {}
    for at, block in enumerate(blocks):
        if block.low is not None or (len(block.keys) and _layer_bytes(block) > COPY_BYTES):
            alone.append(at)
            continue
        # Attention does not ask for an order: what is loaded with one call goes together.
        kinds = together.setdefault(block.rows, {})
        for piece in _pieces(at, block):
            kinds.setdefault(piece.kind, []).append(piece)
    bunches = []
    for kinds in together.values():
        for some in _filled([piece for pieces in kinds.values() for piece in pieces]):
            if len(some) == 1 and len(some[0].block.keys):
                alone.append(some[0].at)
            else:
                bunches.append(Bunch(some))
    return Reads(
        blocks=blocks,
        alone=tuple(alone),
        bunches=tuple(bunches),
        calls=(*(blocks[at] for at in alone), *bunches),
        are_whole=all(block.rows is None and block.low is None for block in blocks),
    )


def _filled(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in bunches of at most `LOAD_ROWS` rows."""
    found: list[list[Piece]] = []
    n_rows = LOAD_ROWS
    for piece in pieces:
        if n_rows + piece.n_rows > LOAD_ROWS:
            found.append([])
            n_rows = 0
        found[-1].append(piece)
        n_rows += piece.n_rows
    return found


def _pieces(at: int, block: Block) -> list[Piece]:
    """A block in pieces that may be loaded: what lies in a storage is one."""
    first, last = block.first, block.last
    if len(block.keys):
        return [Piece(at=at, block=block, first=first, last=last, kind="in place")]
    is_packed = isinstance(block.part, PackedBlock)
    kind = block.part.kind if isinstance(block.part, PackedBlock) else None
    found = []
    while first < last:
        # At whole multiples, so that groups of packed rows are read once.
        end = min(last, (first // LOAD_ROWS + 1) * LOAD_ROWS)
        own = kind if is_packed else ("loaded", at, first)
        found.append(Piece(at=at, block=block, first=first, last=end, kind=own))
        first = end
    return found


def _layer_bytes(block: Block) -> int:
    """Of the first layer; the others are much like it."""
    return sum(rows[0].numel() * rows[0].element_size() for rows in (block.keys, block.values))


def _load(pieces: Sequence[Piece]) -> Load:
    """How to load pieces of one kind."""
    if len(pieces[0].block.keys):
        blocks = [piece.block for piece in pieces]
        return lambda layer: ([b.keys[layer] for b in blocks], [b.values[layer] for b in blocks])
    packed = [(p.block.part, p.first, p.last) for p in pieces]
    if len(packed) == 1:
        return lambda layer: _one(pieces[0], layer)
    rows = PackedRows([(b, i, j) for b, i, j in packed if isinstance(b, PackedBlock)])

    def load(layer: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        k, v = rows.load(layer)
        return (k,), (v,)

    return load


def _one(piece: Piece, layer: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    part = piece.block.part
    assert part is not None
    k, v = part.load(layer, piece.first, piece.last)
    return (k,), (v,)
