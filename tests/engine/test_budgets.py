"""What a budget is a share of, and what is said where it cannot hold what is protected."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sidequest_langchain.config import CacheConfig, Protection
from sidequest_langchain.engine import managing, passes
from sidequest_langchain.errors import BudgetExceeded, ConfigError
from sidequest_langchain.kinds import TokenKind
from tests.engine.driving import ask, ids, model_of, right_answer, run, token_bytes
from tests.engine.managing import LITTLE, managed


def test_a_share_of_the_memory_holds_without_a_policy_too(make_engine, monkeypatch):
    size = token_bytes(model_of("llama"))
    monkeypatch.setattr(managing, "memory_of", lambda device: 1000 * size)
    engine = make_engine(model_of("llama"), config=CacheConfig(budget_share=0.05))
    for seed in range(4):
        result = run(engine, ask(ids(30, seed=seed), 4))
        assert result.token_ids == right_answer("llama", ids(30, seed=seed), 4)
    assert 0 < engine.kv.usage().n_bytes <= 50 * size


@pytest.mark.parametrize("policy", [None, "staged"])
def test_a_share_of_a_memory_that_cannot_be_told_is_refused(policy):
    adapter = SimpleNamespace(device=torch.device("mps"))
    config = CacheConfig(policy=policy, budget_share=0.5)
    with pytest.raises(ConfigError, match=r"budget_share=0.5 .*'mps' cannot be told; give budget_"):
        managing.manager_for(adapter, None, config, None)
    with pytest.raises(ConfigError, match="cannot be told"):
        passes.Passes(adapter, None, config)
    assert managing.budget_of(adapter, CacheConfig(budget_bytes=7)) == 7


def test_a_tool_call_that_outgrows_the_budget_is_named(make_engine):
    """The newest call is protected: what helps is to let it go, and the message says how."""
    kinds = bytes([TokenKind.QUESTION] * 20 + [TokenKind.TOOL_CALL] * 100)
    request = replace(ask(ids(120), 8), kinds=kinds)
    config = managed(protection=replace(LITTLE, newest_tool_call=True))
    engine = make_engine(model_of("llama"), config=config)
    with pytest.raises(BudgetExceeded, match="of the newest tool call") as caught:
        run(engine, request)
    advice = "protection=Protection(newest_tool_call=False)"
    assert advice in str(caught.value)
    less = make_engine(model_of("llama"), config=managed(protection=LITTLE))
    assert run(less, request).n_generated_tokens


def test_other_rows_are_not_called_a_tool_call(make_engine):
    kinds = bytes([TokenKind.SYSTEM] * 120)
    engine = make_engine(model_of("llama"), config=managed(protection=Protection(recent_window=8)))
    with pytest.raises(BudgetExceeded, match=r"Protection\(...\)") as caught:
        run(engine, replace(ask(ids(120), 8), kinds=kinds))
    assert "tool call" not in str(caught.value)
