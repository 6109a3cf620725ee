"""Gives freed host memory back to the operating system; it must not know what was freed."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

TRIM_BYTES = 8 * 2**20
"""Releases smaller than this are left to the allocator: a trim walks the whole heap."""


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The C library's `malloc_trim`, where the process runs on glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl has none
        return None
    return trim


def return_to_system(freed_bytes: int) -> None:
    """Hand the pages of freed tensors back, so that the process' RSS falls with them.

    glibc raises its mmap threshold up to 32 MiB as blocks are freed; smaller tensors then come
    from the heap, whose free pages stay with the process unless it is trimmed.
    """
    trim = _malloc_trim()
    if trim is not None and freed_bytes >= TRIM_BYTES:
        trim(0)
