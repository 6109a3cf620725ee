"""What idles beside the running path has a say too: its last tokens are asked before it loses."""

from __future__ import annotations

import pytest

from sidequest_langchain.config import Guard, Tiers
from sidequest_langchain.policy import asking
from sidequest_langchain.policy.acts import Archive, Compress, Evict
from tests.engine.driving import ask, ids, model_of, token_bytes
from tests.engine.managing import Shadow, managed, run
from tests.engine.test_managed_faults import Switch

W = 4
TRUNK = ids(40)


def evicted_idle(facts):
    """Every third row of the branches that nobody reads, their ends left out."""
    for s in idle(facts):
        yield Evict(s.segment_id, tuple(range(0, s.n_tokens - 12, 3)))


def packed_idle(facts):
    for s in idle(facts):
        yield Compress(s.segment_id, tuple(range(s.n_tokens)), bits=4)


def archived_idle(facts):
    for s in idle(facts):
        yield Archive(s.segment_id, tuple(range(s.n_tokens)))


def idle(facts):
    return [s for s in facts.segments if s.is_idle and s.n_tokens > 16]


def grown(make_engine, n_branches=2, **settings):
    """Branches over a trunk, the last of them the latest; an engine whose policy can be set."""
    switch = Switch()
    given = {
        "budget_tokens": None,
        "budget_bytes": 2000 * token_bytes(model_of("llama")),
        "guard": Guard(max_kl=50.0, canary_tokens=W),
        "tiers": Tiers(cpu_bytes=2**24),
        "prefill_chunk": 32,
        "trigger": 0.02,
        "target": 0.01,
    }
    config = managed(switch, **(given | settings))
    engine = make_engine(model_of("llama"), config=config)
    shadow = Shadow(engine, "llama")
    paths = []
    for n in range(n_branches):
        prompt = [*TRUNK, *ids(30, seed=n + 1)]
        result = run(engine, ask(prompt, 6, call=f"b{n}", ignore_eos=True))
        paths.append((*prompt, *result.token_ids[:-1]))
    return engine, shadow, switch, paths


@pytest.mark.parametrize(("policy", "verb"), [(evicted_idle, "evict"), (packed_idle, "compress")])
def test_the_divergence_of_an_idle_path_is_that_of_plain_transformers(make_engine, policy, verb):
    engine, shadow, switch, paths = grown(
        make_engine, budget_bytes=10**6, trigger=0.01, target=0.001
    )
    tokens = paths[0]
    before = shadow.again(tokens, W)
    switch.policy = policy
    receipts = [r for r in engine.kv.manage() if r.outcome == "done"]
    after = shadow.again(tokens, W)
    kl = float((before.exp() * (before - after)).sum(-1).mean())
    assert {r.verb for r in receipts} == {verb}
    assert kl > 1e-6
    for receipt in receipts:
        assert receipt.kl == pytest.approx(kl, rel=2e-2, abs=1e-6)
        assert receipt.kl_reason == ""


def done(engine, policy, switch):
    switch.policy = policy
    return [r for r in engine.kv.manage() if r.outcome == "done"]


def test_the_guard_speaks_for_idle_paths(make_engine):
    guard = Guard(max_kl=1e-12, canary_tokens=W)
    engine, _, switch, _ = grown(make_engine, guard=guard)
    switch.policy = evicted_idle
    receipts = engine.kv.manage()
    assert receipts
    assert all(r.outcome == "refused" and "divergence" in r.reason for r in receipts)
    assert all(r.kl > 1e-12 for r in receipts)
    assert not any(s.residency for s in engine._core.tree.segments())


def test_what_is_exact_needs_no_number(make_engine):
    engine, _, switch, _ = grown(make_engine)
    [receipt] = done(engine, archived_idle, switch)
    assert (receipt.exact, receipt.kl, receipt.kl_reason) == (True, None, asking.EXACT_ACT)
    [back] = engine.kv.recall("b0")
    assert (back.verb, back.kl, back.kl_reason) == ("restore", None, asking.EXACT_ACT)


def test_a_guard_that_measures_nothing_says_so(make_engine):
    engine, _, switch, _ = grown(make_engine, guard=Guard(max_kl=None, canary_tokens=0))
    receipts = done(engine, evicted_idle, switch)
    assert receipts
    assert {(r.kl, r.kl_reason) for r in receipts} == {(None, asking.UNASKED)}


def test_a_cycle_asks_so_many_idle_paths_and_says_which_not(make_engine, monkeypatch):
    monkeypatch.setattr(asking, "MOST_IDLE_PATHS", 2)
    engine, _, switch, _ = grown(make_engine, n_branches=5)
    receipts = done(engine, evicted_idle, switch)
    assert len(receipts) == 4
    unasked = [r for r in receipts if r.kl is None]
    assert {r.kl_reason for r in unasked} == {asking.TOO_MANY}
    assert len(unasked) == 2
    latest = sorted(receipts, key=lambda r: r.segment_id)[-2:]
    assert all(r.kl is not None for r in latest), "those that were used last are asked"


def test_a_path_without_its_rows_is_not_asked(make_engine):
    engine, _, switch, _ = grown(make_engine, n_branches=3)

    def one(facts):
        first, *_ = idle(facts)
        yield Archive(first.segment_id, tuple(range(8)))

    [archived] = done(engine, one, switch)
    assert archived.exact
    receipts = done(engine, evicted_idle, switch)
    reasons = {r.segment_id: r.kl_reason for r in receipts}
    assert reasons.pop(archived.segment_id) == asking.AWAY
    assert set(reasons.values()) == {""}
