"""Turns what the file system says into one clear error about a model's files.

It must not know what is being fetched, or why.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sidequest_langchain.errors import ModelFilesError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def file_errors(doing: str, where: Path) -> Iterator[None]:
    """Translate any `OSError` of the block.

    Args:
        doing: What the block does, to be read after "could not".
        where: The file or folder it works on.

    Raises:
        ModelFilesError: The block raised an `OSError`; its message says what to do.
    """
    try:
        yield
    except ModelFilesError:
        raise
    except OSError as error:
        msg = f"could not {doing}: {_explained(error, where)}"
        raise ModelFilesError(msg) from error


def _explained(error: OSError, where: Path) -> str:
    if error.errno in _FULL:
        return no_space(where)
    if error.errno in _REFUSED:
        return (
            f"{where} cannot be written ({error.strerror}); make it writable, or set "
            "SIDEQUEST_HOME to a folder that is"
        )
    return f"{error} (at {where})"


def no_space(where: Path) -> str:
    """Says that the disk is full, how full, and what to do."""
    return (
        f"no space left on the disk of {where} ({in_units(free_bytes(where))} free); free some, "
        "or set SIDEQUEST_HOME to a folder on a larger disk"
    )


def require_space(needed_bytes: int, where: Path, what: str) -> None:
    """Check the room before anything is fetched.

    Raises:
        ModelFilesError: Less than `needed_bytes` are free at `where`.
    """
    free = free_bytes(where)
    if free < needed_bytes:
        msg = (
            f"{what} needs {in_units(needed_bytes)} of disk while it is made, but {where} has "
            f"{in_units(free)} free; free some, or set SIDEQUEST_HOME to a folder on a larger disk"
        )
        raise ModelFilesError(msg)


def free_bytes(where: Path) -> int:
    """Free bytes on the disk that holds `where`, or will hold it once it is made."""
    existing = next((p for p in (where, *where.parents) if p.exists()), Path())
    return shutil.disk_usage(existing).free


def in_units(n_bytes: int) -> str:
    """A size as people write it: `2.5 GB`."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
