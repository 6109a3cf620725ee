"""Makes `data/planner.json` anew from a run of the planner.

    sidequest demo --mode beam --no-replay --quiet --record calls.json --json > run.json
    python -m benchmarks.recording calls.json run.json

A branch is given up after the last step that calls the model for it or for a branch below it:
that is when a beam's selection follows. Of several samples of one prompt the first is kept:
greedily, as contestants answer, they would be one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from .workloads import PLANNER_RECORD

SCHEMA = "sidequest.bench.planner/1"


def steps_of(calls: dict[str, Any], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the first run of a record, with what was given up after each.

    Args:
        calls: What `--record` wrote.
        run: What `--json` said.
    """
    firsts = {call["n_call"]: call for call in reversed(calls["runs"][0]["calls"])}
    ordered = sorted(firsts.values(), key=lambda call: (call["n_round"], call["n_call"]))
    by_round = {
        n_round: [_call(call) for call in group]
        for n_round, group in groupby(ordered, key=lambda call: call["n_round"])
    }
    parents = {t["id"]: t["parent"] for t in run["runs"][0]["thoughts"]}
    released: dict[int, list[str]] = {}
    for release in run["runs"][0]["kv"]["releases"]:
        name = release["thought"]
        rounds = [n for n, group in by_round.items() if _is_below(name, group, parents)]
        released.setdefault(max(rounds), []).append(name)
    return [
        {"calls": group, "released": released.get(n_round, [])}
        for n_round, group in by_round.items()
    ]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "turns": [{"role": m["role"], "content": m["content"]} for m in call["messages"]],
        "max_tokens": call["settings"]["max_tokens"],
        "branch": call["thought"],
        "parent": call["parent"],
    }


def _is_below(name: str, calls: Iterable[dict[str, Any]], parents: dict[str, str | None]) -> bool:
    for call in calls:
        at: str | None = call["branch"]
        while at is not None and at != name:
            at = parents.get(at)
        if at == name:
            return True
    return False


def main(argv: list[str] | None = None) -> int:
    """Read both files and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("calls", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=PLANNER_RECORD)
    args = parser.parse_args(argv)
    calls = json.loads(args.calls.read_text(encoding="utf-8"))
    run = json.loads(args.run.read_text(encoding="utf-8").splitlines()[-1])
    document = {
        "schema": SCHEMA,
        "model": calls["model"],
        "problem": calls["runs"][0]["problem"],
        "steps": steps_of(calls, run),
    }
    args.to.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
