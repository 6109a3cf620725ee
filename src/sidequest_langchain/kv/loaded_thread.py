"""What a saved thread's file holds, checked against this model's layout; it must not know a tree.

Segments are known by their numbers in the file, parents first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.kv.archive import Ticket
from sidequest_langchain.kv.clearing import ClearedId
from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.residency import Archived, Residency
from sidequest_langchain.kv.sealed_form import Shape
from sidequest_langchain.kv.storage import Storage
from sidequest_langchain.kv.thread_file import ThreadFile
from sidequest_langchain.labels import StepLabel


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedSegment:
    """One segment of a file: its tokens at once, its rows once they were read."""

    number: int
    parent: int
    """The number of the segment it stands on; -1 for one that starts a path."""
    scope: str
    start: int
    ids: list[int]
    kinds: bytes
    kept: tuple[int, ...] | None = None
    hidden: frozenset[int] = frozenset()
    kept_by_head: Tensor | None = None
    packed: list[tuple[int, ...]] = field(default_factory=list)
    """Offsets of the rows of each packed block."""
    bits: list[int] = field(default_factory=list)
    copies: list[tuple[int, tuple[int, ...], tuple[int, ...], int | None]] = field(
        default_factory=list
    )
    """Number of the copy, offsets and rows in it, precision."""
    is_idle: bool = False
    """Whether its rows left while nobody read them."""
    n_bytes: int = 0
    """Bytes of its rows once they are resident."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What was read of its rows."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Where its copies are now, by their numbers."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.ids)

    @property
    def n_dense(self) -> int:
        """Rows at full precision."""
        if self.kept_by_head is not None:
            return int(self.kept_by_head.shape[2])
        return len(self.ids) if self.kept is None else len(self.kept)

    @property
    def n_resident(self) -> int:
        """Rows, packed ones included."""
        return self.n_dense + sum(map(len, self.packed))

    def storage(self, layout: KVLayout) -> Storage:
        """Its rows at full precision, which were read."""
        start = "rows."
        rows = {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}
        return Storage.from_tensors(rows, layout)

    def residency(self, layout: KVLayout) -> Residency | None:
        """Where its rows are, once they were read.

        Raises:
            ValueError: What was read makes no packed block of this layout.
        """
        blocks = []
        for number, offsets in enumerate(self.packed):
            start = f"block.{number}."
            own = {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}
            block = PackedBlock.from_tensors(own, offsets, layout)
            _check_block(block, self.bits[number], layout)
            blocks.append(block)
        return Residency(
            n_tokens=len(self.ids),
            kept=self.kept,
            packed=tuple(blocks),
            hidden=self.hidden,
            kept_by_head=self.kept_by_head,
        ).or_none()

    def archived_in(self, residency: Residency | None) -> Residency | None:
        """The same, with the copies that `tickets` tells of."""
        archived = tuple(
            Archived(ticket=self.tickets[copy], offsets=offsets, rows=rows, bits=bits)
            for copy, offsets, rows, bits in self.copies
            if copy in self.tickets
        )
        residency = residency or Residency(n_tokens=len(self.ids))
        return replace(residency, archived=archived).or_none()


@dataclass(slots=True, kw_only=True)
class LoadedThread:
    """All that a file says but for the rows."""

    segments: list[LoadedSegment]
    paths: list[tuple[StepLabel, int]]
    """Label, and the number of the segment it ends in; oldest first."""
    copies: list[dict[str, str]]
    """Strings of each archived copy."""

    def line(self, number: int) -> list[LoadedSegment]:
        """The segments from the first to one of them."""
        found = []
        while number != -1:
            found.append(self.segments[number])
            number = self.segments[number].parent
        return found[::-1]

    def path_ids(self, number: int) -> list[int]:
        """The ids of all tokens up to the end of a segment."""
        return [token for segment in self.line(number) for token in segment.ids]


