"""Contestants' processes, as the process that measures sees them.

It must not know what is measured. A worker that dies or hangs is an error of its own, never a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_ABOVE = Path(__file__).resolve().parents[1]
"""The folder that this package lies in."""
PATIENCE_S = 1800.0
"""How long one order may take."""


class WorkerError(Exception):
    """A contestant could not do what it was asked; the text says why."""


class WorkerDied(WorkerError):
    """A contestant's process is gone: nothing more can be asked of it."""


class Worker:
    """One contestant in a process of its own."""

    def __init__(
        self,
        name: str,
        *,
        python: str = sys.executable,
        command: Sequence[str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name = name
        self._patience_s = patience_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        self._process = subprocess.Popen(
            list(command or (python, "-m", f"{__package__.rsplit('.')[-1]}.worker", name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=_environment(),
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name=f"bench-{name}").start()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order and wait for the reply.

        Raises:
            WorkerError: The contestant failed, and says how.
            WorkerDied: Its process ended, or was ended because it took too long.
        """
        assert self._process.stdin is not None
        self._wake()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=self._patience_s)
        except (BrokenPipeError, ValueError):
            line = ""
        except queue.Empty:
            self.close()
            msg = f"no answer within {self._patience_s:.0f} s; it was ended"
            raise WorkerDied(msg) from None
        if not line:
            raise WorkerDied(self._obituary())
        self._rest()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process. Idempotent."""
        self._wake()
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError, ValueError):
            self._log.close()

    def _rest(self) -> None:
        """Stop the process between orders: threads that wait by spinning would cost the others."""
        self._signal("SIGSTOP")

    def _wake(self) -> None:
        self._signal("SIGCONT")

    def _signal(self, name: str) -> None:
        number = getattr(signal, name, None)  # not on Windows
        if number is not None:
            with contextlib.suppress(OSError):
                self._process.send_signal(number)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        status = self._process.poll()
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        try:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            said = []
        last = f"; its last words: {said[-1].strip()}" if said else ""
        return f"the process ended with {how}{last}"


def _environment() -> dict[str, str]:
    """Without the network, without notes, and with this package on the path."""
    paths = [str(_ABOVE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "LANGSMITH_TRACING": "false",
    }
