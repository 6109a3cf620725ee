"""The folder that one archive of one process writes to, gone with it; it must not know its files.

A folder has a lock beside it, held as long as its process lives: the system lets go of it however
the process ends. Whoever starts next removes the folders that nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import weakref
from pathlib import Path

from filelock import FileLock, Timeout

from sidequest_langchain.errors import ArchiveError

_NAME = re.compile(r"archive-[0-9a-f]{32}")
_LOCK = ".lock"


class ArchiveFolder:
    """A new folder of this process, `0700`, under a name that nobody can guess.

    Removed by `close()`, when it is collected, and when the process ends.
    """

    def __init__(self, root: Path) -> None:
        """Make it, after removing what processes that ended left behind.

        Args:
            root: Where archives lie; made (`0700`) if it is not there.

        Raises:
            ArchiveError: Nothing can be written there.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_abandoned(root)
            self.path, lock = _new(root)
        except (OSError, NotImplementedError) as error:  # the latter: no locks on that disk
            msg = f"the archive folder {root} cannot be used: {error}"
            raise ArchiveError(msg) from error
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        """Remove the folder and all in it; may be called twice."""


def remove_abandoned(root: Path) -> None:
    """Remove folders, and locks, whose process ended without doing so.

    Those of a live process are locked, and are left alone; so is all that no archive has made.
    """
    names = {entry.name.removesuffix(_LOCK) for entry in os.scandir(root)}
    for name in filter(_NAME.fullmatch, names):
        with contextlib.suppress(OSError, Timeout):
            lock = _lock_of(root / name)
            lock.acquire(timeout=0)
            _remove(root / name, lock, os.getpid())


def _new(root: Path) -> tuple[Path, FileLock]:
    while True:
        path = root / f"archive-{secrets.token_hex(16)}"
        lock = _lock_of(path)
        # Locked before there is a folder: one without a held lock is never one of a live process.
        lock.acquire(timeout=0)
        if Path(lock.lock_file).exists():  # not removed, as abandoned, just before it was locked
            break
        lock.release()
    try:
        path.mkdir(mode=0o700)
    except OSError:
        _remove(path, lock, os.getpid())
        raise
    return path, lock


def _lock_of(path: Path) -> FileLock:
    # Any thread may let go of it: collection happens in whichever there is.
    return FileLock(path.with_name(path.name + _LOCK), mode=0o600, thread_local=False)


def _remove(path: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process has no say
        return
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # where a locked file cannot be removed, the next start does
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()
