"""`sidequest trace`: records what attention each token got, and what was known of it before."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from sidequest_langchain.chat.model import SideQuestChatModel
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation.command import TASKS, progress, reported, require_known
from sidequest_langchain.evaluation.sample import Sample, sample_of
from sidequest_langchain.models.catalogue import DEFAULT_MODEL
from sidequest_langchain.policy.recording import EVERY, HORIZON
from sidequest_langchain.policy.traces import Cycle, Trace

_DEFAULT_TASKS = "revival,replay,needle"
_ABOUT = """\
Hold conversations of `sidequest eval` with the full cache, and write down at intervals what was
known of every token that a policy could have evicted, and the mean attention that it got from the
queries that came next. `sidequest fit-importance` learns from it.

No token id and no text is written: attention, norms of keys and values, positions, and which kind
of message each token stands in. That tells how long messages were, and not what they said.
"""
_EXAMPLES = """\
examples:
  sidequest trace                            four samples each of three tasks: minutes
  sidequest trace --samples 8                goes on: samples that are in the file stay
  sidequest trace --tasks keys,fairness --seed 1 --out others.safetensors
  sidequest fit-importance trace.safetensors
"""


def main(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    args = _parser().parse_args(argv)
    return reported(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    names = list(dict.fromkeys(args.tasks.split(",")))
    require_known("task", names, list(TASKS))
    for name, least in (("samples", 1), ("tokens", 50), ("every", 1), ("horizon", 2)):
        if getattr(args, name) < least:
            msg = f"--{name} must be at least {least}, found {getattr(args, name)}"
            raise ConfigError(msg)
    settings = {name: getattr(args, name) for name in ("model", "tokens", "every", "horizon")}
    trace = _begun(args.out, settings)
    with progress() as say:
        say(f"loading {args.model}")
        model = SideQuestChatModel(
            model=args.model, temperature=0.0, cache_config=CacheConfig(observe=True)
        )
        done = set(trace.samples)
        for number in range(args.samples):
            for name in names:
                key = f"{name} {args.seed} {number}"
                if key in done:
                    continue
                say(f"{key} of {args.samples} samples a task")
                sample = sample_of(
                    TASKS[name],
                    seed=args.seed,
                    number=number,
                    n_tokens=args.tokens,
                    count=_counter(model),
                )
                found = record(model, sample, key, every=args.every, horizon=args.horizon)
                trace = Trace(settings=settings, cycles=(*trace.cycles, *found))
                trace.save(args.out)
    n_rows = sum(len(cycle.future) for cycle in trace.cycles)
    sys.stdout.write(
        f"{args.out} holds {len(trace.samples)} samples: {len(trace.cycles)} moments, {n_rows:,} "
        f"rows, {args.out.stat().st_size:,} bytes\n"
    )
    return 0


def record(
    model: SideQuestChatModel, sample: Sample, name: str, *, every: int, horizon: int
) -> list[Cycle]:
    """Hold one conversation, and return what was recorded of it.

    Args:
        model: Observes its cache, and does nothing else with it meanwhile.
        sample: Held on a thread of its own, which is cleared at the end.
        name: Of the sample, in the trace.
        every: Observed queries between two moments.
        horizon: Observed queries that make the future of a moment.

    Raises:
        ConfigError: The model neither manages nor observes its cache.
    """
    config: RunnableConfig = {"configurable": {"thread_id": name}}
    messages: list[BaseMessage] = []
    protection = model.engine.config.protection
    with model.kv.recording(name, protection, every=every, horizon=horizon) as recorder:
        for ask in sample.asks:
            messages += ask.messages
            messages.append(model.invoke(messages, config, max_tokens=ask.max_tokens))
    model.kv.clear(name)
    return recorder.cycles


def _begun(path: Path, settings: dict[str, Any]) -> Trace:
    """What an earlier run left in the file.

    Raises:
        ConfigError: It is of other settings, or no trace.
    """
    if not path.exists():
        return Trace(settings=settings)
    trace = Trace.load(path)
    if dict(trace.settings) != settings:
        msg = (
            f"{path} was made with other settings ({dict(trace.settings)}); give another --out, "
            f"or these settings again: {settings}"
        )
        raise ConfigError(msg)
    return trace


def _counter(model: SideQuestChatModel) -> Callable[[str], int]:
    tokenizer = model.engine.tokenizer
    return lambda text: len(tokenizer.encode(text, control_tokens=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidequest trace",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tasks", default=_DEFAULT_TASKS, metavar="A,B",
        help=f"%(default)s; there are {', '.join(TASKS)}")  # fmt: skip
    add("--samples", type=int, default=4, metavar="N", help="samples of a task (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="another seed: other samples (0)")
    add("--tokens", type=int, default=1500, metavar="N",
        help="tokens of a sample's context, about (%(default)s)")  # fmt: skip
    add("--model", default=DEFAULT_MODEL, metavar="M",
        help="catalogue name, folder, .gguf file or Hub id (%(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path("trace.safetensors"), metavar="FILE",
        help="samples that are in it are not run again (%(default)s)")  # fmt: skip
    add("--every", type=int, default=EVERY, metavar="N",
        help="observed queries between two moments (%(default)s)")  # fmt: skip
    add("--horizon", type=int, default=HORIZON, metavar="N",
        help="observed queries whose attention is the target (%(default)s)")  # fmt: skip
    return parser
