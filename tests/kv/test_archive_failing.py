"""What an archive refuses, and what it does when the disk, the memory or a file fails it."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv import sealed_file
from sidequest_langchain.kv.archive import Archive
from tests.kv.archiving import FINGERPRINT, KB, check, rows


@pytest.mark.parametrize("tier", [{"cpu_bytes": 10 * KB}, {"disk_bytes": 10 * KB}])
@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({**FINGERPRINT, "model": "m2"}, "made with model 'm1', but it is 'm2' now"),
        ({**FINGERPRINT, "adapter": "lora"}, "made with adapter 'none', but it is 'lora' now"),
        ({**FINGERPRINT, "rope": "yarn"}, "made with rope None, but it is 'yarn' now"),
        ({"model": "m1", "dtype": "float32"}, "made with adapter 'none', but it is None now"),
    ],
)
def test_rows_of_another_model_are_refused(opened, tier, now, why):
    archive = opened(**tier)
    ticket = archive.put(rows(1), {})
    archive.fingerprint = now
    with pytest.raises(ArchiveError, match=why):
        archive.get(ticket)
    assert not archive.has(ticket)
    again = archive.put(rows(1), {})
    assert torch.equal(archive.get(again)[0]["rows"], rows(1)["rows"])
    assert archive.fingerprint == now


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty", "gone", "swapped", "link"])
def test_a_damaged_copy_is_refused_and_dropped(opened, tmp_path, damage):
    archive = opened(disk_bytes=20 * KB)
    ticket, other = archive.put(rows(1), {}), archive.put(rows(2), {})
    path, swapped = (archive._path(t.key) for t in (ticket, other))
    raw = path.read_bytes()
    outside = tmp_path / "outside"
    outside.write_bytes(raw)
    if damage == "link":
        path.unlink()
        path.symlink_to(outside)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {
                "flip": raw[:-1] + b"\1",
                "cut": raw[:-8],
                "longer": raw + b"\0",
                "empty": b"",
                "swapped": swapped.read_bytes(),
            }[damage]
        )
    with pytest.raises(ArchiveError, match="not restored"):
        archive.get(ticket)
    assert not archive.has(ticket)
    assert not path.exists()
    assert outside.read_bytes() == raw
    assert torch.equal(archive.get(other)[0]["rows"], rows(2)["rows"])
    check(archive)


def test_settings_that_contradict_are_refused(tmp_path):
    with pytest.raises(ValueError, match="need a folder"):
        Archive(fingerprint={}, disk_bytes=1)
    with pytest.raises(ValueError, match="negative"):
        Archive(fingerprint={}, cpu_bytes=-1)
    with pytest.raises(ValueError, match="complex"):
        Archive(fingerprint={}, cpu_bytes=99).put({"x": torch.ones(1, dtype=torch.cfloat)}, {})


def test_after_closing_there_is_nothing(opened):
    archive = opened(cpu_bytes=5 * KB, disk_bytes=10 * KB)
    tickets = [archive.put(rows(seed), {}) for seed in range(2)]
    archive.close()
    archive.close()
    assert (archive.n_cpu_bytes, archive.n_disk_bytes, archive.n_entries) == (0, 0, 0)
    assert not any(archive.has(ticket) for ticket in tickets)
    assert archive.put(rows(1), {}) is None
    for ticket in tickets:
        archive.drop(ticket)
        with pytest.raises(ArchiveError):
            archive.get(ticket)


# ---- failing disks and memory


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
def test_a_full_disk_refuses_and_loses_nothing(opened, monkeypatch, call):
    archive = opened(cpu_bytes=5 * KB, disk_bytes=100 * KB)
    on_disk, in_memory = archive.put(rows(0), {}), archive.put(rows(1), {})
    source = rows(2)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealed_file.os, call, full)
        assert archive.put(source, {}) is None  # the oldest in memory cannot leave it
        assert archive.put(rows(3, 20 * KB), {}) is None  # straight to disk
        check(archive)
    assert torch.equal(source["rows"], rows(2)["rows"])
    for seed, ticket in enumerate((on_disk, in_memory)):
        assert torch.equal(archive.get(ticket)[0]["rows"], rows(seed)["rows"])
    assert archive.put(source, {})  # and once there is room again
    assert archive.n_entries == 3


def test_a_folder_that_vanished_refuses(opened):
    archive = opened(disk_bytes=100 * KB)
    os.rmdir(archive._folder.path)
    assert archive.put(rows(1), {}) is None


def test_no_memory_for_a_copy_is_as_if_not_asked(opened, monkeypatch):
    archive = opened(cpu_bytes=10 * KB)
    first = archive.put(rows(1), {})

    def exhausted(*args, **kwargs):
        msg = "DefaultCPUAllocator: not enough memory"
        raise RuntimeError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", exhausted)
        with pytest.raises(RuntimeError, match="not enough memory"):
            archive.put(rows(2), {})
    check(archive)
    assert archive.has(first)
