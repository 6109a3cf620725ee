"""From rounds to figures: medians, ratios and the document. Pure arithmetic over plain values.

The document (`"schema": "sidequest.bench/1"`): `date`, `command`, `model`, `threads`, `rounds`,
`is_small`, `machine`, `skipped` (name to reason), and

* `contestants`: name to `title`, `set_up`, `at_once`, `weights`, `row_bytes`, `load_s`,
  `packages`;
* `workloads`: name to `about`, `n_calls`, `n_steps`, `failed` (name to reason), `complaints` (what
  was promised and did not hold), `results` and `comparisons`.

A result has `wall_s` (`median`, `min`, `max`, `all`), `other_load` (share of the processors' time
that other programs took meanwhile), `first_token_s`, `tokens_per_s`,
`n_prompt_tokens`, `n_prefilled_tokens`, `n_generated_tokens`, `kv_bytes`, `kv_how`,
`kv_bytes_apart` (what the same calls would hold, each with a cache of its own, nothing released),
`kv_share` (of that, in use at the peak), `rss_before_bytes`, `rss_peak_bytes`, `facts`, `answers`
(of the last round). What cannot be known is null.

A comparison has `of`, `to`, `wall_ratio` (the median of the rounds' ratios: how many times as
long `of` takes), `n_same_answers`, `same_weights`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .measuring import Measured, Round
from .roster import ROSTER

SCHEMA = "sidequest.bench/1"
BASES = ("ours", "ours-fp32")
"""Whom the others are compared to."""


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, most, and all of them."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def result(rounds: Sequence[Round], row_bytes: int) -> dict[str, Any]:
    """The figures of one contestant: times by their median, memory by the most of any round."""
    last = rounds[-1]
    walls = [r["wall_s"] for r in rounds]
    firsts = [r["first_token_s"] for r in rounds if r["first_token_s"] is not None]
    loads = [r["other_load"] for r in rounds if r["other_load"] is not None]
    apart = last["n_kv_rows_apart"] * row_bytes
    kv_bytes = _most(rounds, "kv_bytes")
    return {
        "wall_s": spread(walls),
        "other_load": statistics.median(loads) if loads else None,
        "first_token_s": statistics.median(firsts) if firsts else None,
        "tokens_per_s": statistics.median(r["n_generated_tokens"] / r["wall_s"] for r in rounds),
        "n_prompt_tokens": last["n_prompt_tokens"],
        "n_prefilled_tokens": last["n_prefilled_tokens"],
        "n_generated_tokens": last["n_generated_tokens"],
        "kv_bytes": kv_bytes,
        "kv_how": last["kv_how"],
        "kv_bytes_apart": apart or None,
        "kv_share": kv_bytes / apart if kv_bytes is not None and apart else None,
        "rss_before_bytes": last["rss_before_bytes"],
        "rss_peak_bytes": _most(rounds, "rss_peak_bytes"),
        "facts": last["facts"],
        "answers": last["texts"],
    }


def comparison(
    of: str, to: str, rounds: Mapping[str, Sequence[Round]], weights: Mapping[str, str]
) -> dict[str, Any]:
    """How one contestant stands to another; rounds are compared pair by pair."""
    pairs = list(zip(rounds[of], rounds[to], strict=True))
    texts = zip(rounds[of][-1]["texts"], rounds[to][-1]["texts"], strict=True)
    return {
        "of": of,
        "to": to,
        "wall_ratio": statistics.median(a["wall_s"] / b["wall_s"] for a, b in pairs),
        "n_same_answers": sum(a == b for a, b in texts),
        "same_weights": weights[of] == weights[to],
    }


def workload_figures(
    measured: Measured, about: str, loaded: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One workload's part of the document."""
    rounds = measured.rounds
    weights = {name: str(loaded[name]["weights"]) for name in rounds}
    return {
        "about": about,
        "n_calls": len(measured.work.calls),
        "n_steps": len(measured.work.steps),
        "failed": measured.failed,
        "complaints": complaints(measured),
        "results": {
            name: result(found, loaded[name]["row_bytes"]) for name, found in rounds.items()
        },
        "comparisons": [
            comparison(of, to, rounds, weights)
            for to in BASES
            if to in rounds
            for of in rounds
            if of != to
        ],
    }


def complaints(measured: Measured) -> list[str]:
    """Where a trunk was computed more than once: calls at the same time must share all of it."""
    found = []
    for name, rounds in measured.rounds.items():
        for one in rounds:
            fewest = one["facts"].get("n_distinct_tokens")
            n = one["n_prefilled_tokens"]
            if len(measured.work.steps) == 1 and fewest is not None and n != fewest:
                found.append(
                    f"{name} prefilled {n} tokens of {measured.work.name}, but its prompts have "
                    f"{fewest} distinct ones"
                )
    return found


def contestant_figures(loaded: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The contestants' part of the document."""
    return {
        name: {
            "title": ROSTER[name].title,
            "set_up": ROSTER[name].set_up,
            "at_once": ROSTER[name].is_at_once,
            **said,
        }
        for name, said in loaded.items()
    }


def _most(rounds: Sequence[Round], key: str) -> int | None:
    found = [r[key] for r in rounds if r[key] is not None]
    return max(found) if found else None
