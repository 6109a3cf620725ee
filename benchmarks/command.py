"""`sidequest bench`: this package and its peers on the same work, on this machine.

The last line of standard output is one JSON document; see `figures`. Progress and complaints go
to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from sidequest_langchain.errors import ConfigError, SideQuestError
from sidequest_langchain.models.catalogue import DEFAULT_MODEL
from sidequest_langchain.models.progress import on_console

from .contestant import Source
from .figures import SCHEMA, contestant_figures, workload_figures
from .lineup import EXTRA, chosen, gguf_of, python_of, source_of, why_absent
from .machine import describe
from .measuring import Field, Progress
from .roster import ROSTER
from .tables import show, write
from .workers import PATIENCE_S, Worker
from .workloads import WORKLOADS

SMALL_MODEL = "smollm2-135m"
_EXAMPLES = f"""\
examples:
  sidequest bench --list                  workloads and contestants, who is here
  sidequest bench --quick                 a smoke run on {SMALL_MODEL}: a minute
  sidequest bench chat --contestants ours,llamacpp --rounds 3
  sidequest bench planner agent --json run.json --rounds 3
  sidequest bench --from run.json --write docs/benchmarks.md
                                          tables of runs made before, no new run

A round of every contestant takes about:
  {", ".join(f"{name} {found.takes}" for name, found in WORKLOADS.items())}
The peers come with {EXTRA}.
"""


class Mistake(Exception):
    """The command line cannot be honoured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(_parser().parse_args(words), words)
    except (Mistake, ConfigError) as error:
        return _fail(str(error), status=2)
    except (SideQuestError, OSError) as error:
        return _fail(str(error), status=1)


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    unknown = [name for name in args.workloads if name not in WORKLOADS]
    names = args.contestants.split(",") if args.contestants else None
    if args.documents:
        if args.write is None:
            msg = "--from gives figures to write; say where: --write docs/benchmarks.md"
            raise Mistake(msg)
        write(args.write, [read(path) for path in args.documents])
        return 0
    if unknown:
        msg = f"no workload is called {unknown[0]!r}; there are {', '.join(WORKLOADS)}"
        raise Mistake(msg)
    if strange := [name for name in names or () if name not in ROSTER]:
        msg = f"no contestant is called {strange[0]!r}; there are {', '.join(ROSTER)}"
        raise Mistake(msg)
    if args.rounds < 1:
        msg = f"--rounds must be at least 1, found {args.rounds}"
        raise Mistake(msg)
    if args.patience <= 0:
        msg = f"--patience must be more than 0 seconds, found {args.patience:g}"
        raise Mistake(msg)
    model = args.model or (SMALL_MODEL if args.quick else DEFAULT_MODEL)
    if args.list:
        _list(Source(name=model, folder="", gguf=gguf_of(model)))
        return 0
    with on_console(Console(stderr=True)) as fetching:
        source = source_of(model, fetching)
    document = measure(
        source=source,
        workloads=args.workloads or list(WORKLOADS),
        names=chosen(names),
        n_rounds=args.rounds,
        patience_s=args.patience,
        is_small=args.quick,
        command=shlex.join(["sidequest", "bench", *without_files(words)]),
    )
    for contestant in names or ():
        if contestant in document["skipped"]:
            sys.stderr.write(f"{contestant} skipped: {document['skipped'][contestant]}\n")
    show(document, Console())
    text = json.dumps(document)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    if args.write is not None:
        write(args.write, [document])
    sys.stdout.write(text + "\n")
    complaints = [one for found in document["workloads"].values() for one in found["complaints"]]
    if complaints:
        return _fail("; ".join(complaints), status=1)
    if not document["contestants"]:
        return _fail("nobody could take part", status=1)
    return 0


def measure(
    *,
    source: Source,
    workloads: Sequence[str],
    names: Sequence[str],
    n_rounds: int,
    patience_s: float,
    is_small: bool,
    command: str,
) -> dict[str, Any]:
    """Run workloads and make the document."""
    n_threads = os.cpu_count() or 1
    skipped = {name: why for name in names if (why := why_absent(name, source)) is not None}
    here = [name for name in names if name not in skipped]
    found: dict[str, Any] = {}

    def start(name: str) -> Worker:
        return Worker(name, python=python_of(name), patience_s=patience_s)

    with (
        _progress() as progress,
        Field(here, start, progress) as field,
    ):
        field.load(source, n_threads)
        for name in workloads:
            workload = WORKLOADS[name]
            measured = field.measure(workload.make(is_small), n_rounds)
            found[name] = workload_figures(measured, workload.about, field.loaded)
        skipped |= {name: why for name, why in field.failed.items() if name not in field.loaded}
    return {
        "schema": SCHEMA,
        "date": date.today().isoformat(),
        "command": command,
        "model": source.name,
        "threads": n_threads,
        "rounds": n_rounds,
        "is_small": is_small,
        "machine": describe(),
        "contestants": contestant_figures(field.loaded),
        "skipped": skipped,
        "workloads": found,
    }


def without_files(words: Sequence[str]) -> list[str]:
    """The words of a command line that matter for its figures: not where they were written to."""
    kept: list[str] = []
    is_file = False
    for word in words:
        if not is_file and word.split("=")[0] not in ("--json", "--write"):
            kept.append(word)
        is_file = word in ("--json", "--write")
    return kept


def read(path: Path) -> dict[str, Any]:
    """A document from a file: its last line.

    Raises:
        Mistake: The file is no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        is_ours = document["schema"] == SCHEMA
    except (ValueError, IndexError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        msg = f"{path} holds no document of `sidequest bench`; make one with --json {path}"
        raise Mistake(msg)
    return dict(document)


@contextmanager
def _progress() -> Iterator[Progress]:
    """One line for everything begun and ended; on a terminal a spinner shows what runs now."""
    console = Console(stderr=True)
    began_s = time.monotonic()

    def say(text: str) -> None:
        stamp = f"{time.monotonic() - began_s:5.0f} s"
        if console.is_terminal:
            status.update(text)
        console.print(f"{stamp}  {text}", highlight=False, markup=False)

    with console.status("starting") as status:
        yield say


def _list(source: Source) -> None:
    """Say what there is, in eighty columns."""
    lines = [f"{name:12s}{workload.about}" for name, workload in WORKLOADS.items()]
    lines.append("")
    for name, entry in ROSTER.items():
        lines.append(f"{name:12s}{entry.title}: {why_absent(name, source) or 'ready'}")
    for line in lines:
        sys.stdout.write(textwrap.fill(line, 79, subsequent_indent=" " * 12) + "\n")


def _fail(message: str, *, status: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidequest bench",
        description=(
            "Run this package and its peers on the same work, interleaved, each in a\n"
            "process of its own. Ends with one JSON document on the last line."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}; default: all")
    add("--contestants", metavar="A,B", help="only these; see --list")
    add("--rounds", type=int, default=1, metavar="N", help="times each does the work (1)")
    add("--model", metavar="M", help=f"catalogue name, folder or .gguf file ({DEFAULT_MODEL})")
    add("--quick", action="store_true", help=f"little work, on {SMALL_MODEL}: a smoke run")
    add("--patience", type=float, default=PATIENCE_S, metavar="S",
        help=f"a round that takes longer ends its contestant ({PATIENCE_S:.0f})")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the document there, too")
    add("--from", dest="documents", type=Path, action="append", metavar="FILE",
        help="take figures of a run made before; may be given again")  # fmt: skip
    add("--write", type=Path, metavar="DOC", help="put the tables into this Markdown file")
    add("--list", action="store_true", help="say what there is, and who is here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
