"""The command line of the planner: words in, checked options out. It knows no model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .generator import MAX_CITIES, MIN_CITIES, generate
from .problem import ProblemError, TripProblem
from .problem_file import load_problems
from .search import MODES, Limits, Mode

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
_EXAMPLES = """\
examples:
  sidequest demo                    one trip, 5 cities, both search modes
  sidequest demo --cities 6 --seed 3 --mode dfs      a larger one, depth-first
  sidequest demo --seeds 0-4 --baseline cot    five, against no tree at all
  sidequest demo --mode beam --beam-width 4 --samples 8
  sidequest demo --json --quiet | tail -1            results as one JSON document
  sidequest demo --record calls.json                 keep the calls for a replay
  sidequest demo --problems trip_planning.json       Natural Plan's fields
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run, and how to show it."""

    model: str
    problems: tuple[TripProblem, ...]
    limits: tuple[Limits, ...]
    """One for each search mode."""
    seeds: tuple[int, ...]
    has_baseline: bool
    is_replayed: bool
    is_json: bool
    is_quiet: bool
    record: Path | None


def parse(argv: Sequence[str] | None) -> Options:
    """Read the words of a command line.

    Raises:
        ProblemError: A value is out of range, or a file cannot be read.
        SystemExit: argparse's own, after `--help` or a mistake.
    """
    given = _parser().parse_args(argv)
    for name in ("beam_width", "samples", "max_calls", "max_depth", "limit"):
        value = getattr(given, name)
        if value is not None and value < 1:
            msg = f"--{name.replace('_', '-')} must be at least 1, found {value}"
            raise ProblemError(msg)
    modes: tuple[Mode, ...] = MODES if given.mode == "both" else (given.mode,)
    seeds = _seeds(given.seeds) if given.seeds is not None else (given.seed,)
    if given.problems is not None:
        problems = tuple(load_problems(given.problems)[: given.limit])
        seeds = (seeds[0],) * len(problems)
    else:
        problems = tuple(generate(given.cities, seed) for seed in seeds)
    return Options(
        model=given.model,
        problems=problems,
        limits=tuple(
            Limits(
                mode=mode,
                beam_width=given.beam_width,
                n_samples=given.samples,
                max_depth=given.max_depth,
                max_calls=given.max_calls,
            )
            for mode in modes
        ),
        seeds=seeds,
        has_baseline=given.baseline == "cot",
        is_replayed=not given.no_replay,
        is_json=given.json,
        is_quiet=given.quiet,
        record=given.record,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidequest demo",
        description=(
            "Plan multi-city trips with a tree of thoughts on a local model. The model\n"
            "proposes the next cities and scores partial plans; a checker judges the plan.\n"
            "Branches that are given up give their KV memory back at that moment."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_problem_options(parser)
    _add_search_options(parser)
    _add_output_options(parser)
    return parser


def _add_problem_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problems")
    group.add_argument(
        "--cities",
        type=int,
        default=5,
        metavar="N",
        help=f"cities of a trip, {MIN_CITIES} to {MAX_CITIES} (default: 5)",
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="problem (default: 1)")
    group.add_argument("--seeds", metavar="LIST", help="several problems: 0-4 or 0,3,7")
    group.add_argument("--problems", type=Path, metavar="FILE", help="problems of a JSON file")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N of the file")


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"catalogue name, folder or file ({DEFAULT_MODEL})"
    )
    group.add_argument(
        "--mode",
        choices=[*MODES, "both"],
        default="both",
        help="keep the best, or backtrack from dead ends (default: both, one after the other)",
    )
    group.add_argument("--beam-width", type=int, default=3, metavar="N", help="default: 3")
    group.add_argument(
        "--samples", type=int, default=5, metavar="N", help="proposals of a thought (default: 5)"
    )
    group.add_argument("--max-depth", type=int, metavar="N", help="longest route to continue")
    group.add_argument(
        "--max-calls", type=int, default=150, metavar="N", help="model calls (default: 150)"
    )
    group.add_argument(
        "--baseline", choices=["cot"], help="also ask for the whole plan at once, no tree"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="end with one JSON document on the last line"
    )
    group.add_argument("--quiet", action="store_true", help="show nothing else")
    group.add_argument("--record", type=Path, metavar="FILE", help="write all calls as JSON")
    group.add_argument(
        "--no-replay",
        action="store_true",
        help="do not feed the calls again to measure memory without releases",
    )


def _seeds(text: str) -> tuple[int, ...]:
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            msg = f"--seeds is a list such as 0-4 or 0,3,7; found {text!r}"
            raise ProblemError(msg)
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(seeds)
