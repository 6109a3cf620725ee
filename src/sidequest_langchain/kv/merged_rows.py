"""Rows of several parts of one segment, read in the order of their offsets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sidequest_langchain.kv.parts import Part, RowsByHead, bits_of
from sidequest_langchain.kv.residency import rows_at


class MergedRows:
    """Some rows of some parts, as one part."""

    __slots__ = ("_parts", "_places", "n_rows", "offsets")

    def __init__(self, parts: Sequence[Part], offsets: Collection[int]) -> None:
        """Take the rows of `parts` that are of tokens in `offsets`.

        Raises:
            ValueError: The heads of a part have rows of their own.
        """
        self._parts = parts
        found: list[tuple[int, int, int]] = []
        for n, part in enumerate(parts):
            if isinstance(part, RowsByHead):
                msg = "rows that heads keep for themselves have no order in common"
                raise ValueError(msg)
            have = range(part.n_rows) if part.offsets is None else part.offsets
            found += [(have[row], n, row) for row in rows_at(have, offsets)]
        found.sort()
        self.offsets: Sequence[int] = tuple(at for at, _, _ in found)
        self.n_rows = len(found)
        self._places = [(n, row) for _, n, row in found]

    def load(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """K and V of rows `first..last`: a view where they lie in a row in one storage."""
        places = self._places[first:last]
        keys, values, order = [], [], []
        for n in sorted({n for n, _ in places}):
            at = [i for i, (of, _) in enumerate(places) if of == n]
            k, v = _load(self._parts[n], layer, [places[i][1] for i in at])
            keys.append(k)
            values.append(v)
            order += at
        if len(keys) == 1:
            return keys[0], values[0]
        back = torch.tensor(order, device=keys[0].device).argsort()
        return torch.cat(keys, 1).index_select(1, back), torch.cat(values, 1).index_select(1, back)


def is_finer(part: Part, bits: int) -> bool:
    """Whether rows of a part would lose something by being packed to so many bits."""
    of_part = bits_of(part)
    return of_part is None or of_part > bits


def _load(part: Part, layer: int, rows: list[int]) -> tuple[Tensor, Tensor]:
    k, v = part.load(layer, rows[0], rows[-1] + 1)
    if k.shape[1] == len(rows):
        return k, v
    chosen = torch.tensor([row - rows[0] for row in rows], device=k.device)
    return k.index_select(1, chosen), v.index_select(1, chosen)
