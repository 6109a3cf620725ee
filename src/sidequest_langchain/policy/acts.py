"""What a policy may ask for. An act is a wish: the executor checks it and carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True, slots=True)
class Act:
    """Something to do to one segment."""

    segment_id: int


@dataclass(frozen=True, slots=True)
class _OfRows(Act):
    """Something to do to some rows of it."""

    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.offsets:
            msg = "an act needs at least one offset"
            raise ValueError(msg)
        if self.offsets[0] < 0 or any(a >= b for a, b in pairwise(self.offsets)):
            msg = "offsets must ascend, each once, from 0 on"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Evict(_OfRows):
    """Take rows out of memory. Lossy, unless a tier below has room for a copy.

    Raises:
        ValueError: `offsets` is empty, or does not ascend.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class EvictByHead(Act):
    """Keep the `n_keep` best rows of each KV head, each head its own. Lossy.

    Raises:
        ValueError: `n_keep` is negative.
    """

    n_keep: int
    reason: str = ""

    def __post_init__(self) -> None:
        if self.n_keep < 0:
            msg = f"n_keep must be at least 0, found {self.n_keep}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Compress(_OfRows):
    """Keep rows at 8 or 4 bits, as one block. Lossy.

    Raises:
        ValueError: `offsets` is empty or does not ascend, or there are other bits.
    """

    bits: Literal[4, 8] = 8
    reason: str = ""

    def __post_init__(self) -> None:
        _OfRows.__post_init__(self)  # a class with slots is made twice: no bare super()
        if self.bits not in (4, 8):
            msg = f"bits are 4 or 8, found {self.bits}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Archive(_OfRows):
    """Move rows to a slower tier: copied there bit for bit, then taken out of memory.

    Where the copy finds no room, nothing is done.

    Raises:
        ValueError: `offsets` is empty, or does not ascend.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Release(Act):
    """Drop a whole idle segment that no other builds on, tokens too.

    Exact: what comes back to it is computed again.
    """

    reason: str = ""
