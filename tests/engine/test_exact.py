"""Greedy answers over the tree are those of plain `generate` without a cache, in every family.

Each check recounts rows and bytes as well; `checks` says what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from tests.engine import checks
from tests.engine.driving import ask, audit, ids, model_of, n_fed, recorded, run_together, stored
from tests.support import oracle
from tests.support.tiny import FAMILIES, tiny_model

MakeEngine = Callable[..., Engine]
CHECKS = (
    checks.check_cold_and_warm,
    checks.check_partly_reused,
    checks.check_shorter_prompts,
    checks.check_conversation,
    checks.check_forks_in_turn,
    checks.check_forks_together,
    checks.check_around_windows,
    checks.check_prune_and_return,
    checks.check_logits,
    checks.check_short_common_head,
    checks.check_release_of_inner_path,
    checks.check_scopes,
    checks.check_cancelled,
    checks.check_stop,
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_exact(family: str, check: Callable[[Engine, str], None], make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(family))
    check(engine, family)
    engine.kv.clear()
    audit(engine, [])


@pytest.mark.parametrize(
    "check",
    [checks.check_partly_reused, checks.check_around_windows],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_exact_in_chunks(
    family: str, check: Callable[[Engine, str], None], make_engine: MakeEngine
) -> None:
    check(make_engine(model_of(family), config=CacheConfig(prefill_chunk=7)), family)


def test_chunks_share_a_step_with_decoding(family: str, make_engine: MakeEngine) -> None:
    """A long prompt comes in, 7 tokens a step, while two others decode; windows are passed."""
    engine = make_engine(model_of(family), config=CacheConfig(prefill_chunk=7))
    requests = [ask(ids(5, seed=1), 20), ask(ids(60, seed=2), 6), ask(ids(33, seed=3), 6)]
    with recorded(model_of(family)) as passes:
        results = run_together(engine, requests)
    for request, result in zip(requests, results, strict=True):
        checks.check_result(family, request, result)
    assert max(len(step.token_ids) for step in passes) <= 7 + 2
    assert n_fed(passes) == sum(map(len, map(stored, requests, results)))
    audit(engine, map(stored, requests, results))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [8, 16, 40])
def test_other_shapes_of_heads(n_kv_heads: int, head_dim: int, make_engine: MakeEngine) -> None:
    shape = {"num_key_value_heads": n_kv_heads, "head_dim": head_dim}
    model = tiny_model("llama", seed=n_kv_heads, **shape)
    engine = make_engine(model)
    trunk = ask(ids(20), 3)
    results = run_together(engine, [trunk])
    assert engine.kv.usage().n_bytes == 22 * 2 * 2 * n_kv_heads * head_dim * 4
    branches = [ask([*ids(20), *ids(n, seed=n)], 6) for n in (1, 5, 17)]
    for request, result in zip(branches, run_together(engine, branches), strict=True):
        assert list(result.token_ids) == oracle.greedy(model, request.prompt_ids, 6)
        results.append(result)
    audit(engine, map(stored, [trunk, *branches], results))
