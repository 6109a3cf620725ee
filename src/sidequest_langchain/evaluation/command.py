"""`sidequest eval`: what a managed cache costs in quality, policy by policy, on this machine.

The last line of standard output is one JSON document; see `figures`. Progress and complaints go
to standard error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sidequest_langchain._version import __version__
from sidequest_langchain.config.presets import PRESETS
from sidequest_langchain.errors import ConfigError, SideQuestError
from sidequest_langchain.evaluation import tables
from sidequest_langchain.evaluation.agents import AGENTS
from sidequest_langchain.evaluation.arms import BUDGETS, POLICIES, arms_of
from sidequest_langchain.evaluation.figures import SCHEMA, results
from sidequest_langchain.evaluation.log import ResultLog
from sidequest_langchain.evaluation.runner import Plan, Runner, Solve
from sidequest_langchain.evaluation.sample import Task
from sidequest_langchain.evaluation.texts import TEXTS
from sidequest_langchain.models.catalogue import DEFAULT_MODEL
from sidequest_langchain.policy.registry import policy_names

TASKS = {task.name: task for task in (*TEXTS, *AGENTS)}
_OTHERS = tuple(name for name in policy_names() if name not in POLICIES)
_FILES = ("--out", "--docs")
_EXAMPLES = """\
examples:
  sidequest eval --list                     the tasks, and what they ask
  sidequest eval --policies none            how the full cache does: minutes
  sidequest eval --policies staged,snapkv --budgets 0.35 --samples 3
  sidequest eval --out eval.jsonl           keeps every result; the same line again goes on
                                            where a cut run stopped
  sidequest eval --out eval.jsonl --docs docs/evaluation.md
                                            the tables of the documentation

The full cache always runs first: a budget is a share of the bytes that it holds for the same
sample. A sample of about 1,500 tokens takes some ten seconds on a CPU core. KL, top-1
and NLL compare the logits at the full cache's own answers, token by token.
"""


def main(
    argv: Sequence[str] | None = None, *, solvers: Mapping[str, tuple[Task, Solve]] | None = None
) -> int:
    """Run one command line.

    Args:
        argv: The words after `sidequest eval`; `None` takes those of this process.
        solvers: More tasks by name, which run an application; none runs unless it is asked for.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    more = dict(solvers or {})
    args = _parser(more).parse_args(words)
    return reported(lambda: _run(args, words, more))


def reported(run: Callable[[], int]) -> int:
    """The exit status of a command; what it fails with is one line on standard error."""
    try:
        return run()
    except ConfigError as error:
        return _fail(str(error), status=2)
    except (SideQuestError, OSError) as error:
        return _fail(str(error), status=1)


