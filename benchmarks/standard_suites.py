"""LangChain's standard suites for chat models over this package and its peers, on the same weights.

    python -m benchmarks.standard_suites --model qwen2.5-coder-0.5b
    python -m benchmarks.standard_suites --contestants ours --failures
    python -m benchmarks.standard_suites --from runs.jsonl --docs README.md

Each contestant is tested by pytest in a process of its own. Where that process dies, the test that
ran counts as crashed, and the others go on in a new process. The last line of the output is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sidequest_langchain.evaluation.pages import write_between
from sidequest_langchain.models.catalogue import DEFAULT_MODEL

from .lineup import source_of, why_absent
from .machine import describe

CONTESTANTS = {
    "ours": "SideQuestChatModel",
    "chathf": "ChatHuggingFace",
    "llamacpp": "ChatLlamaCpp",
}
CASES = Path(__file__).with_name("suite_cases.py")
SUITES = {"TestUnit": "unit", "TestIntegration": "integration"}
OUTCOMES = ("passed", "failed", "skipped", "crashed")
_MOST_CRASHES = 20
_INI = "[pytest]\nasyncio_mode = auto\nmarkers =\n    benchmark: measures time\n"


class SuiteError(Exception):
    """The tests could not be run at all; the text says why."""


@dataclass(slots=True)
class Outcomes:
    """What became of each test of one contestant."""

    by_test: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    """What was said of those that did not pass."""

    def counts(self, suite: str | None = None) -> dict[str, int]:
        """How many passed, failed, were skipped, crashed; of one suite, or of all."""
        found = [what for test, what in self.by_test.items() if suite in (None, suite_of(test))]
        return {outcome: found.count(outcome) for outcome in OUTCOMES}

    def take(self, events: Sequence[Mapping[str, Any]]) -> set[str]:
        """Add what a process noted; a test that began and did not end has crashed.

        Returns:
            All tests that there are.
        """
        tests: set[str] = set()
        running: str | None = None
        for event in events:
            kind, test = event["event"], event.get("test", "")
            if kind == "found":
                tests.update(event["tests"])
            elif kind == "began":
                running = test
            else:
                self._note(test, kind, event.get("why", ""))
                running = None if running == test else running
        if running is not None and running not in self.by_test:
            self._note(running, "crashed", "its process ended")
        return tests

    def _note(self, test: str, outcome: str, why: str) -> None:
        # What fails after a test has passed fails the test.
        if self.by_test.get(test, "passed") == "passed" or outcome == "crashed":
            self.by_test[test] = outcome
            if outcome != "passed":
                self.why[test] = why


def suite_of(test: str) -> str:
    """The suite that a test is of, by its class."""
    name = test.split("::")[1] if "::" in test else ""
    return SUITES.get(name, name)


def events_of(log: Path) -> list[dict[str, Any]]:
    """What a process noted; a line that it did not finish is left out."""
    events = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def run(
    environment: Mapping[str, str], *, cases: Path = CASES, patience_s: float = 600.0
) -> Outcomes:
    """Run the tests of `cases`, in as many processes as it takes.

    Args:
        environment: What the tests need to be told.
        cases: A file of tests.
        patience_s: How long one test may take before its process is ended.

    Raises:
        SuiteError: Not a single test was found, or processes die without end.
    """
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory(prefix="sidequest-suites-") as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text(_INI, encoding="utf-8")
        for attempt in range(_MOST_CRASHES):
            log, n_known = folder / f"{attempt}.jsonl", len(outcomes.by_test)
            said = _one_process(environment, folder, log, cases, list(outcomes.by_test), patience_s)
            tests = outcomes.take(events_of(log))
            if not tests:
                msg = f"no test was found; the last words were: {said}"
                raise SuiteError(msg)
            if tests <= set(outcomes.by_test):
                return outcomes
            if len(outcomes.by_test) == n_known:
                break
    msg = f"processes died {attempt + 1} times without an end; the last words were: {said}"
    raise SuiteError(msg)


def _one_process(
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    cases: Path,
    done: Sequence[str],
    patience_s: float,
) -> str:
    """One run of pytest; returns its last words."""
    above = Path(__file__).resolve().parents[1]
    plugin = f"{__package__.rsplit('.')[-1]}.suite_log"
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(folder / "pytest.ini")]
    command += ["--rootdir", str(cases.parent), "--import-mode=importlib", "-p", plugin]
    command += ["-p", "no:cacheprovider", "--benchmark-warmup=off", "--benchmark-min-rounds=2"]
    command += [f"--timeout={patience_s}", "--timeout-method=thread", str(cases)]
    path = os.pathsep.join(p for p in (str(above), os.environ.get("PYTHONPATH", "")) if p)
    process = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "LANGSMITH_TRACING": "false",
            "PYTHONPATH": path,
            "SUITE_DONE": json.dumps(done),
            "SUITE_LOG": str(log),
            "TOKENIZERS_PARALLELISM": "false",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.strip()]
    return " / ".join(lines[-3:])


Counts = Mapping[str, Mapping[str, int]]
"""By suite, and of both: how many tests had which outcome."""


def counts_of(outcomes: Outcomes) -> Counts:
    """What became of the tests of one contestant."""
    return {suite or "both": outcomes.counts(suite) for suite in (*SUITES.values(), None)}


def counts_in(log: Path) -> dict[str, Counts]:
    """The counts of each contestant, from the last lines of earlier runs; the newest holds.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds something else.
    """
    found: dict[str, Counts] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        for name, one in json.loads(line)["contestants"].items():
            found[name] = one["counts"]
    return {name: found[name] for name in CONTESTANTS if name in found}


def table(found: Mapping[str, Counts]) -> str:
    """The counts, a row for each contestant and suite, in Markdown."""
    lines = [
        "| chat model | suite | passed | failed | skipped | crashed |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, suites in found.items():
        for suite, counts in suites.items():
            numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
            lines.append(f"| {CONTESTANTS.get(name, name)} | {suite} | {numbers} |")
    return "\n".join(lines)


def document(
    model: str, found: Mapping[str, Outcomes], absent: Mapping[str, str]
) -> dict[str, Any]:
    """All of it, for the last line."""
    return {
        "model": model,
        "langchain_tests": version("langchain-tests"),
        "machine": describe(),
        "contestants": {
            name: {
                "counts": counts_of(outcomes),
                "not_passed": {
                    test.split("::", 1)[-1]: {"outcome": outcomes.by_test[test], "why": why}
                    for test, why in outcomes.why.items()
                },
            }
            for name, outcomes in found.items()
        },
        "absent": dict(absent),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status: 1 if something of ours did not pass."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standard_suites")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), metavar="A,B")
    parser.add_argument("--failures", action="store_true", help="also name what did not pass")
    parser.add_argument("--patience", type=float, default=600.0, metavar="S", help="for one test")
    parser.add_argument("--from", dest="log", type=Path, metavar="FILE", help="run nothing")
    parser.add_argument("--docs", type=Path, metavar="DOC", help="put the table into this page")
    asked = parser.parse_args(argv)
    if asked.log is not None:
        _tell(table(counts_in(asked.log)), asked.docs)
        return 0
    names = [name for name in asked.contestants.split(",") if name]
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        parser.error(f"no contestant is called {unknown[0]!r}; known are {', '.join(CONTESTANTS)}")
    source = source_of(asked.model)
    found: dict[str, Outcomes] = {}
    absent: dict[str, str] = {}
    for name in names:
        why = why_absent(name, source)
        if why is None:
            began_s = time.perf_counter()
            print(f"{CONTESTANTS[name]}: running", file=sys.stderr, flush=True)
            told = {"SUITE_CONTESTANT": name, "SUITE_SOURCE": json.dumps(source.to_json())}
            try:
                found[name] = run(told, patience_s=asked.patience)
            except SuiteError as error:
                why = str(error)
            took_s = time.perf_counter() - began_s
            print(f"{CONTESTANTS[name]}: {took_s:.0f} s", file=sys.stderr, flush=True)
        if why is not None:
            absent[name] = why
            print(f"{CONTESTANTS[name]}: {why}", file=sys.stderr, flush=True)
    _tell(table({name: counts_of(outcomes) for name, outcomes in found.items()}), asked.docs)
    if asked.failures:
        for name, outcomes in found.items():
            for test, why in outcomes.why.items():
                if outcomes.by_test[test] != "skipped":
                    print(f"{name} {outcomes.by_test[test]} {test.split('::', 1)[-1]}: {why}")
    print(json.dumps(document(asked.model, found, absent), ensure_ascii=False))
    ours = found.get("ours")
    return int(ours is not None and bool(ours.counts()["failed"] + ours.counts()["crashed"]))


def _tell(text: str, page: Path | None) -> None:
    print(text)
    if page is not None:
        write_between(page, "suites", text)


if __name__ == "__main__":
    sys.exit(main())
