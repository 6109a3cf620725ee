"""A tree for every example, audited when the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidequest_langchain.kv.integrity import check_integrity
from tests.kv.growing import Grove, check_rows, reachable_bytes


@pytest.fixture
def grove() -> Iterator[Grove]:
    """A tree that is audited, down to every row and every storage, when the test ends."""
    grove = Grove()
    yield grove
    check_integrity(grove.tree)
    check_rows(grove)
    assert reachable_bytes(grove.tree) == grove.tree.n_bytes