def _run(
    args: argparse.Namespace, words: Sequence[str], more: Mapping[str, tuple[Task, Solve]]
) -> int:
    known = {**TASKS, **{name: task for name, (task, _) in more.items()}}
    if args.list:
        for name, task in known.items():
            sys.stdout.write(f"{name:12s}{task.about}\n")
        return 0
    plan = _plan(args, known)
    settings = {
        "schema": SCHEMA,
        "model": args.model,
        "tokens": args.tokens,
        "seed": args.seed,
        **({} if args.predictor == "auto" else {"predictor": args.predictor}),
    }
    log = ResultLog(args.out, settings)
    with progress() as say:
        say(f"loading {args.model}")
        runner = Runner(args.model, log, say)
        runner.run(plan, {name: solve for name, (_, solve) in more.items()})
    document = document_of(
        plan, log, settings, command=shlex.join(["sidequest", "eval", *_without_files(words)])
    )
    tables.show(document, Console())
    if args.docs is not None:
        tables.write(args.docs, document)
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def document_of(
    plan: Plan, log: ResultLog, settings: Mapping[str, Any], *, command: str
) -> dict[str, Any]:
    """The document of what a log holds of a plan."""
    rows = [row for row in log if row["number"] < plan.n_samples]
    return {
        **settings,
        "date": date.today().isoformat(),
        "command": command,
        "samples": plan.n_samples,
        "threads": torch.get_num_threads(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "versions": {
            "sidequest-langchain": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "tasks": {
            task.name: {
                "about": task.about,
                "is_agent": task.is_agent,
                "is_forced": task.is_forced,
            }
            for task in plan.tasks
        },
        "results": results(rows, plan.arms, plan.tasks),
    }


def _plan(args: argparse.Namespace, known: Mapping[str, Task]) -> Plan:
    """What the words ask for.

    Raises:
        ConfigError: They ask for what is not there.
    """
    names = args.tasks.split(",") if args.tasks else list(TASKS)
    require_known("task", names, list(known))
    policies = args.policies.split(",") if args.policies else list(POLICIES)
    try:
        budgets = [float(word) for word in args.budgets.split(",")]
    except ValueError:
        budgets = [0.0]
    if not all(0 < budget <= 1 for budget in budgets):
        msg = f"--budgets are shares above 0 and at most 1, such as 0.5,0.2; found {args.budgets!r}"
        raise ConfigError(msg)
    for name, least in (("samples", 1), ("tokens", 50)):
        if getattr(args, name) < least:
            msg = f"--{name} must be at least {least}, found {getattr(args, name)}"
            raise ConfigError(msg)
    return Plan(
        tasks=tuple(known[name] for name in dict.fromkeys(names)),
        arms=arms_of(policies, budgets),
        n_samples=args.samples,
        n_tokens=args.tokens,
        seed=args.seed,
        predictor=args.predictor,
    )


def require_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        ConfigError: As said.
    """
    for name in names:
        if name not in known:
            msg = f"no {what} is called {name!r}; there are {', '.join(known)}"
            raise ConfigError(msg)


def _without_files(words: Sequence[str]) -> list[str]:
    """The words of a command line that matter for its figures: not where they were written to."""
    kept: list[str] = []
    is_file = False
    for word in words:
        if not is_file and word.split("=")[0] not in _FILES:
            kept.append(word)
        is_file = word in _FILES
    return kept


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """One line for everything begun; on a terminal a spinner shows what runs now."""
    console = Console(stderr=True)
    began_s = time.monotonic()
    with console.status("starting") as status:

        def say(text: str) -> None:
            if console.is_terminal:
                status.update(text)
            stamp = f"{time.monotonic() - began_s:6.0f} s"
            console.print(f"{stamp}  {text}", highlight=False, markup=False)

        yield say


def _fail(message: str, *, status: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return status


def _parser(more: Mapping[str, tuple[Task, Solve]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidequest eval",
        description=(
            "Ask a model questions whose answers are known, with the full cache and with managed\n"
            "ones, and say what each policy costs at each budget. Everything is greedy and made\n"
            "from a seed. Ends with one JSON document on the last line."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    also = f"; besides {', '.join(more)}" if more else ""
    add(
        "--policies",
        metavar="A,B",
        help=f"default: {', '.join(POLICIES)}; also {', '.join(_OTHERS)}; or a preset: "
        + ", ".join(PRESETS),
    )
    add("--budgets", default=",".join(map(str, BUDGETS)), metavar="X,Y",
        help="shares of the full cache's bytes (%(default)s)")  # fmt: skip
    add("--tasks", metavar="A,B", help=f"default: {', '.join(TASKS)}{also}")
    add("--samples", type=int, default=5, metavar="N", help="samples of a task (%(default)s)")
    add("--tokens", type=int, default=1500, metavar="N",
        help="tokens of a sample's context, about (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="another seed: other samples (0)")
    add("--model", default=DEFAULT_MODEL, metavar="M",
        help="catalogue name, folder, .gguf file or Hub id (%(default)s)")  # fmt: skip
    add("--predictor", default="auto", metavar="P",
        help="of attention: auto, none (its average) or a file of weights (auto)")  # fmt: skip
    add("--out", type=Path, metavar="FILE",
        help="JSON lines: each result as it comes; what is there is not run again")  # fmt: skip
    add("--docs", type=Path, metavar="DOC", help="put the tables into this Markdown file")
    add("--list", action="store_true", help="say what the tasks ask")
    return parser
