"""Times the steps of several engines in turn, one step of each after another.

Figures of runs that follow one another differ by the machine's mood, which lasts for seconds; steps
that follow one another do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest
from sidequest_langchain.engine.workers import give_workers_back

PATIENCE_S = 120.0


class InTurn:
    """Holds engines at a step boundary; their steps run in the thread that asks for them."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        self._go = threading.Event()

    def __enter__(self) -> InTurn:
        try:
            for name, engine in self._engines.items():
                is_there = threading.Event()

                def hold(is_there: threading.Event = is_there) -> None:
                    give_workers_back()  # else every region of ours would wait for cores that spin
                    is_there.set()
                    self._go.wait()

                engine._core.call(hold)
                if not is_there.wait(PATIENCE_S):
                    msg = f"the engine {name!r} does not come to the end of a step"
                    raise TimeoutError(msg)
        except BaseException:
            self._go.set()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._go.set()

    def seconds(
        self,
        make: Callable[[], GenerationRequest],
        n_steps: int,
        told: Callable[[], object] = lambda: None,
    ) -> dict[str, list[float]]:
        """What each of `n_steps` steps took, by engine; the first, which begins, is left out.

        Args:
            make: A request for one engine; it must take a step more.
            n_steps: How many.
            told: Called after each step of all.
        """
        names = list(self._engines)
        for name in names:
            core = self._engines[name]._core
            self._engines[name].submit(make(), lambda event: None)
            core._read_inbox(is_idle=False)
            core._step()
        found: dict[str, list[float]] = {name: [] for name in names}
        for i in range(n_steps):
            for j in range(len(names)):  # each is the first one as often as the others
                name = names[(i + j) % len(names)]
                core = self._engines[name]._core
                before, begun = core.counters.n_steps, time.perf_counter()
                core._step()
                found[name].append(time.perf_counter() - begun)
                if core.counters.n_steps == before:
                    msg = f"the engine {name!r} had nothing to do in step {i}, or failed in it"
                    raise RuntimeError(msg)
            told()
        return found
