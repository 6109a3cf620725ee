"""Rows that every KV head of every layer keeps for itself: choosing, cutting.

A storage has as many rows for one head as for another, so heads that are left with fewer rows
after a cut are padded: a row whose offset is the segment's `n_tokens`. It must not know the tree.

Paper: Ada-KV, arXiv:2407.11550, §3 (budgets by head; here the counts are equal).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidequest_langchain.kv.layout import KVLayout
from sidequest_langchain.kv.residency import Residency
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.storage import Storage


def rows_of_offsets(segment: Segment, keep: Tensor) -> Tensor:
    """Where in the storage the rows at some offsets are, `[L, H, n]` like `keep`.

    Raises:
        ValueError: A row is not in the storage.
    """
    first, _ = segment.place
    n_tokens = segment.n_tokens
    managed = segment.residency
    if managed is not None and managed.kept_by_head is not None:
        have = managed.kept_by_head
        rows = torch.searchsorted(have.contiguous(), keep.contiguous()).clamp(max=have.shape[2] - 1)
        is_there = have.gather(2, rows) == keep
    else:
        table = torch.full((n_tokens,), -1, dtype=torch.long)
        dense = torch.tensor(range(n_tokens) if managed is None else managed.dense)
        table[dense.long()] = torch.arange(len(dense))
        rows = table[keep]
        is_there = rows >= 0
    if not bool(is_there.all()):
        msg = "a head is to keep a row that is not resident at full precision"
        raise ValueError(msg)
    return rows + first


def check_keep(segment: Segment, keep: Tensor, layout: KVLayout) -> None:
    """Refuse what is no choice of rows by head.

    Raises:
        ValueError: Another shape than `[L, H, n]`, offsets that are unknown, repeated or not
            ascending, or layers that have different numbers of heads.
    """
    heads = {layer.n_kv_heads for layer in layout}
    if len(heads) != 1:
        msg = f"rows by head need layers with one number of KV heads, found {sorted(heads)}"
        raise ValueError(msg)
    if keep.dtype != torch.long or keep.dim() != 3 or keep.shape[:2] != (len(layout), *heads):
        msg = (
            f"the rows to keep are long [{len(layout)}, {min(heads)}, n], found "
            f"{keep.dtype} {list(keep.shape)}"
        )
        raise ValueError(msg)
    if keep.numel() and (int(keep.min()) < 0 or int(keep.max()) >= segment.n_tokens):
        msg = f"offsets are 0 to {segment.n_tokens - 1}, found {keep.min()} to {keep.max()}"
        raise ValueError(msg)
    if not bool((keep[..., 1:] > keep[..., :-1]).all()):
        msg = "the offsets that a head keeps must ascend"
        raise ValueError(msg)


def split(segment: Segment, head: Segment, n_head: int) -> int:
    """Let `head` have the first tokens of a segment whose heads keep rows of their own; exact.

    Returns:
        Bytes of the two new storages.
    """
    managed = segment.residency
    assert managed is not None
    assert managed.kept_by_head is not None
    keep = managed.kept_by_head
    before = (keep < n_head).sum(-1)
    n_rows = int(before.max()) if before.numel() else 0
    of_head = segment.storage.copy(0, n_rows)
    of_rest, keep_rest = _rest(segment, n_head)
    facts, rest_facts = _facts(managed, n_head)
    keep_head = keep[..., :n_rows].clamp(max=n_head).clone()
    head.take_head(segment, n_head, _residency(facts, n_head, keep_head))
    head.move_to(of_head, 0, [])
    segment.forget_head(n_head, None)
    segment.start += n_head
    segment.residency = _residency(rest_facts, segment.n_tokens, keep_rest)
    segment.move_to(of_rest, 0, [])
    return of_head.n_bytes + of_rest.n_bytes


def drop_head(segment: Segment, n_head: int) -> int:
    """Forget the first tokens, which another segment holds now. Returns the change in bytes."""
    managed = segment.residency
    assert managed is not None
    before = segment.n_bytes
    storage, keep = _rest(segment, n_head)
    _, facts = _facts(managed, n_head)
    segment.forget_head(n_head, None)
    segment.start += n_head
    segment.residency = _residency(facts, segment.n_tokens, keep)
    segment.move_to(storage, 0, [])
    return segment.n_bytes - before


def _rest(segment: Segment, n_head: int) -> tuple[Storage, Tensor]:
    """Rows and offsets of what comes after the first `n_head` tokens."""
    keep = segment.kept_by_head
    assert keep is not None
    n_rest = segment.n_tokens - n_head
    before = (keep < n_head).sum(-1, keepdim=True)
    after = (keep < segment.n_tokens).sum(-1, keepdim=True) - before
    n_rows = int(after.max()) if after.numel() else 0
    rows = before + torch.arange(n_rows)
    is_there = rows < keep.shape[2]
    rows = rows.clamp(max=max(keep.shape[2] - 1, 0))
    offsets = torch.where(is_there, keep.gather(2, rows) - n_head, n_rest)
    return segment.storage.gathered_by_head(rows), offsets


def _facts(managed: Residency, n_head: int) -> tuple[Residency | None, Residency | None]:
    """What is hidden and archived on both sides of a cut."""
    shared = Residency(n_tokens=managed.n_tokens, hidden=managed.hidden, archived=managed.archived)
    return shared.split(n_head)


def _residency(facts: Residency | None, n_tokens: int, keep: Tensor) -> Residency | None:
    if n_tokens == 0:
        return None
    return Residency(
        n_tokens=n_tokens,
        hidden=frozenset() if facts is None else facts.hidden,
        archived=() if facts is None else facts.archived,
        kept_by_head=keep,
    )