def loaded_thread(file: ThreadFile, layout: KVLayout, n_vocab: int) -> LoadedThread:
    """What an open file says, its rows not read yet.

    Raises:
        SavedThreadError: It says what no thread of this model can be.
    """
    try:
        segments: list[LoadedSegment] = []
        for number, facts in enumerate(file.facts["segments"]):
            segments.append(_segment(number, facts, file.small, segments, n_vocab))
        paths = [(StepLabel(**p["label"]), _index(p["tip"], segments)) for p in file.facts["paths"]]
        copies = [dict(meta) for meta in file.facts["copies"]]
        _check_rows(segments, file.shapes, layout)
        _require(
            all(c[0] in range(len(copies)) for s in segments for c in s.copies), "strange copies"
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        file.refuse(f"its index is none ({error})", error)
    return LoadedThread(segments=segments, paths=paths, copies=copies)


def _segment(
    number: int,
    facts: Mapping[str, Any],
    small: Mapping[str, Tensor],
    others: Sequence[LoadedSegment],
    n_vocab: int,
) -> LoadedSegment:
    name = f"{number}."
    parent = None if facts["up"] == -1 else others[_index(facts["up"], others)]
    ids = small[name + "ids"].tolist()
    kinds = small[name + "kinds"].numpy().tobytes()
    scope = facts["scope"]
    _require(isinstance(scope, str), "a scope is no string")
    _require(parent is None or parent.scope == scope, "a path runs through two scopes")
    _require(bool(ids) and len(ids) == len(kinds), "a segment has other kinds than tokens")
    _require(max(kinds) <= max(TokenKind), "a token is of no kind")
    _require(-n_vocab <= min(ids) and max(ids) < n_vocab, "a token is outside of the vocabulary")
    found = LoadedSegment(
        number=number,
        parent=-1 if parent is None else parent.number,
        scope=scope,
        start=0 if parent is None else parent.end,
        ids=[ClearedId(-1 - token) if token < 0 else token for token in ids],
        kinds=kinds,
        is_idle=bool(facts.get("idle")),
    )
    n = len(ids)
    if name + "kept" in small:
        found.kept = _offsets(small[name + "kept"], n)
    if name + "hidden" in small:
        found.hidden = frozenset(_offsets(small[name + "hidden"], n))
    if name + "by_head" in small:
        found.kept_by_head = small[name + "by_head"].long()
    for at, bits in enumerate(facts.get("bits", ())):
        found.packed.append(_offsets(small[f"{name}packed.{at}"], n))
        found.bits.append(int(bits))
    for at, (copy, bits) in enumerate(facts.get("copies", ())):
        both = small[f"{name}copy.{at}"]
        offsets, rows = both.chunk(2)
        found.copies.append((int(copy), _offsets(offsets, n), tuple(rows.tolist()), bits))
    places = [*(found.kept or ()), *(at for block in found.packed for at in block)]
    is_by_head = found.kept_by_head is not None
    is_full = found.kept is None and not is_by_head
    _require(len(places) == len(set(places)), "a row is in two places")
    _require(not (found.packed and (is_full or is_by_head)), "a row is in two places")
    return found


def _check_rows(
    segments: Sequence[LoadedSegment], shapes: Sequence[Shape], layout: KVLayout
) -> None:
    """Compare the shapes of all rows with the layout, and count their bytes.

    Raises:
        ValueError: They differ.
    """
    empty = Storage.of(layout, 0).tensors()
    n_found = dict.fromkeys(range(len(segments)), 0)
    for shape in shapes:
        owner, _, name = shape.name.partition(".")
        if owner == "copy":
            continue
        segment = segments[_index(int(owner), segments)]
        segment.n_bytes += shape.n_bytes
        if name.startswith("rows."):
            model = empty[name.removeprefix("rows.")]
            sizes = list(model.shape)
            sizes[-2] = segment.n_dense
            is_right = shape.dtype == model.dtype and list(shape.sizes) == sizes
            _require(is_right, f"rows {list(shape.sizes)} where {sizes} are expected")
            n_found[segment.number] += 1
    _require(set(n_found.values()) <= {len(empty)}, "a segment has no rows")
    for segment in segments:
        keep = segment.kept_by_head
        if keep is not None:
            heads = {shape.n_kv_heads for shape in layout}
            is_right = keep.dim() == 3 and keep.shape[0] == len(layout)
            is_right = is_right and {keep.shape[1]} == heads and bool((keep >= 0).all())
            _require(is_right and bool((keep <= len(segment.ids)).all()), "heads keep strange rows")


def _check_block(block: PackedBlock, bits: int, layout: KVLayout) -> None:
    _require(block.bits == bits, "a packed block is of other bits")
    for layer, shape in enumerate(layout):
        for at in (0, block.n_rows - 1):
            k, v = block.load(layer, at, at + 1)
            is_right = k.dtype == shape.dtype and k.shape == (shape.n_kv_heads, 1, shape.key_dim)
            is_right = is_right and v.shape == (shape.n_kv_heads, 1, shape.value_dim)
            _require(is_right, "a packed block has rows of another model")


def _offsets(tensor: Tensor, n_tokens: int) -> tuple[int, ...]:
    found = tuple(tensor.tolist())
    is_right = tensor.dtype == torch.int32 and all(a < b for a, b in pairwise(found))
    is_right = is_right and (not found or (found[0] >= 0 and found[-1] < n_tokens))
    _require(is_right, "rows are of tokens that are not there")
    return found


def _index(number: Any, found: Sequence[object]) -> int:
    _require(type(number) is int and 0 <= number < len(found), "a segment is not there")
    return int(number)


def _require(is_right: bool, why: str) -> None:  # noqa: FBT001
    if not is_right:
        raise ValueError(why)
