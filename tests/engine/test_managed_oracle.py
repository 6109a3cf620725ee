"""A managed cache's logits are those of plain transformers that cannot see what left.

Every family and policy, several turns, siblings over one trunk; `managing` says what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from sidequest_langchain.config import Tiers
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.policy.joining import Joiner
from sidequest_langchain.policy.registry import policy_names
from tests.engine.driving import ask, ids, model_of, token_bytes
from tests.engine.managing import Shadow, managed, run, run_together
from tests.support.tiny import FAMILIES

MakeEngine = Callable[..., Engine]
POLICIES = [name for name in policy_names() if name != "none"]
PAIRS = list(zip(FAMILIES, cycle(POLICIES), strict=False))


def turns(engine: Engine, n: int = 3, n_prompt: int = 70, n_new: int = 24) -> None:
    """A conversation, each prompt the last one, its answer and more; then one back from the middle.

    That one is cut off inside a segment of which rows are gone.
    """
    prompt = ids(n_prompt)
    for turn in range(n):
        result = run(engine, ask(prompt, n_new, ignore_eos=True))
        prompt = [*prompt, *result.token_ids, *ids(9, seed=20 + turn)]
    run(engine, ask([*ids(n_prompt)[: n_prompt // 2 + 3], *ids(12, seed=40)], 12, ignore_eos=True))


def siblings(engine: Engine) -> None:
    """Three branches of a trunk at once, then one of them goes on, and the trunk alone."""
    trunk = ids(64, seed=3)  # whole chunks: nobody computes a part of it twice
    branches = [ask([*trunk, *ids(n, seed=n)], 12, ignore_eos=True) for n in (4, 9, 17)]
    first = run_together(engine, branches)[0]
    run(engine, ask([*branches[0].prompt_ids, *first.token_ids, *ids(5, seed=31)], 10))
    run(engine, ask(trunk, 6, ignore_eos=True))


def check(make_engine: MakeEngine, family: str, *steps: Any, **settings: Any) -> Shadow:
    engine = make_engine(model_of(family), config=managed(**settings))
    shadow = Shadow(engine, family)
    for step in steps:
        step(engine)
    n_blind = shadow.check()
    assert n_blind > 20, "hardly anything was evicted"
    shadow.check_books()
    return shadow


@pytest.mark.parametrize(("family", "policy"), PAIRS)
def test_evicted_rows_are_as_masked(family: str, policy: str, make_engine: MakeEngine) -> None:
    check(make_engine, family, turns, policy=policy)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_siblings_over_an_evicted_trunk(family: str, make_engine: MakeEngine) -> None:
    check(make_engine, family, siblings, turns, policy="h2o", budget_tokens=170)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str, make_engine: MakeEngine) -> None:
    check(make_engine, "llama", siblings, turns, policy=policy, budget_tokens=150)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3", "gpt_oss", "cohere2"])
def test_every_head_its_own(family: str, make_engine: MakeEngine) -> None:
    shadow = check(make_engine, family, turns, policy="snapkv", eviction="per_head")
    by_head = [
        value for event in shadow.events if event.kind == "heads" for value in event.rows.values()
    ]
    assert any(bool(value.any() and not value.all()) for value in by_head), "heads do not differ"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "olmo2"])
@pytest.mark.parametrize("policy", ["staged", "h2o"])
def test_packed_rows_are_as_quantised(family: str, policy: str, make_engine: MakeEngine) -> None:
    """Long turns, so that whole groups of 64 rows are packed to INT8, INT4, and then evicted."""
    shadow = check(
        make_engine,
        family,
        lambda engine: turns(engine, n_prompt=230, n_new=40),
        siblings,
        policy=policy,
        tiers=Tiers(),
        budget_tokens=None,
        budget_bytes=160 * token_bytes(model_of(family)),
        prefill_chunk=64,
        compress_first=policy != "staged",
    )
    packed = [r.bits for r in shadow.receipts if r.verb == "compress"]
    assert {4, 8} <= set(packed)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_hiding_is_evicting(
    family: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are only masked: the same acts, token for token the same answers."""
    # Rows that stay keep neighbours from becoming one segment, and it is released as a whole.
    monkeypatch.setattr(Joiner, "join", lambda self: None)
    said = []
    for mask_only in (False, True):
        shadow = check(make_engine, family, turns, policy="h2o", mask_only=mask_only)
        acts = [(r.runs, r.step, r.outcome) for r in shadow.receipts]
        said.append((acts, [(one.tokens, one.logits) for one in shadow.said]))
        assert {r.verb for r in shadow.receipts} == {"hide" if mask_only else "evict", "release"}
    (evicted, first), (hidden, second) = said
    assert evicted == hidden
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    assert (
        max(float((a - b).abs().max()) for (_, a), (_, b) in zip(first, second, strict=True)) < 3e-4
    )
