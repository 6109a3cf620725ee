"""A tree for every example, audited when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.integrity import check_integrity
from tests.kv.archiving import FINGERPRINT, check
from tests.kv.growing import Grove, check_rows, reachable_bytes


@pytest.fixture
def grove() -> Iterator[Grove]:
    """A tree that is audited, down to every row and every storage, when the test ends."""
    grove = Grove()
    yield grove
    check_integrity(grove.tree)
    check_rows(grove)
    assert reachable_bytes(grove.tree) == grove.tree.n_bytes


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Archive]]:
    """Makes archives, which are audited and closed when the test ends."""
    made = []

    def make(cpu_bytes: int = 0, disk_bytes: int = 0) -> Archive:
        made.append(
            Archive(
                fingerprint=FINGERPRINT,
                cpu_bytes=cpu_bytes,
                disk_bytes=disk_bytes,
                folder=tmp_path / "archive" if disk_bytes else None,
            )
        )
        return made[-1]

    yield make
    for archive in made:
        check(archive)
        archive.close()
        check(archive)
    if (tmp_path / "archive").exists():
        assert list((tmp_path / "archive").iterdir()) == []
