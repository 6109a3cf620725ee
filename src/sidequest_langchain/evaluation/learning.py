"""`sidequest fit-importance`: learns from traces which tokens will be needed, and says how well.

The last line of standard output is one JSON document. It must not know how training works.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation.command import reported
from sidequest_langchain.policy.fitting import SHARES, fit_cycles, gains, judge
from sidequest_langchain.policy.importance import MLP
from sidequest_langchain.policy.traces import Cycle, Trace

SCHEMA = "sidequest.importance/1"
_RIVALS = ("average", "window")
"""What a predictor replaces, and the best of the scores that need no training."""
_ABOUT = """\
Learn from traces (`sidequest trace`) how much attention a token will get, from what is known of it:
a network of one hidden layer, a few KB, on the CPU, in a minute or so. Then compare it with scores
that need no training, on samples that it has not seen: which share of the coming attention falls
on the tokens that each would keep.

Samples are held out as a whole: rows of one conversation are much alike. The predictor is called
better if it beats the moving average at every share by more than two standard errors over the
held-out samples.
"""
_EXAMPLES = """\
examples:
  sidequest trace --samples 6                             record: minutes on two cores
  sidequest fit-importance trace.safetensors              learn, and say how well
  sidequest fit-importance trace.safetensors --out mine.safetensors
                                                          and keep the weights
  sidequest fit-importance trace.safetensors --judge others.safetensors
                                                          judge on another trace

Then CacheConfig(policy="staged", budget_tokens=2048, predictor="mine.safetensors").
"""


def main(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    args = _parser().parse_args(argv)
    return reported(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    traces = [Trace.load(path) for path in args.traces]
    judged = [Trace.load(path) for path in args.judge]
    _require_alike([*args.traces, *args.judge], [*traces, *judged])
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    names = list(dict.fromkeys(cycle.sample for cycle in cycles))
    if judged:
        held_out = [name for trace in judged for name in trace.samples]
        learned = names
        cycles += [cycle for trace in judged for cycle in trace.cycles]
    else:
        held_out = held_out_of(names, args.held_out, seed=args.seed)
        learned = [name for name in names if name not in held_out]
    if not learned or not held_out:
        msg = f"{len(names)} samples cannot be split: record more with `sidequest trace --samples`"
        raise ConfigError(msg)
    train = [cycle for cycle in cycles if cycle.sample in learned]
    test = [cycle for cycle in cycles if cycle.sample in held_out]
    began_s = time.perf_counter()
    predictor = fit_cycles(train, seed=args.seed)
    seconds = time.perf_counter() - began_s
    document = {
        "schema": SCHEMA,
        **traces[0].settings,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "n_bytes": predictor.n_bytes,
        "learned_from": learned,
        "held_out": held_out,
        "rows": {"learned_from": _rows(train), "held_out": _rows(test)},
        **_judged(predictor, test),
    }
    if args.out is not None:
        predictor.save(args.out)
    _show(document, Console())
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def held_out_of(names: Sequence[str], share: float, *, seed: int) -> list[str]:
    """Samples to hold out: of each task the given share, one at least if it has several.

    Raises:
        ConfigError: The share is not between 0 and 1.
    """
    if not 0 < share < 1:
        msg = f"--held-out is a share between 0 and 1, found {share}"
        raise ConfigError(msg)
    chance = random.Random(f"held out {seed}")
    chosen: set[str] = set()
    for task in dict.fromkeys(name.split()[0] for name in names):
        own = [name for name in names if name.split()[0] == task]
        n = min(len(own) - 1, max(1, round(share * len(own))))
        chosen.update(chance.sample(own, n))
    return [name for name in names if name in chosen]


def _judged(predictor: MLP, test: Sequence[Cycle]) -> dict[str, Any]:
    gained = {name: gains(predictor, test, over=name) for name in _RIVALS}
    return {
        "recall": {
            f"{share:g}": {name: round(value, 4) for name, value in found.items()}
            for share, found in judge(predictor, test).items()
        },
        "gain": {
            name: {
                f"{share:g}": {
                    "mean": round(gain.mean, 4),
                    "standard_error": round(gain.error, 4),
                    "won": gain.n_won,
                    "of": gain.n_samples,
                }
                for share, gain in found.items()
            }
            for name, found in gained.items()
        },
        "is_better": all(gain.is_clear for gain in gained["average"].values()),
    }


def _require_alike(paths: Sequence[Path], traces: Sequence[Trace]) -> None:
    """Refuse traces of several models, and samples that are in two of them.

    Raises:
        ConfigError: As said.
    """
    seen: dict[str, Path] = {}
    for path, trace in zip(paths, traces, strict=True):
        if trace.settings.get("model") != traces[0].settings.get("model"):
            msg = (
                f"{paths[0]} is of the model {traces[0].settings.get('model')!r}, {path} of "
                f"{trace.settings.get('model')!r}: attention differs, fit one at a time"
            )
            raise ConfigError(msg)
        for name in trace.samples:
            if name in seen:
                msg = (
                    f"the sample {name!r} is in both {seen[name]} and {path}: record the one with "
                    "another --seed"
                )
                raise ConfigError(msg)
            seen[name] = path


def _rows(cycles: Sequence[Cycle]) -> int:
    return sum(len(cycle.future) for cycle in cycles)


def _show(document: dict[str, Any], console: Console) -> None:
    n_test = len(document["held_out"])
    table = Table(
        title=f"recall of future attention, {n_test} samples held out", header_style="bold"
    )
    table.add_column("score", no_wrap=True)
    for share in SHARES:
        table.add_column(f"{share:.0%} kept", justify="right")
    recall = document["recall"]
    for name in recall[f"{SHARES[0]:g}"]:
        table.add_row(name, *(f"{recall[f'{share:g}'][name]:.3f}" for share in SHARES))
    for name, found in document["gain"].items():
        gain = [found[f"{share:g}"] for share in SHARES]
        table.add_section()
        table.add_row(
            f"predicted - {name}",
            *(f"{g['mean']:+.3f} ± {g['standard_error']:.3f}" for g in gain),
        )
        table.add_row("samples won", *(f"{g['won']} of {g['of']}" for g in gain))
    console.print(table)
    verdict = "better" if document["is_better"] else "not clearly better"
    console.print(f"the predictor is {verdict} than the moving average; "
                  f"learned in {document['seconds']} s, {document['n_bytes']:,} bytes")  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidequest fit-importance",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("traces", type=Path, nargs="+", metavar="TRACE", help="files of `sidequest trace`")
    add("--out", type=Path, metavar="FILE", help="write the weights there, as safetensors")
    add("--seed", type=int, default=0, metavar="N", help="of the weights and of the split (0)")
    add("--held-out", type=float, default=0.34, metavar="SHARE",
        help="of each task's samples, not learned from (%(default)s)")  # fmt: skip
    add("--judge", type=Path, action="append", default=[], metavar="TRACE",
        help="judge on these samples instead, and learn from all others")  # fmt: skip
    return parser
