"""Forced replies (FORCE): the model's forward is real, its choice of token is scripted.

A forward hook raises one logit far above the others, so K/V, positions and log-probabilities
of the other tokens stay those of the model. Plain `generate` and the engine call the same
forward, so both are forced alike, and the oracle still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

LIFT = 40.0
"""How far the forced logit stands above the best real one: beyond what sampling can pick."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits: the token that was fed, and where."""

    position: int
    token_id: int


Rule: TypeAlias = Callable[[Row], int | None]
"""Which token follows a row; `None` leaves the choice to the model."""
Scripts: TypeAlias = Sequence[int] | Mapping[int, Sequence[int]] | Rule


class Ambiguous(AssertionError):
    """Two scripts want different tokens after the same row; a hook cannot tell them apart."""


@contextmanager
def force(model: PreTrainedModel, scripts: Scripts) -> Iterator[None]:
    """Make `model` choose as scripted, inside of the block.

    Args:
        model: Forced in place; the hook goes when the block ends.
        scripts: One of
            * a list of ids: the reply to every prompt in this block. It begins at the first
              row that asks for logits, so all prompts must be of one length;
            * `{prompt_length: ids}`: a reply for each prompt length, also at the same time. A
              row is told by its position and by the token fed there: replies to equally long
              prompts cannot differ, and no reply may hold the last token of a longer prompt
              at that prompt's last position;
            * a function of a `Row`, for any number of streams: `chain({a: b, b: c})`.

    After the end of a script the model chooses for itself: put the end-of-turn id last where
    the reply shall end.
    """
    rule = _rule(scripts)
    hook = model.register_forward_hook(
        lambda _module, _args, given, output: _lift(rule, given, output), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


def chain(follows: Mapping[int, int]) -> Rule:
    """A rule by the last token alone; streams with distinct tokens never meet."""
    return lambda row: follows.get(row.token_id)


def _rule(scripts: Scripts) -> Rule:
    if callable(scripts):
        return scripts
    if isinstance(scripts, Mapping):
        return _by_length({n: tuple(ids) for n, ids in scripts.items()})
    return _from_first_row(tuple(scripts))


def _by_length(scripts: Mapping[int, tuple[int, ...]]) -> Rule:
    def rule(row: Row) -> int | None:
        begun = {n: row.position - (n - 1) for n in scripts}
        # A reply under way is told by its last token and goes before one that would begin here.
        wanted = {
            scripts[n][i]
            for n, i in begun.items()
            if 0 < i < len(scripts[n]) and scripts[n][i - 1] == row.token_id
        }
        if len(wanted) > 1:
            msg = f"scripts disagree on what follows token {row.token_id} at {row.position}"
            raise Ambiguous(msg)
        beginning = (scripts[n][0] for n, i in begun.items() if i == 0 and scripts[n])
        return next(iter(wanted)) if wanted else next(beginning, None)

    return rule


def _from_first_row(script: tuple[int, ...]) -> Rule:
    first: list[int] = []

    def rule(row: Row) -> int | None:
        if not first:
            first.append(row.position)
        i = row.position - first[0]
        return script[i] if 0 <= i < len(script) else None

    return rule


def _lift(rule: Rule, given: Mapping[str, Any], output: Any) -> Any:
    """Lift the logits `[B, K, V]` of the rows that `rule` knows; returns the changed output."""
    rows = _sampled_rows(given)
    logits: Tensor = output.logits.clone()
    for b, line in enumerate(rows):
        for k, row in enumerate(line, start=logits.shape[1] - len(line)):
            token_id = rule(row)
            if token_id is not None:
                logits[b, k, token_id] = logits[b, k].max() + LIFT
    output.logits = logits
    return output


def _sampled_rows(given: Mapping[str, Any]) -> list[list[Row]]:
    """The rows, `B` lists, whose logits a caller samples from: the last ones of the output.

    Without `logits_to_keep` that is the last row, though logits of all of them are there.
    """
    ids: Tensor = given["input_ids"]
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)
    positions = positions.expand_as(ids)
    keep = given.get("logits_to_keep", 0)
    if not isinstance(keep, Tensor):
        keep = torch.arange(ids.shape[1], device=ids.device)[-max(keep, 1) :]
    return [
        [Row(position, token_id) for position, token_id in zip(*line, strict=True)]
        for line in zip(positions[:, keep].tolist(), ids[:, keep].tolist(), strict=True)
    ]
