"""What an act of the managed cache costs in quality and saves in bytes: packing against eviction.

    python -m benchmarks.lossy_acts --model qwen2.5-coder-0.5b

A text is read, all of its rows are packed or some are evicted, and the tokens that follow are
forced, with the full cache and with what is left. Each act begins from the same text, read anew:

* all rows packed to INT8, or to INT4;
* rows evicted at random, but for the first 4 and the last 50 tokens;
* all but the first 4 and the last ones evicted (StreamingLLM's window).

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.evaluation.forcing import divergence, teacher_forced
from sidequest_langchain.evaluation.pages import write_between
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.tree import SegmentTree

from .engine_steps import Raw, request
from .machine import describe
from .prose import notes, tool_result

N_SINK, N_RECENT = 4, 50
MOST_KL = {"int8": 0.001, "int4": 0.03}
MOST_BYTES = {"int8": 0.30, "int4": 0.17}
"""Of fp32."""

Act = Callable[[SegmentTree, Segment], object]


def text_ids(engine: Engine, n_tokens: int) -> tuple[int, ...]:
    """Lines about towns and what tools say of them, no two alike."""
    lines = notes(n_tokens // 20).split("\n")
    parts = [f"{line}\n{tool_result(i)}" if i % 6 == 5 else line for i, line in enumerate(lines)]
    ids = engine.tokenizer.encode("\n".join(parts))
    if len(ids) < n_tokens:
        msg = f"the text has {len(ids)} tokens, {n_tokens} are needed"
        raise RuntimeError(msg)
    return tuple(ids[:n_tokens])


def packed(bits: int) -> Act:
    """All of a segment's rows as one block."""
    return lambda tree, segment: tree.compress(segment, range(segment.n_tokens), bits)


def kept(n_tokens: int, share: float, *, is_random: bool) -> Act:
    """A share of all rows stays: the first, the last, and at random or no others."""
    n_kept = round(share * n_tokens)
    if is_random:
        rest = range(N_SINK, n_tokens - N_RECENT)
        chosen = set(random.Random(0).sample(rest, max(0, n_kept - N_SINK - N_RECENT)))
        stays = {*range(N_SINK), *chosen, *range(n_tokens - N_RECENT, n_tokens)}
    else:
        stays = {*range(N_SINK), *range(n_tokens - n_kept + N_SINK, n_tokens)}

    def act(tree: SegmentTree, segment: Segment) -> object:
        offsets = [at for at in range(segment.n_tokens) if segment.start + at not in stays]
        return tree.evict(segment, offsets)

    return act


def measure(engine: Engine, ids: tuple[int, ...], n_context: int, acts: dict[str, Act]) -> Any:
    """Divergence from the full cache over the last tokens, and bytes of the context, by act."""
    context = ids[: n_context - 1]  # its last token is fed anew, and needs no row before
    tree = engine._core.tree

    def prepare(act: Act | None) -> float:
        engine.kv.clear()
        list(engine.stream(request(context, 1, "context")))
        before = engine.kv.usage().n_bytes
        if act is not None:
            engine._core.call(lambda: [act(tree, s) for s in list(tree.segments())]).result()
        return engine.kv.usage().n_bytes / before

    prepare(None)
    full = teacher_forced(engine, ids, n_context, scope="")
    found = {}
    for name, act in track(acts.items(), description="acts", transient=True):
        share = prepare(act)
        other = teacher_forced(engine, ids, n_context, scope="")
        this = divergence(full, other, ids[n_context:])
        found[name] = {"kl": this.kl, "kl_max": this.kl_max, "top1": this.top1, "bytes": share}
    engine.kv.clear()
    return found


def table(found: dict[str, dict[str, float]], args: argparse.Namespace) -> list[str]:
    """The figures as a table of Markdown."""
    rows = [
        f"| {name} | {one['kl']:.2g} | {one['top1']:.1%} | {one['bytes']:.3f} |"
        for name, one in found.items()
    ]
    return [
        f"{args.model}, {args.context} tokens read, {args.forced} forced after them "
        "(`python -m benchmarks.lossy_acts --docs docs/managed-cache.md`):",
        "",
        "| all rows, or those that stay | KL, nats a token | same best token | bytes of fp32 |",
        "|---|---|---|---|",
        *rows,
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--context", type=int, default=2000, help="tokens read")
    parser.add_argument("--forced", type=int, default=128, help="tokens forced after them")
    parser.add_argument("--docs", type=Path, help="page between whose marks the table goes")
    args = parser.parse_args(argv)
    engine = SideQuestChatModel(model=args.model, cache=CacheConfig(isolation="shared")).engine
    ids = text_ids(engine, args.context + args.forced)
    acts = {"int8": packed(8), "int4": packed(4)}
    for share in (0.5, 0.35, 0.2):
        for kind in ("random", "window"):
            name = f"{kind} {share:.0%}"
            acts[name] = kept(args.context - 1, share, is_random=kind == "random")
    found = measure(engine, ids, args.context, acts)
    holds = {
        name: found[name]["kl"] <= MOST_KL[name] and found[name]["bytes"] <= MOST_BYTES[name]
        for name in MOST_KL
    }
    for name, one in found.items():
        print(
            f"{name:>12}: KL {one['kl']:.2g} (most {one['kl_max']:.2g}), "
            f"top-1 {one['top1']:.1%}, {one['bytes']:.3f} of the bytes"
        )
    if args.docs is not None:
        write_between(args.docs, "lossy acts", "\n".join(table(found, args)))
    given = {name: value for name, value in vars(args).items() if name != "docs"}
    print(json.dumps({"machine": describe(), **given, "acts": found, "holds": holds}))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
