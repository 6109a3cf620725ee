"""Rows of one segment at lower precision, in all layers; it must not know the tree.

Packing is lossy and happens once, from the original; all that follows (cutting, dropping rows,
a round trip through the archive) leaves what the other rows load as it was, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sidequest_langchain.kv.layout import KVLayout, LayerShape
from sidequest_langchain.kv.packed_layers import ExactLayers, GridLayers, Layers, join_layers
from sidequest_langchain.kv.quantise import BITS, GROUP

__all__ = ["GROUP", "PackedBlock", "packed_bytes"]


class PackedBlock:
    """Rows of all layers, quantised: keys per channel in groups of 64 rows, values per row.

    Layers that are alike lie in a few tensors together. A block is never written: what changes
    makes another one, whose storages are its own.

    Paper: KIVI, arXiv:2402.02750, §3.2.
    """

    __slots__ = ("_bundles", "_places", "bits", "offsets")

    def __init__(
        self,
        bits: int,
        offsets: tuple[int, ...],
        bundles: Sequence[Layers],
        places: Sequence[tuple[int, int]],
    ) -> None:
        self.bits = bits
        """8 or 4."""
        self.offsets = offsets
        """Which tokens of the segment the rows are of, ascending."""
        self._bundles = tuple(bundles)
        self._places = tuple(places)
        """Of every layer: its bundle, and its place in there."""

    @classmethod
    @torch.no_grad()
    def pack(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        offsets: Sequence[int],
        *,
        bits: int,
        exempt: Collection[int] = (),
    ) -> PackedBlock:
        """Quantise rows of all layers; lossy. What is given is not changed.

        A group that is short of 64 rows has a grid of its own too: a block of few rows may be
        larger than the rows were, see `packed_bytes`.

        Args:
            keys: One `[H, S, D]` a layer.
            values: One `[H, S, Dv]` a layer.
            offsets: Of the rows, ascending, `S` of them.
            bits: 8 or 4.
            exempt: Layers that stay at full precision.

        Raises:
            ValueError: Other bits, no rows, offsets that do not fit, or rows that are not finite.
        """
        if bits not in BITS:
            msg = f"rows are packed to 8 or 4 bits, not to {bits}"
            raise ValueError(msg)
        n_rows = {t.shape[1] for t in (*keys, *values)}
        if n_rows != {len(offsets)} or not offsets:
            msg = f"{len(offsets)} offsets for {sorted(n_rows)} rows; there must be one each"
            raise ValueError(msg)
        if any(b <= a for a, b in itertools.pairwise(offsets)):
            msg = "offsets must ascend"
            raise ValueError(msg)
        alike: dict[object, list[int]] = {}
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            shape = (k.shape[0], k.shape[2], v.shape[2], k.dtype, k.device, layer in exempt)
            alike.setdefault(shape, []).append(layer)
        bundles: list[Layers] = []
        places = [(0, 0)] * len(keys)
        for number, layers in enumerate(alike.values()):
            rows = [(keys[i], values[i]) for i in layers]
            is_exempt = layers[0] in exempt
            bundles.append(ExactLayers.pack(rows) if is_exempt else GridLayers.pack(rows, bits))
            for place, layer in enumerate(layers):
                places[layer] = (number, place)
        return cls(bits, tuple(offsets), bundles, places)

    @property
    def n_rows(self) -> int:
        """How many rows it holds."""
        return len(self.offsets)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        tensors = (t for bundle in self._bundles for t in bundle.tensors().values())
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def load(self, layer: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """K `[H, n, D]` and V `[H, n, Dv]` of rows `first..last`, in the dtype they had.

        Only these rows are dequantised. A row's numbers do not depend on what it is loaded with.
        Exempt layers give views, which are not to be written.
        """
        number, place = self._places[layer]
        return self._bundles[number].load(place, first, self.n_rows if last is None else last)

    def place_of(self, layer: int) -> tuple[int, int]:
        """Which bundle holds a layer, and at which place."""
        return self._places[layer]

    def bundle(self, number: int) -> Layers:
        """Layers that are alike, in a few tensors; not to be written."""
        return self._bundles[number]

    def split(self, n_head: int) -> tuple[PackedBlock, PackedBlock]:
        """Rows before `n_head` and from there on, each in storages of its own; exact.

        Raises:
            ValueError: One of them would be empty.
        """
        if not 0 < n_head < self.n_rows:
            msg = f"a block of {self.n_rows} rows cannot be split at row {n_head}"
            raise ValueError(msg)
        return self._cut(0, n_head), self._cut(n_head, self.n_rows)

    def moved(self, shift: int) -> PackedBlock:
        """The same tensors, for a segment that starts `shift` tokens earlier; exact."""
        offsets = tuple(offset + shift for offset in self.offsets)
        return PackedBlock(self.bits, offsets, self._bundles, self._places)

    def without(self, rows: Collection[int]) -> PackedBlock | None:
        """Drop some rows, by their index; `None` if none is left. The others stay exact.

        Raises:
            ValueError: There is no such row.
        """
        dropped = set(rows)
        if not dropped <= set(range(self.n_rows)):
            msg = f"a block of {self.n_rows} rows has no row {max(dropped)}"
            raise ValueError(msg)
        left = [row for row in range(self.n_rows) if row not in dropped]
        if not left:
            return None
        if left[-1] - left[0] + 1 == len(left):
            return self._cut(left[0], left[-1] + 1)
        picked = torch.tensor(left)
        offsets = tuple(self.offsets[row] for row in left)
        return self._with(offsets, [bundle.kept(picked) for bundle in self._bundles])

    @property
    def kind(self) -> tuple[object, ...]:
        """Blocks of one kind can be joined: they have the same bits, layers and exempt layers."""
        return self.bits, self._places, *(bundle.kind for bundle in self._bundles)

    @classmethod
    def joined(cls, blocks: Sequence[PackedBlock], shifts: Sequence[int]) -> PackedBlock:
        """One block of the rows of several, in storages of its own; bit for bit the same rows.

        Where each block's rows follow those of the one before and end with a group, it takes the
        bytes that they take; else four more a row, which say in which group it is.

        Args:
            blocks: Of one kind.
            shifts: What is added to the offsets of each.

        Raises:
            ValueError: There is none, they differ in kind, or two rows have one offset.
        """
        if len({block.kind for block in blocks}) != 1:
            msg = f"{len(blocks)} packed blocks are not of one kind: they cannot be joined"
            raise ValueError(msg)
        given = [
            [at + shift for at in block.offsets]
            for block, shift in zip(blocks, shifts, strict=True)
        ]
        offsets = sorted(itertools.chain.from_iterable(given))
        place = {at: row for row, at in enumerate(offsets)}
        if len(place) < len(offsets):
            msg = "two rows have one offset: the blocks cannot be joined"
            raise ValueError(msg)
        is_in_order = all(a[-1] < b[0] for a, b in itertools.pairwise(given))
        places = None if is_in_order else [torch.tensor([place[at] for at in g]) for g in given]
        bundles = [
            join_layers(parts, places)
            for parts in zip(*(block._bundles for block in blocks), strict=True)
        ]
        return blocks[0]._with(tuple(offsets), bundles)

    def _cut(self, first: int, last: int) -> PackedBlock:
        bundles = [bundle.cut(first, last) for bundle in self._bundles]
        return self._with(self.offsets[first:last], bundles)

    def _with(self, offsets: tuple[int, ...], bundles: Sequence[Layers]) -> PackedBlock:
        return PackedBlock(self.bits, offsets, bundles, self._places)

    def tensors(self) -> dict[str, Tensor]:
        """All that is stored, and a small `header` (int64) that tells how it belongs together."""
        header = [self.bits, len(self._bundles), len(self._places)]
        found: dict[str, Tensor] = {}
        for number, bundle in enumerate(self._bundles):
            grid = bundle if isinstance(bundle, GridLayers) else None
            header += [grid.value_dim, grid.skip] if grid is not None else [0, 0]
            found.update({f"{number}.{name}": t for name, t in bundle.tensors().items()})
        header += [number for place in self._places for number in place]
        return {"header": torch.tensor(header), **found}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        offsets: Sequence[int],
        layout: KVLayout | None = None,
    ) -> PackedBlock:
        """The block that `tensors` were of; exact.

        Args:
            tensors: From `tensors()`.
            offsets: Of the rows.
            layout: Where each layer runs; without it tensors stay where they are.

        Raises:
            ValueError: They are not those of a block with as many rows.
        """
        try:
            bits, n_bundles, n_layers, *rest = tensors["header"].tolist()
            pairs = list(zip(rest[::2], rest[1::2], strict=True))
            facts, places = pairs[:n_bundles], pairs[n_bundles:]
            if len(places) != n_layers:
                msg = "its header is incomplete"
                raise ValueError(msg)
            bundles: list[Layers] = []
            for number, (value_dim, skip) in enumerate(facts):
                start = f"{number}."
                own = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
                if "codes" in own:
                    n_rows = own["codes"].shape[3]
                    bundle: Layers = GridLayers(bits=bits, value_dim=value_dim, skip=skip, **own)
                else:
                    n_rows = own["keys"].shape[2]
                    bundle = ExactLayers(**own)
                if n_rows != len(offsets):
                    msg = f"it has {n_rows} rows where {len(offsets)} are expected"
                    raise ValueError(msg)
                if layout is not None:
                    bundle = bundle.moved_to(layout[[p for p, _ in places].index(number)].device)
                bundles.append(bundle)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            msg = f"these tensors make no packed block: {error}"
            raise ValueError(msg) from error
        return cls(bits, tuple(offsets), bundles, places)

    def meta(self) -> dict[str, str]:
        """What it is, for people; `from_tensors` needs none of it."""
        return {"bits": str(self.bits), "rows": str(self.n_rows), "layers": str(len(self._places))}


def packed_bytes(n_rows: int, layout: KVLayout, bits: int, exempt: Collection[int] = ()) -> int:
    """Bytes that a block of this many rows would take, of a whole segment of that layout."""
    return sum(
        n_rows * shape.bytes_per_token if layer in exempt else _layer_bytes(n_rows, shape, bits)
        for layer, shape in enumerate(layout)
    )


def _layer_bytes(n_rows: int, shape: LayerShape, bits: int) -> int:
    grid = 4 + shape.dtype.itemsize
    n_codes = shape.key_dim + shape.value_dim
    row = (n_codes if bits == 8 else (n_codes + 1) // 2) + grid
    groups = -(-n_rows // GROUP)
    return shape.n_kv_heads * (n_rows * row + groups * shape.key_dim * grid)
