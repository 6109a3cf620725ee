"""Seconds from the start of a process to the first token, for a model that is on the machine.

    python -m benchmarks.start --model qwen2.5-coder-0.5b

Each start is a process of its own; int8 and dense weights take turns. The last line of the output
is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from sidequest_langchain.models import ensure

from .machine import describe

PROGRAM = """
import sys
from sidequest_langchain import SideQuestChatModel

model = SideQuestChatModel(model=sys.argv[1], quantization=sys.argv[2], max_tokens=8)
for chunk in model.stream("Say hello."):
    if chunk.text:
        print("first", flush=True)
"""


def first_token_s(model: str, quantization: str) -> float:
    """Seconds until a new process has said something."""
    begun = time.perf_counter()
    words = [sys.executable, "-c", PROGRAM, model, quantization]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        taken = time.perf_counter() - begun
        process.stdout.read()
    if said.strip() != "first" or process.returncode:
        msg = f"the process that was timed ended with status {process.returncode}"
        raise SystemExit(msg)
    return taken


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each; %(default)s")
    args = parser.parse_args(argv)
    ensure(args.model)
    taken: dict[str, list[float]] = {"auto": [], "none": []}
    for _ in range(args.rounds):
        for quantization, times in taken.items():
            times.append(first_token_s(args.model, quantization))
            sys.stdout.write(f"quantization={quantization}: {times[-1]:.1f} s\n")
            sys.stdout.flush()
    document = {
        "benchmark": "start",
        "model": args.model,
        "first_token_s": {
            name: {"median": statistics.median(times), "all": times}
            for name, times in taken.items()
        },
        "machine": describe(),
    }
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
