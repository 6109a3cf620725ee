"""What is asked of every contestant: calls in steps, as plain values that go through a pipe.

It must import nothing but the standard library: a worker may run in an environment of a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

Turn: TypeAlias = dict[str, Any]
"""A message: `role` and `content`, or `role` and `answer_of`, the number of the call whose own
answer stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model."""

    turns: tuple[Turn, ...]
    max_tokens: int
    branch: str | None = None
    """The branch of thought it is made on; only ours makes use of it."""
    parent: str | None = None
    """The branch that `branch` continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Calls that do not depend on each other, and what is given up after them."""

    calls: tuple[Call, ...]
    released: tuple[str, ...] = ()
    """Branches given up once the calls have been answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Everything one round of one workload asks for."""

    name: str
    steps: tuple[Step, ...]
    is_streamed: bool = False
    """Whether answers are streamed, where a contestant can, so that the first token is timed."""

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls, in order; `answer_of` counts in them."""
        return tuple(call for step in self.steps for call in step.calls)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Work:
        """The opposite of `to_json`."""
        steps = tuple(
            Step(
                calls=tuple(
                    Call(**{**call, "turns": tuple(call["turns"])}) for call in step["calls"]
                ),
                released=tuple(step["released"]),
            )
            for step in values["steps"]
        )
        return cls(name=values["name"], steps=steps, is_streamed=values["is_streamed"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call with every `answer_of` replaced: what a contestant sees."""

    messages: tuple[Turn, ...]
    """`role` and `content`; a contestant's own answer has it under `answer`, too."""
    max_tokens: int
    branch: str | None
    parent: str | None


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a contestant answered."""

    text: str
    n_prompt_tokens: int
    n_generated_tokens: int
    first_token_s: float | None = None
    """From when the step's calls were due to the first token; `None`: not streamed."""
    own: Any = field(default=None, repr=False)
    """Whatever the contestant wants to see again when this answer is part of a history."""


def asked(call: Call, answers: Sequence[Answer]) -> Asked:
    """Put the contestant's own answers where a call refers to them."""
    return Asked(
        messages=tuple(_message(turn, answers) for turn in call.turns),
        max_tokens=call.max_tokens,
        branch=call.branch,
        parent=call.parent,
    )


def plain(messages: Sequence[Turn]) -> list[dict[str, str]]:
    """Messages as chat templates want them."""
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _message(turn: Turn, answers: Sequence[Answer]) -> Turn:
    if "answer_of" not in turn:
        return turn
    answer = answers[turn["answer_of"]]
    return {"role": turn["role"], "content": answer.text, "answer": answer}
