"""The console script `sidequest`: words in, one exit status out.

0 is success, 1 a failure (one line on standard error), 2 a command line that means nothing,
130 an interruption. It must not import torch unless a command needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sidequest_langchain._version import __version__
from sidequest_langchain.errors import ModelError, SideQuestError
from sidequest_langchain.models import CATALOGUE, DEFAULT_MODEL, ensure, installed, pull, verify
from sidequest_langchain.models.failures import in_units
from sidequest_langchain.models.home import home, kept_gguf, model_folder
from sidequest_langchain.models.progress import on_console

_EXAMPLES = """\
examples:
  sidequest models               what there is, and what is on this machine
  sidequest pull smollm2-135m    fetch a small model: 93 MB, about a minute
  sidequest demo                 the Tree-of-Thoughts travel planner
  sidequest demo --help          its options
  sidequest bench --help         this package and its peers on the same work
  sidequest eval --help          what a managed cache costs in quality
  sidequest trace --help         record attention, for fit-importance to learn from

Models are kept in a folder of the user's cache, or of SIDEQUEST_HOME.
"""

_PULL_EXAMPLES = f"""\
examples:
  sidequest pull {DEFAULT_MODEL}          the default model
  sidequest pull ./model.Q4_K_M.gguf         convert a file of your own
  sidequest pull smollm2-135m --verify       read every byte of the copy that is here
  sidequest pull smollm2-135m --force        make it anew
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: The words after `sidequest`; `None` takes those of this process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["demo"]:  # all its words are the planner's, --help too
            return _demo(words[1:])
        if words[:1] == ["bench"]:
            return _bench(words[1:])
        if words[:1] == ["eval"]:
            return _eval(words[1:])
        if words[:1] in (["trace"], ["fit-importance"]):
            return _learn(words[0], words[1:])
        if not words:
            _parser().print_help(sys.stderr)
            return 2
        return _run(_parser().parse_args(words))
    except SystemExit as leaving:  # argparse: after --help, --version, or a mistake
        return leaving.code if isinstance(leaving.code, int) else 2
    except SideQuestError as error:
        return _fail(str(error), status=1)
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(text: str) -> None:
    """Print at once, so that a reader that has gone is noticed here."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _fail(message: str, *, status: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidequest",
        description="LangGraph agents on local models, with a KV cache in the shape of the graph.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sidequest {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_pull(commands)
    models = "list the catalogue, and what is on this machine"
    commands.add_parser("models", help=models, description=f"{models.capitalize()}.")
    commands.add_parser("demo", help="run the Tree-of-Thoughts travel planner", add_help=False)
    commands.add_parser("bench", help="measure this package and its peers", add_help=False)
    commands.add_parser(
        "eval", help="measure what a managed cache costs in quality", add_help=False
    )
    commands.add_parser("trace", help="record attention, to learn from", add_help=False)
    commands.add_parser(
        "fit-importance", help="learn from traces which tokens will be needed", add_help=False
    )
    return parser


def _add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "pull",
        help="fetch a model, so that it loads in seconds from then on",
        description=(
            "Fetch a model, check its sha256, and convert it once to safetensors.\n"
            "Nothing is fetched if it is here already."
        ),
        epilog=_PULL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        help=f"a catalogue name ({', '.join(CATALOGUE)}), a .gguf file, or a Hub id (owner/name)",
    )
    command.add_argument(
        "--verify", action="store_true", help="read every byte and compare with what was written"
    )
    command.add_argument(
        "--force", action="store_true", help="make it anew even if it is here (catalogue only)"
    )
    command.add_argument(
        "--keep-gguf",
        action="store_true",
        help="keep the .gguf file too, for other programs (catalogue only)",
    )


def _run(chosen: argparse.Namespace) -> int:
    if chosen.command == "models":
        return _models()
    return _pull(chosen.model, force=chosen.force, check=chosen.verify, keep_gguf=chosen.keep_gguf)


def _pull(model: str, *, force: bool, check: bool, keep_gguf: bool) -> int:
    """Have a model here, and say where."""
    began_s = time.monotonic()
    entry = CATALOGUE.get(model)
    if entry is None and (force or check or keep_gguf):
        msg = (
            f"--force, --verify and --keep-gguf are for catalogue names ({', '.join(CATALOGUE)}), "
            f"not for {model!r}"
        )
        return _fail(msg, status=2)
    with on_console(Console(stderr=True)) as progress:
        if entry is None:
            folder = ensure(model, progress=progress)
        else:
            folder = pull(entry, force=force, keep_gguf=keep_gguf, progress=progress)
            if check:
                verify(entry, progress)
    lines = [f"{model} is ready at {folder} ({_size_below(folder)}, {_since(began_s)})"]
    if keep_gguf:
        lines.append(f"its .gguf file is at {kept_gguf(model)}")
    _say("\n".join(lines) + "\n")
    return 0


def _models() -> int:
    """List the catalogue."""
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("download", no_wrap=True, justify="right")
    table.add_column("what")
    for entry in CATALOGUE.values():
        default = " (default)" if entry.name == DEFAULT_MODEL else ""
        table.add_row(
            entry.name,
            _state(entry.name),
            in_units(entry.download_bytes),
            f"{entry.description}{default}; {entry.licence}",
        )
    with console.capture() as drawn:
        console.print(table)
    _say(drawn.get())
    others = _converted_files()
    if others:
        _say(f"\nconverted from .gguf files: {', '.join(others)}\n")
    _say(f"\nkept in {home()}\n")
    return 0


def _state(name: str) -> str:
    """What is on this machine of a catalogue model."""
    try:
        is_here = installed(CATALOGUE[name])
    except ModelError:
        return "damaged"
    return _size_below(model_folder(name)) if is_here else "-"


def _converted_files() -> list[str]:
    folder = home() / "models"
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in found if name not in CATALOGUE]


def _demo(words: list[str]) -> int:
    """Run the travel planner, with its model here first."""
    if not {"-h", "--help"} & set(words):
        # The planner's own options are not known here: --mode must not pass for --model.
        chooser = argparse.ArgumentParser(prog="sidequest demo", add_help=False, allow_abbrev=False)
        chooser.add_argument("--model", default=DEFAULT_MODEL)
        chosen, _ = chooser.parse_known_args(words)
        with on_console(Console(stderr=True)) as progress:
            ensure(chosen.model, progress=progress)
    planner = importlib.import_module("sidequest_langchain.examples.tree_of_thoughts.main")
    return int(planner.main(words) or 0)


def _bench(words: list[str]) -> int:
    """Run the benchmarks, whose words these are."""
    command = importlib.import_module("sidequest_langchain.examples.benchmarks.command")
    return int(command.main(words))


def _eval(words: list[str]) -> int:
    """Measure quality. The planner is a task that only this floor can know."""
    command = importlib.import_module("sidequest_langchain.evaluation.command")
    task = importlib.import_module("sidequest_langchain.examples.tree_of_thoughts.evaluating")
    return int(command.main(words, solvers={task.TASK.name: (task.TASK, task.solve)}))


def _learn(command: str, words: list[str]) -> int:
    """Record traces, or fit an importance predictor to them."""
    room = {"trace": "tracing", "fit-importance": "learning"}[command]
    module = importlib.import_module(f"sidequest_langchain.evaluation.{room}")
    return int(module.main(words))


def _size_below(folder: Path) -> str:
    return in_units(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


def _since(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
