"""A pytest plugin: notes each test as it begins and ends, so that a crash loses one test only.

It must not know which tests these are, and imports nothing of this package.

    SUITE_LOG    a file; one JSON line is appended for each event
    SUITE_DONE   a JSON list of tests that need not run again
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was run before, and note what there is."""
    done = set(json.loads(os.environ.get("SUITE_DONE", "[]")))
    _note(event="found", tests=[item.nodeid for item in items])
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins."""
    _note(event="began", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of a test: of its own run, or of what failed around it."""
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr
        text = why[-1] if isinstance(why, tuple) else str(why or "")
        said = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
        last = said[0].removeprefix("E").strip() if said else ""
        _note(event=report.outcome, test=report.nodeid, why=last[:300])


def _note(**event: Any) -> None:
    with Path(os.environ["SUITE_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(event, ensure_ascii=False) + "\n")
