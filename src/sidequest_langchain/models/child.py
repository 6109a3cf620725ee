"""Runs one child process to its end, and never leaves it behind.

It must not know what the child does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TICK_S = 0.2
_GRACE_S = 5.0


def run_child(
    arguments: Sequence[str],
    log: Path,
    *,
    on_tick: Callable[[], None],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run this Python with `arguments`; all that the child says goes to the file `log`.

    The child's standard input is a pipe that is never written: it closes when this process
    dies, which the child may watch. The child is ended if this call is left early.

    Args:
        arguments: What follows the interpreter on the command line.
        log: File for the child's output.
        on_tick: Called a few times a second while the child runs.
        environment: Variables added to this process's own.

    Returns:
        The exit status; negative if a signal ended the child.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            while True:
                try:
                    return child.wait(timeout=_TICK_S)
                except subprocess.TimeoutExpired:
                    on_tick()
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        child.stdin.close()
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
