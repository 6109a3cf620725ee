"""The tokens of a segment, their kinds, and where the rows of each are.

It must not know a tree or a storage.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.residency import Archived, Residency


class Tokens:
    """Token ids with what is known of each."""

    __slots__ = ("kinds", "residency", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.kinds = bytearray()
        """The `TokenKind` of every token."""
        self.residency: Residency | None = None
        """`None` while every token has a row in the storage and attention sees it."""

    @property
    def n_tokens(self) -> int:
        """Its tokens, those whose rows left included."""
        return len(self.token_ids)

    @property
    def n_rows(self) -> int:
        """Rows of K/V that are valid in the storage, at full precision."""
        managed = self.residency
        return len(self.token_ids) if managed is None else managed.n_dense

    @property
    def n_resident(self) -> int:
        """Rows that are resident, packed ones included."""
        managed = self.residency
        return len(self.token_ids) if managed is None else managed.n_dense + managed.n_packed

    @property
    def kept(self) -> tuple[int, ...] | None:
        """Offsets of the storage's rows; `None` is every token."""
        return None if self.residency is None else self.residency.kept

    @property
    def packed(self) -> tuple[PackedBlock, ...]:
        """Rows at lower precision."""
        return () if self.residency is None else self.residency.packed

    @property
    def hidden(self) -> frozenset[int]:
        """Offsets that attention does not see, though their rows stay."""
        return frozenset() if self.residency is None else self.residency.hidden

    @property
    def archived(self) -> tuple[Archived, ...]:
        """Where copies of rows are."""
        return () if self.residency is None else self.residency.archived

    @property
    def kept_by_head(self) -> Tensor | None:
        """Offsets of the storage's rows by layer and KV head, `[L, H, n]`."""
        return None if self.residency is None else self.residency.kept_by_head

    @property
    def n_packed_bytes(self) -> int:
        """Bytes of its rows at lower precision."""
        return 0 if self.residency is None else self.residency.n_packed_bytes

    def extend(self, ids: Sequence[int], kinds: Sequence[int] | None = None) -> None:
        """Count tokens whose rows were written; their kinds are `OTHER` unless given."""
        self.token_ids.extend(ids)
        self.kinds.extend(bytes((TokenKind.OTHER,)) * len(ids) if kinds is None else kinds)

    def split_residency(self, n_head: int) -> tuple[Residency | None, Residency | None]:
        """Where the rows of the first `n_head` tokens are, and those of the others."""
        return (None, None) if self.residency is None else self.residency.split(n_head)

    def n_rows_before(self, offset: int) -> int:
        """Rows of the storage that belong to tokens before `offset`."""
        return offset if self.residency is None else self.residency.n_dense_before(offset)

    def forget_head(self, n_head: int, residency: Residency | None) -> None:
        """Let the first `n_head` tokens be another's."""
        del self.token_ids[:n_head], self.kinds[:n_head]
        self.residency = residency

    def take_head(self, source: Tokens, n_head: int, residency: Residency | None) -> None:
        """Have the first `n_head` tokens of `source`; its rows come by themselves."""
        self.token_ids, self.kinds = source.token_ids[:n_head], source.kinds[:n_head]
        self.residency = residency

    def take_before(self, source: Tokens) -> None:
        """Have the tokens of `source` before its own; where the rows are comes by itself."""
        self.token_ids = source.token_ids + self.token_ids
        self.kinds = source.kinds + self.kinds
