"""What a pull says while it works, and three ways to show it: bars, log lines, nothing.

It must not know what is being fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a pull stands. Stages of one `text` are the same line, further on."""

    text: str
    done_bytes: int = 0
    total_bytes: int | None = None
    """`None`: how long it takes cannot be counted in bytes."""


Report: TypeAlias = Callable[[Stage], None]
"""Called with each stage, from the thread that pulls."""


def silent(stage: Stage) -> None:
    """Shows nothing."""


class _Lines:
    """One line per stage, through `write`: for logs and for pipes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._text: str | None = None

    def __call__(self, stage: Stage) -> None:
        if stage.text != self._text:
            self._text = stage.text
            self._write(stage.text)


class _Log:
    """Writes to the log. The first line is a warning: what seems to hang has said why."""

    def __init__(self) -> None:
        self._level = logging.WARNING

    def __call__(self, text: str) -> None:
        logger.log(self._level, "%s", text)
        self._level = logging.INFO


class _Bars:
    """One bar per stage on a terminal; nothing is drawn before the first stage."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._text: str | None = None
        self._is_open = False

    def __call__(self, stage: Stage) -> None:
        if not self._is_open:
            self._progress.start()
            self._is_open = True
        if stage.text != self._text:
            self._finish()
            self._text = stage.text
            self._task = self._progress.add_task(stage.text, amount="")
        if self._task is not None:
            self._progress.update(
                self._task,
                completed=stage.done_bytes,
                total=stage.total_bytes,
                amount=_amount(stage),
            )

    def _finish(self) -> None:
        """Mark the running line as done."""
        if self._task is None:
            return
        task = self._progress.tasks[self._progress.task_ids.index(self._task)]
        total = task.total or 1
        self._progress.update(self._task, completed=total, total=total)

    def close(self, *, is_done: bool) -> None:
        """Stop drawing; the lines stay on the screen."""
        if is_done:
            self._finish()
        if self._is_open:
            self._progress.stop()


def _amount(stage: Stage) -> str:
    """`212/478 MB`, or nothing where bytes do not tell."""
    if stage.total_bytes is None:
        return ""
    return f"{stage.done_bytes / 1e6:.0f}/{stage.total_bytes / 1e6:.0f} MB"


@contextmanager
def on_console(console: Console) -> Iterator[Report]:
    """Show stages on a console: bars on a terminal, plain lines elsewhere."""
    if not (console.is_terminal or console.is_jupyter):
        yield _Lines(lambda text: console.print(text, markup=False, highlight=False))
        return
    bars = _Bars(console)
    is_done = False
    try:
        yield bars
        is_done = True
    finally:
        bars.close(is_done=is_done)


@contextmanager
def shown(progress: Report | None) -> Iterator[Report]:
    """The report to use: the one given, else bars where someone looks, else log lines."""
    if progress is not None:
        yield progress
        return
    console = Console(stderr=True)
    if console.is_terminal or console.is_jupyter:
        with on_console(console) as bars:
            yield bars
    else:
        yield _Lines(_Log())
