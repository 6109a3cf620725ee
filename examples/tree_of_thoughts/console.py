"""Shows a run while it happens: a live tree on a terminal, plain lines elsewhere, or nothing.

It must not know how runs are made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text
from rich.tree import Tree

from .asking import CallRecord
from .planner import Release, Run, Watcher
from .problem import TripProblem
from .tables import summary
from .thought import ROOT, Thought, children_of

_STYLES = {"new": "dim", "live": "cyan", "pruned": "yellow", "dead": "red", "done": "bold green"}
_HEARTBEAT_S = 2.0
_READS = "the model reads the problem"
_BEGINNINGS = {"beam": _READS, "dfs": _READS, "cot": "the model writes a whole plan"}


def watcher_for(console: Console, *, is_quiet: bool) -> Watcher:
    """The way to show a run that suits the console."""
    if is_quiet:
        return Silent()
    return LiveTree(console) if console.is_terminal else Lines(console)


class Silent:
    """Shows nothing."""

    def begin(self, problem: TripProblem, method: str) -> None: ...
    def call(self, record: CallRecord) -> None: ...
    def tree(self, nodes: Mapping[str, Thought], resident: Mapping[str, int]) -> None: ...
    def release(self, release: Release) -> None: ...
    def replaying(self, n_done: int, n_calls: int) -> None: ...
    def end(self, run: Run) -> None: ...


class Lines(Silent):
    """One line for each thing that happened: for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, tuple[str, float | None]] = {}
        self._tokens: dict[str, int] = {}
        self._said_s = time.monotonic()
        self._n_calls = 0

    def begin(self, problem: TripProblem, method: str) -> None:
        self._shown, self._tokens, self._n_calls = {}, {}, 0
        self._say(f"{problem.name}, {method}: {_BEGINNINGS[method]}")

    def call(self, record: CallRecord) -> None:
        _count(self._tokens, record)
        self._n_calls += 1
        if time.monotonic() - self._said_s > _HEARTBEAT_S:
            self._say(f"  ... {self._n_calls} replies")

    def tree(self, nodes: Mapping[str, Thought], resident: Mapping[str, int]) -> None:
        for thought in nodes.values():
            facts = (thought.status, thought.score)
            if thought.status != "new" and self._shown.get(thought.id) != facts:
                self._shown[thought.id] = facts
                self._say(f"  {_line(thought, self._tokens, resident, thought.id).plain}")

    def release(self, release: Release) -> None:
        self._say(f"  {release.reason}: {decimal(release.n_bytes)} freed, {release.thought}")

    def replaying(self, n_done: int, n_calls: int) -> None:
        if time.monotonic() - self._said_s > _HEARTBEAT_S or n_done == n_calls:
            self._say(f"  the same calls with nothing released: {n_done} of {n_calls}")

    def end(self, run: Run) -> None:
        self._console.print(summary(run))

    def _say(self, line: str) -> None:
        self._said_s = time.monotonic()
        self._console.print(Text(line), overflow="ellipsis", no_wrap=True)


class LiveTree(Silent):
    """The tree growing in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._began_s = 0.0
        self._title, self._note = "", ""
        self._nodes: Mapping[str, Thought] = {}
        self._resident: Mapping[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._n_calls = 0
        self._spinner = Spinner("dots")

    def begin(self, problem: TripProblem, method: str) -> None:
        self._nodes, self._resident, self._tokens, self._n_calls = {}, {}, {}, 0
        self._title, self._note = f"{problem.name}, {method}", _BEGINNINGS[method]
        self._began_s = time.monotonic()
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=8,
            vertical_overflow="visible",
        )
        self._live.start()

    def call(self, record: CallRecord) -> None:
        with self._lock:
            _count(self._tokens, record)
            self._n_calls += 1
            self._note = f"{self._n_calls} replies"

    def tree(self, nodes: Mapping[str, Thought], resident: Mapping[str, int]) -> None:
        with self._lock:
            self._nodes, self._resident = nodes, resident

    def release(self, release: Release) -> None:
        with self._lock:
            self._note = f"{release.reason}: {decimal(release.n_bytes)} freed"

    def replaying(self, n_done: int, n_calls: int) -> None:
        with self._lock:
            self._note = f"the same calls with nothing released: {n_done} of {n_calls}"

    def end(self, run: Run) -> None:
        self.stop()
        self._console.print(summary(run))

    def stop(self) -> None:
        """Leave the terminal as it was; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _picture(self) -> Group:
        with self._lock:
            now_s = time.monotonic() - self._began_s
            self._spinner.update(text=Text(f"{self._title}: {self._note}, {now_s:.0f} s"))
            if ROOT not in self._nodes:
                return Group(self._spinner)
            drawn = tree_of(self._nodes, self._tokens, self._resident)
            return Group(drawn, self._spinner)


@contextmanager
def shown(watcher: Watcher) -> Iterator[Watcher]:
    """Leaves the terminal as it was, whatever happens."""
    try:
        yield watcher
    finally:
        if isinstance(watcher, LiveTree):
            watcher.stop()


def tree_of(
    nodes: Mapping[str, Thought], tokens: Mapping[str, int], resident: Mapping[str, int]
) -> Tree:
    """The tree of thoughts as rich draws it."""
    drawn = {ROOT: Tree(_line(nodes[ROOT], tokens, resident, ROOT))}
    waiting = [ROOT]
    while waiting:
        above = waiting.pop(0)
        for child in children_of(dict(nodes), above):
            label = _line(child, tokens, resident, child.city or child.id)
            drawn[child.id] = drawn[above].add(label)
            waiting.append(child.id)
    return drawn[ROOT]


def _line(
    thought: Thought, tokens: Mapping[str, int], resident: Mapping[str, int], name: str
) -> Text:
    score = "" if thought.score is None else f" {thought.score:.2f}"
    kv = resident.get(thought.id, 0)
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append(f"{thought.status:<6}", style=_STYLES[thought.status])
    text.append(f" {name}")
    text.append(score, style="bold")
    text.append(f" {tokens.get(thought.id, 0)} tok", style="dim")
    text.append(f" {decimal(kv)}" if kv else " no KV", style="dim")
    if thought.reason and thought.status == "dead":
        text.append(f" {thought.reason}", style="dim red")
    return text


def _count(tokens: dict[str, int], record: CallRecord) -> None:
    n = record.n_prefilled_tokens + record.n_generated_tokens
    tokens[record.thought] = tokens.get(record.thought, 0) + n
