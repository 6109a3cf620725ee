"""From rows to figures: means over samples, and the document. Arithmetic over plain values.

The document (`"schema": "sidequest.eval/1"`) has `date`, `command`, `model`, `tokens`, `samples`,
`seed`, `threads`, `machine`, `versions`; `tasks`: name to `about`, `is_agent`, `is_forced`; and
`results`, one for every policy and budget, the full cache first:

* `policy`, `budget` (`null`: the full cache), `n_runs`, `errors` (kind to `n`, `example`);
* `scores`: task to its mean from 0 to 1; `mean`: of the tasks; `agent_mean`: of the agent tasks;
* `of_full`: `mean` as a share of the full cache's;
* `peak_bytes`, `rows`, `bytes`, `seconds`: means over runs; `peak_share`, `rows_share`,
  `bytes_share`: of the full cache's, over the runs that both finished;
* `kl`, `kl_max`, `top1`, `nll_delta`: of the forced tasks, over their tokens.

What cannot be known is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidequest_langchain.evaluation.arms import Arm
from sidequest_langchain.evaluation.log import Row
from sidequest_langchain.evaluation.runner import scores_of
from sidequest_langchain.evaluation.sample import Task

SCHEMA = "sidequest.eval/1"
_SIZES = (("peak_bytes", "peak_share"), ("n_rows", "rows_share"), ("n_bytes", "bytes_share"))


def results(rows: Iterable[Row], arms: Sequence[Arm], tasks: Sequence[Task]) -> list[Row]:
    """The figures of every arm, in order; the first arm is the full cache."""
    names = {task.name for task in tasks}
    chosen = [row for row in rows if row["task"] in names]
    by_arm = {
        arm: [r for r in chosen if (r["policy"], r["budget"]) == (arm.policy, arm.budget)]
        for arm in arms
    }
    full = {(r["task"], r["number"]): r for r in by_arm[arms[0]] if r["error"] is None}
    found = [_result(arm, by_arm[arm], full, tasks) for arm in arms]
    top = found[0]["mean"]
    for one in found:
        one["of_full"] = one["mean"] / top if top and one["mean"] is not None else None
    return found


def _result(
    arm: Arm,
    rows: Sequence[Row],
    full: Mapping[tuple[str, int], Row],
    tasks: Sequence[Task],
) -> Row:
    done = [row for row in rows if row["error"] is None]
    scores = {
        task.name: mean(s for row in rows if row["task"] == task.name for s in scores_of(row))
        for task in tasks
        if not task.is_forced
    }
    of_agents = [scores[task.name] for task in tasks if task.is_agent and not task.is_forced]
    sizes: Row = {}
    for size, share in _SIZES:
        pairs = [(r[size], full[k][size]) for r in done if (k := (r["task"], r["number"])) in full]
        whole = sum(b for _, b in pairs)
        sizes[size.removeprefix("n_")] = mean(row[size] for row in done)
        sizes[share] = sum(a for a, _ in pairs) / whole if whole else None
    return {
        "policy": arm.policy,
        "budget": arm.budget,
        "n_runs": len(rows),
        "errors": _errors(row["error"] for row in rows if row["error"] is not None),
        "scores": scores,
        "mean": mean(scores.values()),
        "agent_mean": mean(of_agents),
        **sizes,
        "seconds": mean(row["seconds"] for row in done),
        **_divergences([row["divergence"] for row in done if row["divergence"] is not None]),
    }


def _errors(found: Iterable[str]) -> dict[str, Row]:
    """Kinds of failures, with how many of each and one of their messages."""
    kinds: dict[str, Row] = {}
    for error in found:
        kind, _, message = error.partition(": ")
        kinds.setdefault(kind, {"n": 0, "example": message})["n"] += 1
    return kinds


def _divergences(found: Sequence[Mapping[str, Any]]) -> Row:
    """Means over tokens, of several runs."""
    n = sum(one["n_tokens"] for one in found)
    if not n:
        return {"kl": None, "kl_max": None, "top1": None, "nll_delta": None}

    def over_tokens(name: str) -> float:
        return float(sum(one[name] * one["n_tokens"] for one in found) / n)

    return {
        "kl": over_tokens("kl"),
        "kl_max": max(one["kl_max"] for one in found),
        "top1": over_tokens("top1"),
        "nll_delta": over_tokens("nll") - over_tokens("nll_full"),
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known; `None` if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
