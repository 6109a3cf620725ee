"""What a stage finds: checks that hold or do not, figures, and how much time is left."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Status = Literal["passed", "failed", "skipped"]


class Skipped(Exception):
    """The stage cannot run here, or not in the time left; what it found so far counts."""


@dataclass
class Findings:
    """Of one stage. A check that was made often keeps its worst case only."""

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def at_most(self, name: str, found: float, allowed: float, case: str = "") -> None:
        """Check that a number is small enough; a NaN is not."""
        old = self.checks.get(name)
        share = found / allowed if allowed else float("inf") if found else 0.0
        # A NaN is the worst there is, and stays.
        if old is None or not (share <= old["share"] or math.isnan(old["share"])):
            ok = found <= allowed
            worst = {"ok": ok, "found": found, "allowed": allowed, "share": share, "case": case}
            self.checks[name] = worst | {"n_cases": 0 if old is None else old["n_cases"]}
        self.checks[name]["n_cases"] += 1

    def holds(self, name: str, *, ok: bool, case: str = "") -> None:
        """Check that something is so."""
        self.at_most(name, 0.0 if ok else 1.0, 0.0, case)

    @property
    def is_ok(self) -> bool:
        """Whether every check holds."""
        return all(check["ok"] for check in self.checks.values())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how the stages run."""

    device: torch.device
    is_quick: bool
    """Tiny models and little work: to see that the script itself runs."""
    deadline: float
    """On the clock of `time.monotonic`."""
    profile: str | None = None
    """The file that the profiler's table goes to."""

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def require(self, seconds: float, what: str) -> None:
        """Go on only if so much time is left.

        Raises:
            Skipped: It is not.
        """
        if self.left_s() < seconds:
            msg = f"{what}: needs about {seconds:.0f} s, {max(0.0, self.left_s()):.0f} s are left"
            raise Skipped(msg)

    def pick(self, quick: Any, full: Any) -> Any:
        """One of two sizes of the same work."""
        return quick if self.is_quick else full

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def seconds(self, begun: float) -> float:
        """Seconds since `begun` on `time.perf_counter`, all work of the device included."""
        self.wait()
        return time.perf_counter() - begun

    def forget(self) -> None:
        """Give the allocator's unused memory back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()
