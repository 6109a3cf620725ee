"""Every test here has a home of its own, and the fake model's wheels on a shelf."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidequest_langchain.models.catalogue import CatalogueEntry
from tests.models.fakes import Shop, entry_of, write_wheels


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `SIDEQUEST_HOME`."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SIDEQUEST_HOME", str(folder))
    return folder


@pytest.fixture
def entry() -> CatalogueEntry:
    """The fake model, in three parts."""
    return entry_of()


@pytest.fixture
def shop(tmp_path: Path, entry: CatalogueEntry) -> Shop:
    """Has the three wheels of the fake model."""
    write_wheels(tmp_path / "shelf", entry)
    return Shop(tmp_path / "shelf")
