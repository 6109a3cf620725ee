"""A contestant's own process: reads orders on standard input, writes replies, one line each.

    python -m benchmarks.worker CONTESTANT

A process of its own makes peak memory meaningful. It may be of another Python environment, so
that nothing but the standard library is imported before the contestant itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import statistics
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from .contestant import Contestant, Source
from .roster import ROSTER
from .work import Answer, Call, Work, asked

_STATUS = Path("/proc/self/status")
_WARM_UP = Call(turns=({"role": "user", "content": "Name a city."},), max_tokens=2)


def main() -> int:
    """Serve orders until there are no more."""
    # Libraries print: the replies get a descriptor of their own, and the rest goes to the log.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    entry = ROSTER[sys.argv[1]]
    contestant: Contestant | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "load":
                began_s = time.perf_counter()
                module = importlib.import_module(f".{entry.module}", __package__)
                source = Source(**order["source"])
                contestant = getattr(module, entry.factory)(source, order["n_threads"])
                reply = loaded(contestant, entry.packages, time.perf_counter() - began_s)
            elif order["do"] == "prepare":
                assert contestant is not None
                prepare(contestant, Work.from_json(order["work"]))
                reply = {}
            else:
                assert contestant is not None
                reply = run(contestant, Work.from_json(order["work"]))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        _say(replies, reply)
    if contestant is not None:
        with contextlib.suppress(Exception):
            contestant.close()
    return 0


def loaded(contestant: Contestant, packages: tuple[str, ...], load_s: float) -> dict[str, Any]:
    """What is known once the weights are in memory."""
    return {
        "weights": contestant.weights,
        "row_bytes": contestant.row_bytes,
        "load_s": load_s,
        "packages": {name: _version(name) for name in packages},
    }


def prepare(contestant: Contestant, work: Work) -> None:
    """Make ready, and warm up: mapped weights are read from the disk at their first use."""
    contestant.prepare(work)
    contestant.forget()
    contestant.answer([asked(_WARM_UP, [])], is_streamed=work.is_streamed)
    contestant.close_round()


def run(contestant: Contestant, work: Work) -> dict[str, Any]:
    """One round of a workload, measured."""
    contestant.forget()
    before_bytes = reset_peak_rss()
    others = OtherLoad()
    answers: list[Answer] = []
    prompts = []
    began_s = time.perf_counter()
    for step in work.steps:
        calls = [asked(call, answers) for call in step.calls]
        prompts += calls
        answers += contestant.answer(calls, is_streamed=work.is_streamed)
        if step.released:
            contestant.release(step.released)
    wall_s = time.perf_counter() - began_s
    other_load = others.share(wall_s)
    peak_bytes = peak_rss()
    held = contestant.held()
    facts = dict(held.facts)
    find_ids = getattr(contestant, "prompt_ids", None)
    if find_ids is not None:
        ours: Any = importlib.import_module(".ours", __package__)
        trunk, fewest = ours.fewest_tokens([find_ids(call) for call in prompts])
        facts |= {"n_trunk_tokens": trunk, "n_distinct_tokens": fewest}
    contestant.close_round()
    firsts = [a.first_token_s for a in answers if a.first_token_s is not None]
    return {
        "wall_s": wall_s,
        "other_load": other_load,
        "first_token_s": statistics.median(firsts) if firsts else None,
        "n_prompt_tokens": sum(a.n_prompt_tokens for a in answers),
        "n_prefilled_tokens": held.n_prefilled_tokens,
        "n_generated_tokens": sum(a.n_generated_tokens for a in answers),
        "n_kv_rows_apart": sum(a.n_prompt_tokens + a.n_generated_tokens for a in answers),
        "kv_bytes": held.kv_bytes,
        "kv_how": held.kv_how,
        "rss_before_bytes": before_bytes,
        "rss_peak_bytes": peak_bytes,
        "texts": [a.text.strip() for a in answers],
        "facts": facts,
    }


class OtherLoad:
    """How busy the processors are with anything but this process, from now on."""

    def __init__(self) -> None:
        self._before = self._others_s()

    def share(self, wall_s: float) -> float | None:
        """The share of the processors' time that others took; `None`: not to be known."""
        now, before = self._others_s(), self._before
        if now is None or before is None:
            return None
        return max(0.0, now - before) / (wall_s * (os.cpu_count() or 1))

    def _others_s(self) -> float | None:
        try:
            psutil: Any = importlib.import_module("psutil")
        except ImportError:
            return None
        times, mine = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guests' time is part of the users'
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return float(sum(times) - idle - guests - mine.user - mine.system)


def reset_peak_rss() -> int | None:
    """Begin to measure the peak anew; returns what is resident now.

    Linux can; elsewhere the peak is that of the whole process, loading included.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def peak_rss() -> int | None:
    """Most bytes of this process in memory at once."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    try:
        import resource  # noqa: PLC0415
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status_bytes(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
