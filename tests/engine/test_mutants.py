"""The checks of `test_exact` find faults: each runs here on an engine that was broken on purpose.

A mutant that survives says that a check has gone blind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine import attention_hook, scheduler
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.sequence import Sequence as EngineSequence
from sidequest_langchain.errors import CacheCorrupted, UnsupportedModelError
from sidequest_langchain.kv import sharing, tree_attention
from sidequest_langchain.kv.radix import RadixTree
from sidequest_langchain.kv.segment import Segment, n_common
from sidequest_langchain.kv.step_plan import StepPlan
from sidequest_langchain.kv.tree import SegmentTree
from tests.engine import checks
from tests.engine.driving import model_of

MakeEngine: TypeAlias = Callable[..., Engine]
Patch: TypeAlias = pytest.MonkeyPatch
Mutant: TypeAlias = Callable[[Patch], None]


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Mutant:
    """Replace a function by `around(original, *args)`."""

    def mutate(patch: Patch) -> None:
        original = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        patch.setattr(owner, name, function)

    return mutate


def features(**change: Callable[[Any], Any]) -> Mutant:
    """Let every layer see another window, softcap, ... than it asked for."""

    def around(read: Callable[..., Any], *args: Any) -> Any:
        found = read(*args)
        return dataclasses.replace(
            found, **{name: alter(getattr(found, name)) for name, alter in change.items()}
        )

    return wrapped(attention_hook, "read_features", around)


def match_off_by(change: int) -> Mutant:
    """The reused prefix is longer or shorter than what is equal."""

    def around(match: Any, self: RadixTree, scope: str, ids: Sequence[int]) -> Any:
        found, n = match(self, scope, ids)
        if found is not None and found.start < n + change <= min(found.end, len(ids)):
            n += change
        return found, n

    return wrapped(RadixTree, "match", around)


def match_across_scopes(patch: Patch) -> None:
    def around(match: Any, self: RadixTree, scope: str, ids: Sequence[int]) -> Any:
        return match(self, next(iter(self._roots), scope), ids)

    wrapped(RadixTree, "match", around)(patch)


def positions_from_rows(patch: Patch) -> None:
    def positions(self: StepPlan) -> list[int]:
        return [row.tip.n_rows + i for row in self.rows for i in range(row.n_new)]

    patch.setattr(StepPlan, "positions", positions)


def rerun_one_position_late(patch: Patch) -> None:
    def positions(self: StepPlan) -> list[int]:
        return [
            row.position + (not row.is_stored) + i for row in self.rows for i in range(row.n_new)
        ]

    patch.setattr(StepPlan, "positions", positions)


def siblings_visible(patch: Patch) -> None:
    """The stored trunk grows in place: a branch attends to its siblings' tokens."""

    def around(path: Any, self: Segment) -> list[Segment]:
        siblings = self.parent.children if self.parent else ()
        others = [s for s in siblings if s is not self and s.n_rows]
        return [*path(self)[:-1], *others, self]

    wrapped(Segment, "path", around)(patch)


