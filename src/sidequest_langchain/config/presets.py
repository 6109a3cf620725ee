"""Named settings to begin with. A budget is always the user's to say."""

from __future__ import annotations

from typing import Any

from sidequest_langchain.config.parts import Guard, Protection, Schedule

PRESETS: dict[str, dict[str, Any]] = {
    # Evicts only what the guard hardly notices. Both precisions: where INT8 alone does not fit,
    # INT4 changes less than losing rows does.
    "conservative": {
        "policy": "staged",
        "trigger": 0.9,
        "target": 0.85,
        "guard": Guard(max_kl=0.01),
        "protection": Protection(recent_window=128, ends=0.15),
    },
    "balanced": {"policy": "staged"},
    # Tightens as the sequence grows, and lets more go at a time.
    "aggressive": {
        "policy": "staged",
        "target": 0.6,
        "guard": Guard(max_kl=0.5, canary_tokens=4),
        "protection": Protection(recent_window=32, ends=0.05),
        "schedule": Schedule(full_until=512, loss=0.1, floor=0.2, early_until=256, late_from=4000),
    },
}
