"""Gives freed host memory back to the operating system; it must not know what was freed."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

TRIM_BYTES = 2**20
"""Freed bytes that may add up before the heap is trimmed: a trim walks all of it."""

_pending = 0
"""Bytes freed since the last trim, by whichever tree: the heap is the process' own."""


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
    from the heap, whose free pages stay with the process unless it is trimmed. Small releases
    add up: forty of a mebibyte each are given back like one of forty.
    """
    global _pending
    _pending += freed_bytes
    trim = _malloc_trim()
    if trim is not None and _pending >= TRIM_BYTES:
        _pending = 0
        trim(0)
