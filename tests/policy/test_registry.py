"""Policies by name, and a user's own in ten lines."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy import registry
from sidequest_langchain.policy.acts import Evict
from sidequest_langchain.policy.baselines import H2O, Nothing
from sidequest_langchain.policy.registry import policy_for, policy_names, register_policy
from sidequest_langchain.policy.staged import Staged
from sidequest_langchain.policy.wrapping import CompressFirst, PerHead, Plain
from tests.policy.making import cache, evicted, segment


@pytest.fixture(autouse=True)
def policies(monkeypatch):
    """What a test registers goes when it ends."""
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))


def test_every_name_finds_a_policy_of_that_name():
    assert {"none", "lru", "window", "h2o", "snapkv", "tova", "r_kv", "random"} <= set(
        policy_names()
    )
    for name in policy_names():
        assert policy_for(name).name == name
        assert isinstance(policy_for(name).needs, frozenset)
    assert policy_for("staged") == Staged()
    assert policy_for(None) == Nothing()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no policy 'stagde'; did you mean 'staged'\?.*snapkv"):
        policy_for("stagde")
    with pytest.raises(ConfigError, match="no policy 'xyz'; known are none, lru"):
        policy_for("xyz")


def test_objects_stay_what_they_are_and_functions_are_wrapped():
    policy = H2O(is_normalised=False)
    assert policy_for(policy) is policy

    def mine(facts):
        return []

    assert policy_for(mine) == Plain(mine)
    assert policy_for(mine).name == "mine"


def test_wrapped_by_flags():
    assert policy_for("h2o", compress_first=True) == CompressFirst(H2O())
    assert policy_for("h2o", per_head=True) == PerHead(H2O())
    both = policy_for("h2o", compress_first=True, per_head=True)
    assert both == PerHead(CompressFirst(H2O()))


def test_a_name_is_taken_once():
    @register_policy("mine")
    def mine(facts):
        return []

    register_policy("mine")(mine)
    assert policy_for("mine").name == "mine"
    assert policy_names()[-1] == "mine"
    with pytest.raises(ConfigError, match="a policy named 'mine' already"):
        register_policy("mine")(lambda facts: [])
    with pytest.raises(ConfigError, match="named 'h2o' already"):
        register_policy("h2o")(mine)


def test_what_a_function_returns_is_checked():
    policy = policy_for(lambda facts: ["evict"])
    with pytest.raises(ConfigError, match="a policy returned 'evict'"):
        policy(cache(segment(1, 3)))


def test_the_example_in_the_docs_runs():
    lines = registry.__doc__.splitlines()
    code = "\n".join(line for line in lines if line.startswith("    ") or not line)
    code = textwrap.dedent(code).strip()
    assert len([line for line in code.splitlines() if line]) <= 11
    exec(compile(code, "example", "exec"), {})
    path = segment(1, "aatta", protected=np.arange(5) == 2)
    policy = policy_for("thoughts_first")
    acts = policy(cache(path, rows=1))
    assert acts == (Evict(1, (3,), "a thought"),)
    assert evicted(policy(cache(path, rows=2))) == {1: [0, 3]}
