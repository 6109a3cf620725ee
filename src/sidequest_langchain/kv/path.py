"""A labelled path: the way from a root to the segment that one model call ended in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidequest_langchain.kv.segment import Segment
    from sidequest_langchain.labels import StepLabel


class Path:
    """One model call's claim on the segments up to its tip. Identity, not value, compares."""

    __slots__ = ("is_released", "is_running", "label", "n_reused", "serial", "tip")

    def __init__(self, label: StepLabel, serial: int, tip: Segment, n_reused: int) -> None:
        self.label = label
        self.serial = serial
        """Counts the paths begun; never reused."""
        self.tip = tip
        self.n_reused = n_reused
        """Tokens that were resident when the call began."""
        self.is_running = True
        self.is_released = False
        """Released while a running generation or a pin still needed it."""
