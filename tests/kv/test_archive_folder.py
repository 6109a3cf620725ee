"""A process' folder: private, gone with its process, and never another's to remove."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap

import pytest

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv.archive_folder import ArchiveFolder, remove_abandoned

CHILD = """
    import os, sys, time
    from pathlib import Path
    import torch
    from sidequest_langchain.kv.archive import Archive
    from sidequest_langchain.kv import sealed_file
    root = Path(sys.argv[1])
    archive = Archive(fingerprint={}, disk_bytes=10_000_000, folder=root)
    assert archive.put({"rows": torch.ones(1000)}, {})
"""


def child(root, more, **options):
    """A process with an archive, that does something more with it."""
    program = textwrap.dedent(CHILD) + textwrap.dedent(more)
    return subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True, **options
    )


def test_folders_are_private_and_have_names_of_their_own(tmp_path):
    root = tmp_path / "a" / "archives"
    folders = [ArchiveFolder(root) for _ in range(2)]
    assert folders[0].path != folders[1].path
    for folder in (root, *(f.path for f in folders)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for folder in folders:
        folder.close()
    assert list(root.iterdir()) == []


def test_closing_twice_and_collection_remove_it(tmp_path):
    closed, collected = ArchiveFolder(tmp_path), ArchiveFolder(tmp_path)
    (closed.path / "x").write_text("x")
    closed.close()
    closed.close()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [collected.path.name]
    del collected
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_live_folders_are_left_alone(tmp_path):
    """Neither those of this process, nor those of another one."""
    mine = ArchiveFolder(tmp_path)
    (mine.path / "file").write_text("x")
    process = child(tmp_path, "print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    theirs = [p for p in tmp_path.iterdir() if p.is_dir() and p != mine.path]
    assert len(theirs) == 1
    remove_abandoned(tmp_path)
    assert len(list(theirs[0].iterdir())) == 1
    assert (mine.path / "file").exists()
    process.kill()
    process.communicate()
    remove_abandoned(tmp_path)
    assert not theirs[0].exists()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [mine.path.name]
    mine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "end",
    ["", "sys.exit(3)", "raise RuntimeError", "del archive", "archive.close()"],
)
def test_a_process_that_ends_takes_its_folder_along(tmp_path, end):
    process = child(tmp_path, end, stderr=subprocess.DEVNULL)
    process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_trusted(tmp_path):
    more = """
        def slow(file, block):
            if len(block) > 100:
                print("half", flush=True)
                time.sleep(60)
            return os.write(file, block)
        sealed_file._write = slow
        archive.put({"rows": torch.ones(100_000)}, {})
    """
    process = child(tmp_path, more)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = [p.suffix for folder in tmp_path.iterdir() if folder.is_dir() for p in folder.iterdir()]
    assert sorted(left) == [".safetensors", ".tmp"]  # as found: the test means something
    folder = ArchiveFolder(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {folder.path.name, folder.path.name + ".lock"}
    assert list(folder.path.iterdir()) == []
    folder.close()


def test_a_fork_does_not_remove_its_parents_folder(tmp_path):
    more = """
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        print(len(list(archive._folder.path.iterdir())))
    """
    process = child(tmp_path, more)
    assert process.communicate(timeout=60)[0] == "1\n"
    assert list(tmp_path.iterdir()) == []


def test_what_no_archive_made_is_left_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "notes.txt").write_text("x")
    (root / "archive-of-mine").mkdir()
    (root / ("archive-" + "0" * 32)).symlink_to(outside)
    (root / ("archive-" + "1" * 32 + ".lock")).write_text("")
    (root / ("archive-" + "2" * 32)).mkdir()
    remove_abandoned(root)
    assert sorted(p.name for p in root.iterdir()) == ["archive-of-mine", "notes.txt"]
    assert (outside / "precious").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArchiveError, match=r"file.*cannot be used"):
        ArchiveFolder(tmp_path / "file")
    with pytest.raises(ArchiveError, match="cannot be used"):
        ArchiveFolder(tmp_path / "file" / "below")


def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ArchiveError, match="Permission denied"):
        ArchiveFolder(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
