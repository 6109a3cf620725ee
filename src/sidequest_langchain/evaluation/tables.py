"""The document as tables: in a terminal, and between two marks of a Markdown file.

It must not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sidequest_langchain.evaluation.pages import write_between

_MEAN = "mean"


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print the tables of each budget, scores and costs apart: eighty columns are not many."""
    for title, rows in blocks(document):
        console.print(f"\n{title}", highlight=False)
        end = rows[0].index(_MEAN) + 1
        _print([row[:end] for row in rows], console)
        _print([[row[0], *row[end:]] for row in rows], console)
    for line in _failures(document):
        console.print(line, highlight=False, markup=False)


def _print(rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for head in rows[0]:
        table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    console.print()


def blocks(document: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and cells for each budget; the full cache is the first row of every one."""
    full, *managed = document["results"]
    budgets = list(dict.fromkeys(one["budget"] for one in managed))
    if not budgets:
        return [("Full cache (scores and shares in %)", _cells(document, [full]))]
    rows = {budget: [full] for budget in budgets}
    for one in managed:
        rows[one["budget"]].append(one)
    return [
        (
            f"Budget {100 * budget:g} % of the full cache (scores and shares in %)",
            _cells(document, rows[budget]),
        )
        for budget in budgets
    ]


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Put the tables between the marks of a Markdown file.

    Raises:
        ConfigError: The file has no place for them.
        OSError: It cannot be read or written.
    """
    write_between(path, "evaluation", as_markdown(document))


def as_markdown(document: Mapping[str, Any]) -> str:
    """The figures of a run."""
    machine = document["machine"]
    lines = [
        f"Made by `{document['command']}` on {document['date']}: {document['model']}, "
        f"{document['samples']} sample(s) of about {document['tokens']:,} tokens a task, "
        f"{document['threads']} thread(s) on {machine['system']}, Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        + ".",
        "",
    ]
    for title, rows in blocks(document):
        heads, *others = rows
        lines += [f"### {title}", "", "| " + " | ".join(heads) + " |"]
        lines += ["|---" + "|---:" * (len(heads) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in others]
        lines += [""]
    lines += [f"* {line}" for line in _failures(document)]
    return "\n".join(lines).rstrip() + "\n"


def _cells(document: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    tasks = [name for name, task in document["tasks"].items() if not task["is_forced"]]
    has_forced = len(tasks) < len(document["tasks"])
    heads = ["policy", *tasks, _MEAN]
    heads += ["KL", "top-1", "ΔNLL"] if has_forced else []
    heads += ["peak", "of full", "rows", "held", "seconds"]
    cells = [heads]
    for one in found:
        row = [one["policy"] if one["budget"] is not None else "full cache"]
        row += [_percent(one["scores"].get(task)) for task in tasks]
        row.append(_percent(one["mean"], 1))
        if has_forced:
            row += [_small(one["kl"]), _percent(one["top1"], 1), _small(one["nll_delta"])]
        peak, rows = one["peak_bytes"], one["rows"]
        row.append("–" if peak is None else f"{peak / 1e6:.1f} MB")
        row.append(_percent(one["peak_share"]))
        row.append("–" if rows is None else f"{rows:,.0f}")
        row.append(_percent(one["bytes_share"]))
        row.append("–" if one["seconds"] is None else f"{one['seconds']:.1f}")
        cells.append(row)
    return cells


def _failures(document: Mapping[str, Any]) -> list[str]:
    """What failed, with how often; such runs score nothing. Who fails alike shares a line."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    examples: dict[tuple[Any, ...], str] = {}
    for one in document["results"]:
        for kind, found in one["errors"].items():
            key = (one["budget"], kind, found["n"], one["n_runs"])
            alike.setdefault(key, []).append(one["policy"])
            examples.setdefault(key, found["example"])
    return [
        f"{', '.join(policies)} at {budget}: {n} of {n_runs} runs failed and score nothing, for "
        f"example: {kind}: {examples[budget, kind, n, n_runs]}"
        for (budget, kind, n, n_runs), policies in alike.items()
    ]


def _percent(value: float | None, n_digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{n_digits}f}"


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"
