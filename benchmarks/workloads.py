"""What is measured: a workload is a name, what it stands for, and the work it makes.

Contestants get the same fixed work. Add a workload by adding it to `WORKLOADS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .prose import TOOLS, notes, tool_result
from .work import Call, Step, Turn, Work

PLANNER_RECORD = Path(__file__).parent / "data" / "planner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload; it is made in full, or small for a smoke run."""

    about: str
    """What it stands for, for readers of the figures."""
    make: Callable[[bool], Work]
    """Makes the work; small, if asked."""
    takes: str
    """How long a round of all contestants takes on two cores, about."""


def planner(is_small: bool, record: Path = PLANNER_RECORD) -> Work:  # noqa: FBT001
    """The recorded calls of a run of the Tree-of-Thoughts planner, prunes included.

    Raises:
        ValueError: The file is no such record.
    """
    found = json.loads(record.read_text(encoding="utf-8"))
    n_steps, n_calls = (2, 3) if is_small else (None, None)
    steps = tuple(
        Step(calls=tuple(map(_call, step["calls"][:n_calls])), released=tuple(step["released"]))
        for step in found["steps"][:n_steps]
    )
    return Work(name="planner", steps=steps)


def agent(is_small: bool) -> Work:  # noqa: FBT001
    """A tool-using agent: every turn brings a tool's result, and its own answers stay."""
    n_turns = 2 if is_small else 20
    turns: list[Turn] = [
        {"role": "system", "content": f"You are a careful assistant. {TOOLS}"},
        {"role": "user", "content": "Find out which warehouse should ship the spring order."},
    ]
    steps = []
    for i in range(n_turns):
        if i:
            turns.append({"role": "assistant", "answer_of": i - 1})
            turns.append({"role": "user", "content": tool_result(i)})
        call = Call(turns=tuple(turns), max_tokens=8 if is_small else 48)
        steps.append(Step(calls=(call,)))
    return Work(name="agent", steps=tuple(steps), is_streamed=True)


def chat(is_small: bool) -> Work:  # noqa: FBT001
    """One stream: nothing to share, nothing to batch."""
    turns: tuple[Turn, ...] = (
        {"role": "system", "content": "You are a helpful assistant."},
        {
            "role": "user",
            "content": f"{notes(1 if is_small else 6)}\n\nWrite a long story, of at least five "
            "hundred words, about a traveller who visits all of these towns.",
        },
    )
    call = Call(turns=turns, max_tokens=8 if is_small else 128)
    return Work(name="chat", steps=(Step(calls=(call,)),), is_streamed=True)


def fork(is_small: bool) -> Work:  # noqa: FBT001
    """A long trunk and eight short branches at the same time."""
    trunk: tuple[Turn, ...] = (
        {"role": "system", "content": "You answer questions about the notes, in a sentence."},
        {"role": "user", "content": f"Read these notes.\n\n{notes(4 if is_small else 282)}"},
        {"role": "assistant", "content": "I have read them. What is your question?"},
    )
    # no two of them begin alike: what they share is the trunk, and nothing else
    words = ("Which", "Where", "How", "Who", "Does", "Name", "Compare", "Explain")
    calls = tuple(
        Call(
            turns=(
                *trunk,
                {
                    "role": "user",
                    "content": f"{word} among the towns of the notes: say what you found about "
                    "their markets and inns, and why it matters to a traveller.",
                },
            ),
            max_tokens=4 if is_small else 32,
        )
        for word in words[: 3 if is_small else None]
    )
    return Work(name="fork", steps=(Step(calls=calls),), is_streamed=True)


WORKLOADS: dict[str, Workload] = {
    "planner": Workload(
        about="a recorded run of the Tree-of-Thoughts planner: siblings, evaluations, prunes",
        make=planner,
        takes="5 minutes",
    ),
    "agent": Workload(
        about="20 turns of an agent: each adds a tool's result and its own last answer",
        make=agent,
        takes="10 minutes",
    ),
    "chat": Workload(
        about="one streamed answer of 128 tokens to a prompt of about 200",
        make=chat,
        takes="3 minutes",
    ),
    "fork": Workload(
        about="a trunk of about 7,000 tokens and eight questions about it at the same time",
        make=fork,
        takes="20 minutes",
    ),
}


def _call(call: dict[str, Any]) -> Call:
    return Call(
        turns=tuple(call["turns"]),
        max_tokens=call["max_tokens"],
        branch=call["branch"],
        parent=call["parent"],
    )
