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
        _trim_own_arena()
        trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TOUCH_BYTES = 2**17
"""A block that is freed onto the top of a thread's arena, and is not mapped on its own."""


def _trim_own_arena() -> None:
    """Give back the top of this thread's arena, which `malloc_trim` leaves alone.

    glibc gives a thread's top back when a block is freed onto it and it is larger than a
    threshold, which has grown up to 64 MiB by then: lowered for the length of one such free.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block = libc.malloc(_TOUCH_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _TOUCH_BYTES)
    libc.free(block)
    # As high as they grow by themselves, which a first call to `mallopt` ends.
    libc.mallopt(_M_TRIM_THRESHOLD, 2**26)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**25)
