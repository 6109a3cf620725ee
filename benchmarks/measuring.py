"""Runs workloads on contestants: every round gives each its turn, and only one works at a time.

It must not know how figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .contestant import Source
from .work import Work
from .workers import Worker, WorkerDied, WorkerError

Round: TypeAlias = dict[str, Any]
"""What `worker.run` tells of one round."""
NOISY = 0.05
"""Share of the processors' time: if others take more, it is said."""
Progress: TypeAlias = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Measured:
    """All rounds of one workload."""

    work: Work
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    """By contestant; those that failed are not here."""
    failed: dict[str, str] = field(default_factory=dict)
    """What went wrong, by contestant."""


def _noise(found: Round) -> str:
    load = found.get("other_load")
    return f"; others took {load:.0%} of the processors" if load and load > NOISY else ""


class Field:
    """The contestants that are up, each with its model loaded.

    Args:
        names: Who takes part.
        start: Starts the worker of a contestant.
        progress: Hears what is done now.
    """

    def __init__(
        self, names: Sequence[str], start: Callable[[str], Worker], progress: Progress
    ) -> None:
        self._start = start
        self._progress = progress
        self._workers: dict[str, Worker] = {}
        self._names = tuple(names)
        self.loaded: dict[str, dict[str, Any]] = {}
        """What each said when it had loaded."""
        self.failed: dict[str, str] = {}
        """Who could not load, or died; nothing more is asked of them."""

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def load(self, source: Source, n_threads: int) -> None:
        """Start everybody, one after the other."""
        for name in self._names:
            self._progress(f"{name}: loading {source.name}")
            worker = self._workers[name] = self._start(name)
            try:
                reply = worker.ask(do="load", source=source.to_json(), n_threads=n_threads)
                self.loaded[name] = reply
            except WorkerError as error:
                self._drop(name, f"could not load: {error}")

    def measure(self, work: Work, n_rounds: int) -> Measured:
        """Let everybody do the work `n_rounds` times, in turn."""
        measured = Measured(work=work)
        values = work.to_json()
        for name in tuple(self._workers):
            self._ask(name, measured, do="prepare", work=values)
        for i in range(n_rounds):
            for name in tuple(self._workers):
                if name in measured.failed:
                    continue
                self._progress(f"{work.name}: round {i + 1} of {n_rounds}, {name}")
                found = self._ask(name, measured, do="run", work=values)
                if found is not None:
                    measured.rounds.setdefault(name, []).append(found)
                    self._progress(
                        f"{work.name}: {name} took {found['wall_s']:.1f} s{_noise(found)}"
                    )
        for name in measured.failed:
            measured.rounds.pop(name, None)
        return measured

    def _ask(self, name: str, measured: Measured, **order: Any) -> Round | None:
        try:
            return self._workers[name].ask(**order)
        except WorkerError as error:
            measured.failed[name] = str(error)
            self._progress(f"{measured.work.name}: {name} failed: {error}")
            if isinstance(error, WorkerDied):
                self._drop(name, f"died at {measured.work.name}: {error}")
            return None

    def _drop(self, name: str, why: str) -> None:
        self.failed[name] = why
        self._workers.pop(name).close()
        self._progress(f"{name}: {why}")
