"""What int8 weights change and what they gain, on this processor.

    python -m benchmarks.int8_weights --model qwen2.5-coder-0.5b

* divergence from the dense model over 2,000 tokens, by how many of the three slices of an
  activation are used;
* how far the logits of one text differ between one pass and many small ones, dense and int8: what
  an answer depends on its batch-mates by;
* a pass over 1 to 256 tokens, dense and int8 in turn.

The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sidequest_langchain.models import int8, slicing
from sidequest_langchain.models.loading import load

from .machine import describe

WIDTHS = (1, 2, 4, 8, 64, 256)


def logits(model: Any, ids: Sequence[int]) -> Tensor:
    """fp32 logits of one pass, `[S, V]`."""
    out: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return out


def read(model: Any, ids: Sequence[int]) -> None:
    """One pass as a prefill makes it: logits of the last token only."""
    model(input_ids=torch.tensor([list(ids)]), use_cache=False, logits_to_keep=1)


def logits_in_pieces(model: Any, ids: Sequence[int], n_first: int) -> Tensor:
    """fp32 logits of a pass over the first tokens and one for each of the others, `[S, V]`."""
    cache = DynamicCache(config=model.config)
    ends = [n_first, *range(n_first + 1, len(ids) + 1)]
    found, at = [], 0
    for end in ends:
        part = torch.tensor([list(ids[at:end])])
        found.append(model(input_ids=part, cache=cache, use_cache=True).logits[0])
        at = end
    return torch.cat(found)


def divergence(dense: Any, other: Any, ids: Sequence[int]) -> tuple[float, float]:
    """Mean KL(dense || other) in nats a token, and the share of equal best tokens."""
    total = n_same = 0.0
    for at in range(0, len(ids), 500):  # the logits of all at once take gigabytes
        part = ids[at : at + 500]
        p, q = (torch.log_softmax(logits(model, part), -1) for model in (dense, other))
        total += float((p.exp() * (p - q)).sum())
        n_same += float((p.argmax(-1) == q.argmax(-1)).sum())
    return total / len(ids), n_same / len(ids)


@contextmanager
def slices(n: int) -> Iterator[None]:
    """Use only the first of the slices of activations."""
    real = slicing.product

    def cut(codes: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        n_rows = len(codes) // slicing.N_SLICES
        coarse = codes.clone()
        coarse[: (slicing.N_SLICES - n) * n_rows] = slicing.ZERO  # the finest come first
        return real(coarse, packed, scales, zeros)

    int8.product = cut
    try:
        yield
    finally:
        int8.product = real


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def measured(dense: Any, ints: Any, ids: Sequence[int], rounds: int) -> dict[str, Any]:
    """Everything, as plain values."""
    found: dict[str, Any] = {"n_tokens": len(ids), "slices": {}, "widths": {}}
    for n in (1, 2, 3):
        with slices(n):
            kl, same = divergence(dense, ints, ids)
            text = ids[:240]
            apart = (logits(ints, text) - logits_in_pieces(ints, text, 160)).abs()
        found["slices"][n] = {
            "kl": kl,
            "same_best": same,
            "apart_mean": float(apart.mean()),
            "apart_max": float(apart.max()),
        }
        _say(f"{n} slices", found["slices"][n])
    apart = (logits(dense, ids[:240]) - logits_in_pieces(dense, ids[:240], 160)).abs()
    found["dense"] = {"apart_mean": float(apart.mean()), "apart_max": float(apart.max())}
    _say("dense", found["dense"])
    for width in WIDTHS:
        times: dict[str, list[float]] = {"dense": [], "int8": []}
        for _ in range(rounds + 1):  # the first one warms up
            for name, model in (("dense", dense), ("int8", ints)):
                times[name].append(seconds(lambda m=model, w=width: read(m, ids[:w])))
        medians = {name: statistics.median(t[1:]) for name, t in times.items()}
        ratios = [d / i for d, i in zip(times["dense"][1:], times["int8"][1:], strict=True)]
        found["widths"][width] = {**medians, "ratio": statistics.median(ratios)}
        _say(f"{width} tokens", found["widths"][width])
    return found


def _say(what: str, values: dict[str, float]) -> None:
    told = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    sys.stdout.write(f"{what:10s} {told}\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2000, help="of text; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="of timings; default: %(default)s")
    parser.add_argument(
        "--text",
        type=Path,
        help="a file to read, instead of code and prose of the standard library",
    )
    args = parser.parse_args(argv)
    dense = load(args.model, dtype="float32", device="cpu")
    ints = load(args.model, device="cpu", quantization="int8")
    text = args.text.read_text(encoding="utf-8") if args.text else inspect.getsource(argparse)
    ids = dense.tokenizer.encode(text)[: args.tokens]
    with torch.no_grad():
        found = measured(dense.model, ints.model, ids, args.rounds)
    document = {
        "benchmark": "int8_weights",
        "model": args.model,
        "threads": torch.get_num_threads(),
        **found,
        "machine": describe(),
    }
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
