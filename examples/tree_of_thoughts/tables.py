"""The tables at the end of a run, 80 columns wide; it must not know how runs are made."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal
from rich.table import Table

from .planner import Release, Run

_MOST_RELEASES = 8


def summary(run: Run) -> Table:
    """One run: what it found, and what it cost."""
    table = Table(title=f"{run.problem.name}, {run.method}", show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("solved", "yes" if run.is_solved else f"no: {run.outcome}")
    if run.is_solved or run.method == "cot":
        table.add_row("plan", plan_line(run) or "none was given")
    else:
        table.add_row("longest beginning", plan_line(run) or "none")
    table.add_row("model calls", f"{run.n_calls} ({len(run.records)} samples)")
    table.add_row(
        "prompt tokens",
        f"{run.n_tokens('prefilled'):,} prefilled, {run.n_tokens('reused'):,} reused",
    )
    table.add_row("generated tokens", f"{run.n_tokens('generated'):,}")
    if run.peak_bytes is not None:
        table.add_row("peak KV", decimal(run.peak_bytes))
    if run.kept is not None:
        table.add_row("peak KV, nothing released", f"{decimal(run.kept.peak_bytes)} (measured)")
    for reason in ("prune", "backtrack"):
        if some := [release for release in run.releases if release.reason == reason]:
            table.add_row(f"freed by {reason}", _freed(some))
    if run.agreement.n_proposals:
        table.add_row("model's proposals", proposals_line(run))
    if run.agreement.n_pairs:
        table.add_row("model's scores", pairs_line(run))
    table.add_row("wall time", f"{run.wall_s:.1f} s")
    return table


def comparison(runs: Sequence[Run]) -> Table:
    """Several runs, one row for each method."""
    table = Table(title="all runs", expand=False, caption="unreleased: peak KV, nothing released")
    for name in ("method", "solved", "calls", "prefilled", "reused", "peak KV", "unreleased", "s"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for method in dict.fromkeys(run.method for run in runs):
        some = [run for run in runs if run.method == method]
        table.add_row(
            method,
            f"{sum(run.is_solved for run in some)}/{len(some)}",
            f"{sum(run.n_calls for run in some)}",
            f"{sum(run.n_tokens('prefilled') for run in some):,}",
            f"{sum(run.n_tokens('reused') for run in some):,}",
            _most([run.peak_bytes for run in some]),
            _most([run.kept.peak_bytes if run.kept else None for run in some]),
            f"{sum(run.wall_s for run in some):.0f}",
        )
    return table


def plan_line(run: Run) -> str:
    """The plan in one line."""
    return ", ".join(f"{v.city} {v.first_day}-{v.last_day}" for v in run.plan)


def proposals_line(run: Run) -> str:
    """How good the proposals were."""
    found = run.agreement
    return (
        f"{found.n_right} of {found.n_proposals} could still succeed "
        f"(even draw: {found.n_right_by_chance:.1f})"
    )


def pairs_line(run: Run) -> str:
    """How good the scores were."""
    found = run.agreement
    return f"right in {found.n_pairs_right:g} of {found.n_pairs} pairs (even: half)"


def _freed(releases: Sequence[Release]) -> str:
    total = sum(release.n_bytes for release in releases)
    lines = [f"{decimal(total)} in {len(releases)}"]
    for release in releases[:_MOST_RELEASES]:
        lines.append(f"  {decimal(release.n_bytes)}  {release.thought}")
    if len(releases) > _MOST_RELEASES:
        lines.append(f"  and {len(releases) - _MOST_RELEASES} more")
    return "\n".join(lines)


def _most(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return decimal(max(known)) if known else "-"