class NoCopies(TorchFunctionMode):
    """`clone` hands out the view it was asked to copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is torch.Tensor.clone else func(*args, **(kwargs or {}))


def split_into_views(patch: Patch) -> None:
    def around(cut: Any, self: RadixTree, segment: Segment, n_head: int) -> Segment:
        with NoCopies():
            head: Segment = cut(self, segment, n_head)
        return head

    wrapped(RadixTree, "_cut", around)(patch)


def tail_is_shifted(patch: Patch) -> None:
    """A split leaves the tail with K/V that are one row off its tokens."""

    def around(cut: Any, self: RadixTree, segment: Segment, n_head: int) -> Segment:
        head: Segment = cut(self, segment, n_head)
        if head is not segment:
            for rows in (*segment.keys, *segment.values):
                rows.copy_(rows.roll(1, dims=1))
        return head

    wrapped(RadixTree, "_cut", around)(patch)


def rerun_is_stored(patch: Patch) -> None:
    def around(next_tokens: Any, self: EngineSequence, n_most: int) -> tuple[list[int], bool]:
        return next_tokens(self, n_most)[0], True

    wrapped(EngineSequence, "next_tokens", around)(patch)


def every_chunk_is_the_last(patch: Patch) -> None:
    patch.setattr(scheduler.Share, "is_last", property(lambda self: True))


def causal_mask_missing(patch: Patch) -> None:
    def around(partial: Any, *args: Any, **given: Any) -> Any:
        return partial(*args, **{**given, "is_causal": False})

    original = tree_attention._PARTIALS["cpu"]
    patch.setitem(tree_attention._PARTIALS, "cpu", lambda *a, **k: around(original, *a, **k))


MUTANTS: dict[str, tuple[str, Callable[[Engine, str], None], Mutant]] = {
    "prefix one too long": ("llama", checks.check_partly_reused, match_off_by(1)),
    "prefix one too short": ("llama", checks.check_partly_reused, match_off_by(-1)),
    "prefix of another scope": ("llama", checks.check_scopes, match_across_scopes),
    "release skipped": (
        "llama",
        checks.check_prune_and_return,
        wrapped(RadixTree, "_free_unneeded", lambda free, *args: 0),
    ),
    "release of a parent under its child": (
        "llama",
        checks.check_release_of_inner_path,
        lambda patch: patch.setattr(
            Segment, "is_needed", property(lambda self: bool(self.paths or self.is_open))
        ),
    ),
    "rollback skipped": (
        "llama",
        checks.check_cancelled,
        wrapped(SegmentTree, "discard", lambda discard, self, path: None),
    ),
    "crop skipped": (
        "llama",
        checks.check_stop,
        wrapped(SegmentTree, "crop", lambda crop, self, path, n_rows: None),
    ),
    "room to grow kept": (
        "llama",
        checks.check_cold_and_warm,
        wrapped(Segment, "fit", lambda *_: 0),
    ),
    "positions from rows, rotary": ("llama", checks.check_partly_reused, positions_from_rows),
    "positions from rows, learned": ("gpt2", checks.check_partly_reused, positions_from_rows),
    "re-run one position late": ("llama", checks.check_cold_and_warm, rerun_one_position_late),
    "re-run stored again": ("llama", checks.check_cold_and_warm, rerun_is_stored),
    "siblings visible in turn": ("llama", checks.check_forks_in_turn, siblings_visible),
    "siblings visible together": ("llama", checks.check_forks_together, siblings_visible),
    "split into views": ("llama", checks.check_partly_reused, split_into_views),
    "tail is shifted": ("llama", checks.check_partly_reused, tail_is_shifted),
    "shared rows kept twice": (
        "llama",
        checks.check_short_common_head,
        wrapped(SegmentTree, "_share", lambda share, self, path: None),
    ),
    "shared rows one too many": (
        "llama",
        checks.check_short_common_head,
        lambda patch: patch.setattr(
            sharing, "n_common", lambda mine, theirs: min(n_common(mine, theirs) + 1, len(theirs))
        ),
    ),
    "causal mask missing": ("llama", checks.check_cold_and_warm, causal_mask_missing),
    "parts merged by their mean": (
        "llama",
        checks.check_partly_reused,
        lambda patch: patch.setattr(
            tree_attention, "merge", lambda outputs, _: outputs.float().mean(0)
        ),
    ),
    "window too wide": (
        "mistral",
        checks.check_around_windows,
        features(window=lambda w: w and w + 1),
    ),
    "window too narrow": (
        "gemma3",
        checks.check_around_windows,
        features(window=lambda w: w and w - 1),
    ),
    "window missing": ("cohere2", checks.check_around_windows, features(window=lambda _: None)),
    "window of a prefill too wide": (
        "mistral",
        checks.check_around_windows,
        wrapped(
            StepPlan,
            "visible",
            lambda visible, self, row, segment, window, device: visible(
                self, row, segment, window + 1, device
            ),
        ),
    ),
    "sinks missing": ("gpt_oss", checks.check_cold_and_warm, features(sinks=lambda _: None)),
    "softcap missing": ("gemma2", checks.check_cold_and_warm, features(softcap=lambda _: None)),
    "scaling ignored": ("granite", checks.check_cold_and_warm, features(scaling=lambda _: 0.25)),
}
AT_LOAD = (
    "causal mask missing",
    "parts merged by their mean",
    "positions from rows, rotary",
    "scaling ignored",
    "sinks missing",
    "softcap missing",
    "window missing",
)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name: str, make_engine: MakeEngine, monkeypatch: Patch) -> None:
    family, check, mutate = MUTANTS[name]
    engine = make_engine(model_of(family))
    mutate(monkeypatch)
    with pytest.raises((AssertionError, CacheCorrupted)):
        check(engine, family)


def test_mutant_of_chunks_is_found(make_engine: MakeEngine, monkeypatch: Patch) -> None:
    engine = make_engine(model_of("llama"), config=CacheConfig(prefill_chunk=7))
    every_chunk_is_the_last(monkeypatch)
    with pytest.raises(AssertionError):
        checks.check_cold_and_warm(engine, "llama")


@pytest.mark.parametrize("name", AT_LOAD)
def test_self_test_refuses_the_mutant(
    name: str, make_engine: MakeEngine, monkeypatch: Patch
) -> None:
    """What computes another attention than its model is not served at all."""
    family, _, mutate = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="load-time check"):
        make_engine(model_of(family))
    assert not model_of(family).config._attn_implementation.startswith("sidequest")
