"""`python -m benchmarks.gpu_check`: every stage in turn, and one JSON document of what it found."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..machine import describe
from . import answers, holding, partials, speed
from .findings import Findings, Setting, Skipped, Status

Stage = Callable[[Setting, Findings], None]

_EPILOG = """\
stages, correctness first:
  partials    attention to one block of keys against float64, every feature and dtype
  tokens      fp32: the engine's tokens are those of transformers.generate
  halves      bf16: the engine's logits are as near to fp32's as plain bf16's are
  catalogue   tokens again, with a real model, if one is on this machine
  syncs       how often the host waits for the device in one pass
  memory      a release gives the allocator back what its receipt says
  exhaustion  where memory ends, one request fails and the tree is what it was
  copies      rows archived beside the computation come back bit for bit
  steps       ms a decode step by rows and trunk, beside transformers.generate
  prefill     prompt tokens a second by chunk, beside transformers.generate
  profile     a table of where the time goes, with --profile FILE

examples:
  python -m benchmarks.gpu_check | tail -1 > found.json
  python -m benchmarks.gpu_check --only partials,tokens
  python -m benchmarks.gpu_check --device cpu --quick     does the script itself run?

A stage that has no time left is skipped and says so. The last line of the output is one JSON
document; the exit status is 1 if a check failed or a stage broke, 2 for a wrong command line.
"""


def _catalogue(setting: Setting, findings: Findings) -> None:
    answers.check_catalogue(setting, findings, _real_model(setting))


STAGES: dict[str, Stage] = {
    "partials": partials.check_partials,
    "tokens": answers.check_tokens,
    "halves": answers.check_halves,
    "catalogue": _catalogue,
    "syncs": holding.check_syncs,
    "memory": holding.check_memory,
    "exhaustion": holding.check_exhaustion,
    "copies": holding.check_copies,
    "steps": speed.measure_steps,
    "prefill": speed.measure_prefill,
    "profile": speed.write_profile,
}
LEAST_S = {"tokens": 30, "halves": 20, "catalogue": 30, "steps": 30, "prefill": 20, "profile": 5}
"""Seconds that a stage must have left to begin at all; others need few."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else list(STAGES)
    unknown = sorted(set(chosen) - set(STAGES))
    if unknown:
        parser.error(f"no stage is called {', '.join(unknown)}; there are {', '.join(STAGES)}")
    device = _device(parser, args.device)
    begun = time.monotonic()
    setting = Setting(
        device=device, is_quick=args.quick, deadline=begun + args.budget_s, profile=args.profile
    )
    n_threads = torch.get_num_threads()
    if args.quick:  # more of them only cost on tiny matrices
        torch.set_num_threads(1)
    try:
        found = {name: _run(name, setting) for name in STAGES if name in chosen}
    finally:
        torch.set_num_threads(n_threads)
    document = {
        "benchmark": "gpu_check",
        "is_quick": args.quick,
        "machine": describe() | _accelerator(device),
        "stages": found,
        "failed": [name for name, stage in found.items() if stage["status"] == "failed"],
        "skipped": [name for name, stage in found.items() if stage["status"] == "skipped"],
        "seconds": round(time.monotonic() - begun, 1),
    }
    sys.stdout.write(json.dumps(_plain(document), allow_nan=False) + "\n")
    return 1 if document["failed"] else 0


def _run(name: str, setting: Setting) -> dict[str, Any]:
    """One stage; whatever happens in it, the others run."""
    findings, begun, reason = Findings(), time.monotonic(), None
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    status: Status = "passed"
    try:
        setting.require(0 if setting.is_quick else LEAST_S.get(name, 2), name)
        STAGES[name](setting, findings)
    except Skipped as why:
        status, reason = "skipped", str(why)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # they hold models
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        setting.forget()
    if not findings.is_ok:
        status = "failed"
    _show(name, status, reason, findings, time.monotonic() - begun)
    return {
        "status": status,
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 1),
        "checks": findings.checks,
        "figures": findings.figures,
    }


def _show(
    name: str, status: Status, reason: str | None, findings: Findings, seconds: float
) -> None:
    lines = [f"{name:11s} {status:8s}{seconds:7.1f} s  {reason or ''}".rstrip()]
    for check, facts in findings.checks.items():
        mark = "ok" if facts["ok"] else "NO"
        line = f"  {mark} {check}: {facts['found']:.3g} of at most {facts['allowed']:.3g}"
        lines.append(line if facts["ok"] else f"{line}; {facts['case']}")
    for figure, value in findings.figures.items():
        rows = value if isinstance(value, list) else [value]
        lines += [f"  -- {figure}: {row}" for row in rows]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _plain(found: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def _real_model(setting: Setting) -> PreTrainedModel:
    """The catalogue's first model that is on this machine, in float32.

    Raises:
        Skipped: There is none, or what loads it is not installed.
    """
    if setting.is_quick:
        msg = "not with --quick"
        raise Skipped(msg)
    try:
        from sidequest_langchain.models import CATALOGUE, installed  # noqa: PLC0415
        from sidequest_langchain.models.loading import load  # noqa: PLC0415
    except ImportError as error:
        msg = f"loading needs a package that is not installed: {error}"
        raise Skipped(msg) from error
    for name, entry in CATALOGUE.items():
        if installed(entry):
            return load(name, dtype="float32", device=str(setting.device)).model
    msg = "no model of the catalogue is on this machine"
    raise Skipped(msg)


def _accelerator(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        facts |= {
            "accelerator": seen.name,
            "accelerator_gib": round(seen.total_memory / 2**30, 1),
            "capability": f"{seen.major}.{seen.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def _device(parser: argparse.ArgumentParser, asked: str) -> torch.device:
    has = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if asked == "auto":
        asked = next(kind for kind, is_there in has.items() if is_there)
    if not has[asked]:
        parser.error(f"torch sees no {asked} device; the CPU can run --device cpu --quick")
    return torch.device(asked, 0) if asked == "cuda" else torch.device(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Checks the engine on an accelerator, then measures it; needs no network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "mps", "cpu"),
        default="auto",
        help="auto (the default) is the best that is there",
    )
    parser.add_argument("--quick", action="store_true", help="tiny models and little work")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=280.0,
        help="seconds for all stages; what is late is skipped (280)",
    )
    parser.add_argument("--only", help="these stages, with commas between them")
    parser.add_argument("--profile", metavar="FILE", help="write the profiler's table there")
    return parser
