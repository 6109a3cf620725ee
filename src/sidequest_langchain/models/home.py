"""Where models live on this machine: the folders, the lock, and how one appears there at once.

    <home>/models/<key>/          a finished model directory; it appears by one rename
    <home>/gguf/<key>.gguf        the file it was made from, only where the user asked for it
    <home>/.staging/<key>/<id>/   work in progress, on the same file system; never a model
    <home>/.locks/<key>.lock      held by the one process that makes <key>

It must not know where models come from.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from sidequest_langchain.models.failures import file_errors
from sidequest_langchain.models.progress import Report, Stage


def home() -> Path:
    """The folder of everything kept: `SIDEQUEST_HOME`, else the user's cache."""
    given = os.environ.get("SIDEQUEST_HOME")
    if given:
        return Path(given).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("sidequest-langchain", appauthor=False))


def model_folder(key: str) -> Path:
    """Where the finished model `key` is, or will be."""
    return home() / "models" / key


def kept_gguf(key: str) -> Path:
    """Where the `.gguf` file of `key` is, if the user asked to keep it."""
    return home() / "gguf" / f"{key}.gguf"


@contextmanager
def sole_maker(key: str, progress: Report) -> Iterator[None]:
    """Hold the lock of `key`; says so while another process holds it.

    The operating system drops the lock of a process that dies.

    Raises:
        ModelFilesError: The lock file cannot be made.
    """
    folder = home() / ".locks"
    with file_errors(f"lock {key}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(Stage(text=f"waiting for another process that is making {key}"))
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staging(key: str) -> Iterator[Path]:
    """A fresh folder for work in progress; it is gone afterwards, whatever happened.

    The caller holds the lock of `key`, so what an earlier, killed process left can go too.

    Raises:
        ModelFilesError: The folder cannot be made.
    """
    mine = home() / ".staging" / key
    folder = mine / uuid.uuid4().hex
    with file_errors(f"prepare {key}", folder):
        shutil.rmtree(mine, ignore_errors=True)
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def publish(made: Path, place: Path) -> None:
    """Move a finished file or folder to its place, so that it is there whole or not at all.

    What stood at `place` is moved into the staging folder first, and goes with it.

    Raises:
        ModelFilesError: The disk refused.
    """
    with file_errors(f"put {place.name} in its place", place):
        _sync(made)
        place.parent.mkdir(parents=True, exist_ok=True)
        before = made.with_name(f"{made.name}.before")
        if place.exists():
            place.replace(before)
        try:
            made.replace(place)
        except OSError:
            if before.exists():
                before.replace(place)
            raise
        _sync_entry(place.parent)


def _sync(made: Path) -> None:
    """Bring a file, or a folder and all it holds, to the disk."""
    if made.is_dir():
        for child in made.iterdir():
            _sync(child)
    _sync_entry(made)


def _sync_entry(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder, and need not
        return
    # fsync wants a descriptor that may write on some systems; a folder can only be read
    flags = os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
