"""The travel planner's command line: runs the problems asked for and says what came of them.

0 is success, whether or not a plan was found; 1 a failure, in one line on standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import SideQuestError

from .console import shown, watcher_for
from .options import Options, parse
from .planner import Run, Watcher, run_chain_of_thought, run_planner
from .report import as_json, calls_as_json, write_calls
from .tables import comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: The words; `None` takes those of this process.

    Returns:
        The exit status.
    """
    try:
        return _run(parse(argv))
    except SideQuestError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1


def _run(options: Options) -> int:
    console = Console()
    model = _loaded(options, console)
    with shown(watcher_for(console, is_quiet=options.is_quiet)) as watcher:
        runs = _runs(options, model, watcher)
    if len(runs) > 1 and not options.is_quiet:
        console.print(comparison(runs))
    if options.record is not None:
        write_calls(options.record, calls_as_json(runs, model, options.model))
    if options.is_json:
        sys.stdout.write(json.dumps(as_json(runs, options.model)) + "\n")
    return 0


def _loaded(options: Options, console: Console) -> SideQuestChatModel:
    """The model with its weights in memory, so that no run is charged for loading them."""
    model = SideQuestChatModel(model=options.model)
    if options.is_quiet:
        model.kv.usage()
    elif console.is_terminal:
        with console.status(f"loading {options.model}"):
            model.kv.usage()
    else:
        console.print(f"loading {options.model}", highlight=False)
        model.kv.usage()
    return model


def _runs(options: Options, model: SideQuestChatModel, watcher: Watcher) -> list[Run]:
    runs = []
    for problem, seed in zip(options.problems, options.seeds, strict=True):
        for limits in options.limits:
            runs.append(
                run_planner(
                    model, problem, limits, watcher, seed=seed, is_replayed=options.is_replayed
                )
            )
        if options.has_baseline:
            runs.append(run_chain_of_thought(model, problem, watcher))
    return runs


if __name__ == "__main__":
    sys.exit(main())
