"""Attention to the parts of managed segments: rows with gaps, packed rows, rows by head.

Packed rows are made readable `LOAD_ROWS` at a time. It must not know a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sidequest_langchain.kv.block_finding import in_place, rows_seen
from sidequest_langchain.kv.blocks import Block, Row, at_offsets
from sidequest_langchain.kv.bunches import Bunch
from sidequest_langchain.kv.features import Features
from sidequest_langchain.kv.partial import Partial, joined
from sidequest_langchain.kv.parts import LOAD_ROWS, Part, RowsByHead
from sidequest_langchain.kv.segment import Segment


def read(
    call: Block | Bunch, layer: int, queries: Tensor, features: Features, partial: Partial
) -> tuple[Tensor, Tensor]:
    """`partial` of some queries over a block, or over all pieces of a bunch as of one block.

    Args:
        call: What is read.
        layer: Which.
        queries: `[H, G * r, D]` of decoding rows, or `[Hq, T, D]` of a chunk.
        features: Scaling and softcap; the window is in the block.
        partial: The device's.
    """
    if isinstance(call, Block) and not call.is_in_place:
        return _read_loaded(call, layer, queries, features, partial)
    k, v = call.load(layer)
    return partial(queries, k, v, scaling=features.scaling, softcap=features.softcap)


def _read_loaded(
    block: Block, layer: int, queries: Tensor, features: Features, partial: Partial
) -> tuple[Tensor, Tensor]:
    """`read` of a block of whose rows heads see different ones."""
    assert block.part is not None
    found = []
    for first, last in _pieces(block.part, block.first, block.last):
        k, v = block.part.load(layer, first, last)
        found.append(
            partial(
                queries,
                k,
                v,
                scaling=features.scaling,
                visible=block.seen(layer, first, last, queries.device),
                softcap=features.softcap,
            )
        )
    return joined(found)


def read_apart(
    bunch: Bunch, layer: int, queries: Tensor, features: Features, partial: Partial
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`read` of a bunch, and the log-sum-exp over each piece, fp32 `[H, G * r]`.

    A piece whose share of the bunch is too small for fp32 (less than 1e-38) gets -inf.
    """
    if len(bunch.pieces) == 1:
        out, lse = read(bunch, layer, queries, features, partial)
        return out, lse, [lse]
    k, v = bunch.load(layer)
    scores = torch.matmul(queries * features.scaling, k.transpose(1, 2)).float()
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    most = scores.amax(-1, keepdim=True)
    weights = scores.sub_(most).exp_()
    sums = torch.matmul(weights, bunch.members(queries.device))
    total = sums.sum(-1, keepdim=True)
    out = torch.matmul((weights / total).to(v.dtype), v)
    return out, (total.log() + most).squeeze(-1), list((sums.log() + most).unbind(-1))


def read_segment(
    segment: Segment,
    parts: Sequence[Part],
    row: Row,
    limit: int | None,
    layer: int,
    q: Tensor,
    features: Features,
    partial: Partial,
) -> list[tuple[Tensor, Tensor]]:
    """`partial` of a prefilling row's chunk over every piece of a segment that it sees.

    Args:
        segment: On the row's path.
        parts: How it is read.
        row: Whose chunk.
        limit: Position from which on it sees nothing stored.
        layer: Which.
        q: `[Hq, T, D]`.
        features: What the layer asks for.
        partial: The device's.
    """
    window = features.window
    low = 0 if window is None else row.position - window + 1 - segment.start
    high = segment.n_tokens if limit is None else limit - segment.start
    found = []
    for part in parts:
        seen = rows_seen(part, low, high)
        if seen is None:
            continue
        for first, last in _pieces(part, *seen[:2]):
            visible = _visible(part, segment, row, window, (first, last), seen[2:], layer, q.device)
            k, v = part.load(layer, first, last)
            found.append(
                partial(
                    q, k, v, scaling=features.scaling, visible=visible, softcap=features.softcap
                )
            )
    return found


def _pieces(part: Part, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Rows to read at once: all that lie in a storage, else a few that must be loaded."""
    if in_place(part, first, last) is not None:
        yield first, last
        return
    # At whole multiples, so that groups of packed rows are read once.
    at = first
    while at < last:
        end = min(last, (at // LOAD_ROWS + 1) * LOAD_ROWS)
        yield at, end
        at = end


def _visible(
    part: Part,
    segment: Segment,
    row: Row,
    window: int | None,
    piece: tuple[int, int],
    sight: tuple[int | None, int],
    layer: int,
    device: torch.device,
) -> Tensor | None:
    """Which rows of a piece the chunk's queries see: `[T, S]`, by head `[H, T, S]`; `None`: all."""
    first, last = piece
    low, high = sight
    # Offset of the oldest token that the last query sees; those before it see more.
    newest = 0 if window is None else row.position + row.n_new - window - segment.start
    seen: Tensor | None = None
    if isinstance(part, RowsByHead):
        if low is None and newest <= 0:
            return None
        at = part.keep[layer, :, first:last].to(device).unsqueeze(1)  # [H, 1, S]
        if low is not None:
            seen = part.seen(layer, low, high, device)[:, None, first:last]
    else:
        if newest <= (first if part.offsets is None else part.offsets[first]):
            return None
        at = at_offsets(part, first, last, device).unsqueeze(0)  # [1, S]
    if window is None:
        return seen
    queries = torch.arange(row.position, row.position + row.n_new, device=device).unsqueeze(1)
    in_window = at > queries - window - segment.start
    return in_window if seen is None else in_window & seen
