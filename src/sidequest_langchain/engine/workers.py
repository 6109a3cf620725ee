"""Gives the OpenMP workers of a thread back, so that the engine's thread has the cores to itself.

Every thread that runs a parallel region keeps a team of workers. libgomp lets a team wait for the
next region actively, but once all teams together have more threads than there are cores it puts
them to sleep between two regions, and a step has about a thousand: on two cores a step then takes
twice as long. The thread that loaded a model, or the caller's, is done with its team when the
engine begins. It must not know the engine.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

_SOFT = 1
"""`omp_pause_soft` (OpenMP 5.0, §3.7): what was set stays set; a next region makes a team anew."""


@functools.cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """`omp_pause_resource_all` of every copy of libgomp in this process."""
    if not sys.platform.startswith("linux"):
        return ()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        libraries = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
        return tuple(ctypes.CDLL(path).omp_pause_resource_all for path in sorted(libraries))
    except (OSError, AttributeError, IndexError):  # another OpenMP, which has no need of it
        return ()


def give_workers_back() -> None:
    """End the calling thread's OpenMP workers; it gets new ones when it needs them.

    Does nothing where the thread has none, or is inside of a parallel region.
    """
    for pause in _pauses():
        pause(_SOFT)
