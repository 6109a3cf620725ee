"""Documents as tables: in a terminal, and as the part of a Markdown file between two marks.

It must not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sidequest_langchain.evaluation.pages import write_between

_HEAD = ("", "seconds", "× ours", "tok/s", "first", "KV", "memory", "prefilled", "same answers")


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print every workload's table, eighty columns wide."""
    for name, workload in document["workloads"].items():
        heads = ("", "seconds", "× ours", "tok/s", "first", "KV", "memory", "prefilled", "same")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in heads:
            justify = "left" if head == "" else "right"
            table.add_column(head, no_wrap=True, justify=justify)  # type: ignore[arg-type]
        for row in rows(workload, has_range=False):
            table.add_row(*row)
        console.print(f"\n{name}: {workload['about']}", highlight=False)
        console.print(table)
        for contestant, why in workload["failed"].items():
            console.print(f"{contestant} failed: {why}", highlight=False)
    for contestant, why in document["skipped"].items():
        console.print(f"\n{contestant} skipped: {why}", highlight=False)


def rows(workload: Mapping[str, Any], *, has_range: bool = True) -> list[list[str]]:
    """The cells of one workload's table, a row for each contestant."""
    ratios = {c["of"]: c for c in workload["comparisons"] if c["to"] == "ours"}
    found = []
    for name, result in workload["results"].items():
        wall, ratio = result["wall_s"], ratios.get(name)
        seconds = f"{wall['median']:.1f}"
        if has_range and len(wall["all"]) > 1:
            seconds += f" ({wall['min']:.1f}–{wall['max']:.1f})"
        same = f"{ratio['n_same_answers']}/{workload['n_calls']}" if ratio else "–"
        found.append(
            [
                name,
                seconds,
                f"{ratio['wall_ratio']:.2f}" if ratio else "1" if name == "ours" else "–",
                f"{result['tokens_per_s']:.1f}",
                _seconds(result["first_token_s"]),
                _megabytes(result["kv_bytes"]),
                _megabytes(result["rss_peak_bytes"]),
                _count(result["n_prefilled_tokens"]),
                same,
            ]
        )
    return found


def as_markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """The figures of several runs."""
    parts = []
    for document in documents:
        parts += [*_preface(document), ""]
        for name, workload in document["workloads"].items():
            parts += [f"### {name}: {workload['about']}", "", *_table(workload), ""]
            parts += [*_remarks(workload), ""]
    return "\n".join(parts).rstrip() + "\n"


def write(path: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """Put the figures between the marks of a Markdown file.

    Raises:
        ConfigError: The file has none.
    """
    write_between(path, "figures", as_markdown(documents))


def _preface(document: Mapping[str, Any]) -> list[str]:
    machine = document["machine"]
    lines = [
        f"Made by `{document['command']}` on {document['date']}: {document['model']}, "
        f"{document['rounds']} round(s), {document['threads']} threads on {machine['processor']} "
        f"({machine['cores']} cores, {machine['memory_gib']} GiB), Python {machine['python']}.",
        "",
        "| contestant | what | weights | calls of a step | set up | versions |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in document["contestants"].items():
        versions = ", ".join(f"{package} {v}" for package, v in one["packages"].items())
        order = "at once" if one["at_once"] else "in turn"
        lines.append(
            f"| {name} | {one['title']} | {one['weights']} | {order} | {one['set_up']} "
            f"| {versions} |"
        )
    lines += [f"\n{name} did not take part: {why}." for name, why in document["skipped"].items()]
    return lines


def _table(workload: Mapping[str, Any]) -> list[str]:
    return [
        "| " + " | ".join(_HEAD) + " |",
        "|---" + "|---:" * (len(_HEAD) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows(workload)),
    ]


def _remarks(workload: Mapping[str, Any]) -> list[str]:
    said = [f"{workload['n_calls']} calls in {workload['n_steps']} step(s)."]
    for name, result in workload["results"].items():
        if name.startswith("ours") and result["kv_share"] is not None:
            said.append(
                f"{name}: the same calls, each with a cache of its own and nothing released, would "
                f"hold {_megabytes(result['kv_bytes_apart'])}; it held {result['kv_share']:.1%} of "
                "that at its peak."
            )
        if workload["n_steps"] == 1 and "n_distinct_tokens" in result["facts"]:
            facts = result["facts"]
            said.append(
                f"{name}: the trunk has {facts['n_trunk_tokens']:,} tokens; the prompts have "
                f"{facts['n_distinct_tokens']:,} distinct rows, and "
                f"{result['n_prefilled_tokens']:,} were prefilled."
            )
    loads = [r["other_load"] for r in workload["results"].values() if r["other_load"] is not None]
    if loads:
        said.append(f"Other programs took up to {max(loads):.0%} of the processors meanwhile.")
    hows: dict[str, list[str]] = {}
    for name, result in workload["results"].items():
        if result["kv_how"]:
            hows.setdefault(result["kv_how"], []).append(name)
    said.append("KV bytes: " + "; ".join(f"{', '.join(v)} {k}" for k, v in hows.items()) + ".")
    said += [f"{name} failed: {why}." for name, why in workload["failed"].items()]
    dense = [c for c in workload["comparisons"] if c["to"] == "ours-fp32" and c["same_weights"]]
    if dense:
        said.append(
            "Against ours-fp32, with the very same weights: "
            + "; ".join(
                f"{c['of']} takes {c['wall_ratio']:.2f} × as long, {c['n_same_answers']} of "
                f"{workload['n_calls']} answers are the same"
                for c in dense
            )
            + "."
        )
    return [f"* {line}" for line in said]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _megabytes(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e6:,.0f} MB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
