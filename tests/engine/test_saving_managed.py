"""A thread whose rows were evicted, packed, hidden or archived comes back as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sidequest_langchain.config import Guard, Tiers
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.policy.manager import EXACT
from tests.engine.clearing import asked, clear
from tests.engine.driving import ask, ids, model_of, right_answer, stored
from tests.engine.managing import managed, run
from tests.engine.saved import assert_same, contents
from tests.support.tiny import tiny_model

LLAMA = "llama"
ROOMY = managed(budget_tokens=9999, tiers=Tiers(cpu_bytes=2**24))
BARE = managed(budget_tokens=9999)


def on_tree(engine, act):
    """Do something to the tree in the engine's thread."""
    return engine._core.call(lambda: act(engine._core.tree)).result(30)


def grow(engine):
    """Two turns of thread `t`; the prompt of the third."""
    first = ask(ids(80), 9, thread="t", call="one")
    again = ask([*stored(first, run(engine, first)), *ids(30, seed=3)], 9, thread="t", call="two")
    return [*stored(again, run(engine, again)), *ids(7, seed=6)]


def inner(tree):
    """The segments with rows enough to act on."""
    return [s for s in tree.segments() if s.n_tokens >= 8]


def evicted(tree):
    for s in inner(tree):
        tree.evict(s, range(2, s.n_tokens, 3))


def packed(bits, exempt=()):
    def act(tree):
        for s in inner(tree):
            tree.compress(s, range(1, s.n_tokens - 1), bits, exempt)

    return act


def mixed(tree):
    for s in inner(tree):
        tree.compress(s, range(0, s.n_tokens, 3), 8)
        tree.compress(s, range(1, s.n_tokens, 3), 4)
        tree.evict(s, range(0, s.n_tokens, 5))


def thinned(tree):
    packed(8)(tree)
    for s in inner(tree):
        tree.evict(s, range(3, s.n_tokens, 4))


def wholly(tree):
    for s in inner(tree)[1:2]:
        tree.evict(s, range(s.n_tokens))


def hidden(tree):
    for s in inner(tree):
        tree.hide(s, range(1, s.n_tokens, 2))


def by_head(tree):
    layout = tree.layout
    for s in inner(tree):
        shape = (len(layout), layout[0].n_kv_heads, s.n_tokens)
        order = torch.rand(shape, generator=torch.Generator().manual_seed(s.n_tokens)).argsort(-1)
        tree.evict_by_head(s, order[..., : s.n_tokens // 2].sort(-1).values)


def archived(tree):
    for s in inner(tree):
        assert tree.archive_rows(s, range(1, s.n_tokens, 2))
        tree.evict(s, range(1, s.n_tokens, 2))


def packed_over_archived(tree):
    for s in inner(tree):
        assert tree.archive_rows(s, range(s.n_tokens))
        tree.compress(s, range(s.n_tokens), 4)
        tree.evict(s, range(0, s.n_tokens, 7))


ACTS = {
    "evicted": evicted,
    "int8": packed(8),
    "int4": packed(4),
    "int8, first layer exempt": packed(8, (0,)),
    "all kinds": mixed,
    "packed, then thinned": thinned,
    "a segment without rows": wholly,
    "hidden": hidden,
    "by head": by_head,
    "archived": archived,
    "packed, originals archived": packed_over_archived,
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_they_were(make_engine, tmp_path, act, dtype):
    engine = make_engine(tiny_model(LLAMA).to(dtype), config=ROOMY)
    other = make_engine(tiny_model(LLAMA).to(dtype), config=ROOMY)
    prompt = grow(engine)
    on_tree(engine, ACTS[act])
    kept = contents(engine)
    engine.kv.save("t", tmp_path)
    assert_same(contents(engine), kept)
    receipt = other.kv.load(tmp_path, "t")
    other.kv.check_integrity()
    assert_same(contents(other), kept)
    assert receipt.n_bytes == engine.kv.usage().n_bytes == other.kv.usage().n_bytes
    assert engine.kv.usage().n_tokens == other.kv.usage().n_tokens
    one, two = (run(e, ask(prompt, 8, thread="t")) for e in (engine, other))
    assert one.token_ids == two.token_ids
    assert one.n_prefilled_tokens == two.n_prefilled_tokens == 7


@pytest.mark.parametrize("act", ["archived", "packed, originals archived"])
def test_what_was_archived_can_be_recalled(make_engine, tmp_path, act):
    engine, other = (make_engine(tiny_model(LLAMA), config=ROOMY) for _ in range(2))
    grow(engine)
    whole = contents(engine)
    on_tree(engine, ACTS[act])
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    assert other.kv.recall("two")
    other.kv.check_integrity()
    assert_same(contents(other), whole)
    assert other._core.tree.archive.n_entries == 0, "nobody needs the copies any more"
    other.kv.clear()
    assert engine.kv.recall("two"), "saving took nothing away"
    assert_same(contents(engine), whole)


def test_copies_go_with_their_segments(make_engine, tmp_path):
    engine, other = (make_engine(tiny_model(LLAMA), config=ROOMY) for _ in range(2))
    grow(engine)
    on_tree(engine, archived)
    engine.kv.save("t", tmp_path)
    n_entries = engine._core.tree.archive.n_entries
    for _ in range(2):
        other.kv.load(tmp_path, "t")
        assert other._core.tree.archive.n_entries == n_entries
    other.kv.clear()
    engine.kv.clear()
    assert other._core.tree.archive.n_entries == engine._core.tree.archive.n_entries == 0


def test_without_a_tier_copies_are_left_behind(make_engine, tmp_path):
    """What left by a lossy act stays away, as it was; nothing can bring it back."""
    engine = make_engine(tiny_model(LLAMA), config=ROOMY)
    other = make_engine(tiny_model(LLAMA), config=BARE)
    prompt = grow(engine)
    on_tree(engine, archived)
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    other.kv.check_integrity()
    assert not other.kv.recall("two")
    one, two = (run(e, ask(prompt, 8, thread="t")) for e in (engine, other))
    assert one.token_ids == two.token_ids


def idle(engine):
    """As the cycle does with what nobody reads: to the archive, to come back when it is read."""

    def act(tree):
        for s in inner(tree):
            assert tree.archive_rows(s, range(s.n_tokens))
            tree.evict(s, range(s.n_tokens))
            engine._core.manager.monitor.notes_of(s).is_archived_idle = True

    on_tree(engine, act)


def test_what_idled_comes_back_before_it_is_read(make_engine, tmp_path):
    engine, other = (make_engine(model_of(LLAMA), config=ROOMY) for _ in range(2))
    prompt = grow(engine)
    idle(engine)
    engine.kv.save("t", tmp_path)
    assert other.kv.load(tmp_path, "t").n_left_out_tokens == 0
    other._core.manager._returns.costs.tokens_a_second = 1e-3
    result = run(other, ask(prompt, 8, thread="t"))
    assert result.n_prefilled_tokens == 7
    assert result.token_ids == right_answer(LLAMA, prompt, 8)


@pytest.mark.parametrize("tiers", [Tiers(), Tiers(cpu_bytes=64)])
def test_what_idled_is_computed_again_where_no_tier_takes_it(make_engine, tmp_path, tiers):
    """Never a gap that nobody asked for."""
    engine = make_engine(model_of(LLAMA), config=ROOMY)
    other = make_engine(model_of(LLAMA), config=managed(budget_tokens=9999, tiers=tiers))
    prompt = grow(engine)
    idle(engine)
    engine.kv.save("t", tmp_path)
    receipt = other.kv.load(tmp_path, "t")
    assert (receipt.n_tokens, receipt.n_paths) == (0, 0)
    assert receipt.n_left_out_tokens == len(prompt) - 7
    other.kv.check_integrity()
    assert other.kv.usage().n_bytes == 0
    result = run(other, ask(prompt, 8, thread="t"))
    assert result.token_ids == right_answer(LLAMA, prompt, 8)


def test_a_copy_that_is_lost_is_not_missed(make_engine, tmp_path):
    engine, other = (make_engine(model_of(LLAMA), config=ROOMY) for _ in range(2))
    prompt = grow(engine)
    idle(engine)
    archive = engine._core.tree.archive
    archive._forget(list(archive._cpu)[-1])
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    other.kv.check_integrity()
    result = run(other, ask(prompt, 8, thread="t"))
    assert result.token_ids == right_answer(LLAMA, prompt, 8)


def test_a_path_that_runs_on_is_managed_as_before(make_engine, tmp_path):
    config = managed("h2o", budget_tokens=72)
    engine, other = (make_engine(tiny_model(LLAMA), config=config) for _ in range(2))
    prompt = grow(engine)
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    assert other.kv.usage().n_tokens <= 72
    run(other, ask([*prompt, *ids(40, seed=9)], 20, thread="t"))
    other.kv.check_integrity()
    assert other.kv.usage().n_tokens <= 72
    assert other.kv.run_receipt().n_rows_evicted


def test_calls_that_agree_to_nothing_lossy_find_their_own_rows(make_engine, tmp_path):
    engine, other = (make_engine(model_of(LLAMA), config=BARE) for _ in range(2))
    prompt = ids(60)
    for exact in (True, False):
        run(engine, exact_ask(prompt, exact))
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    result = run(other, exact_ask(prompt, True))
    assert result.n_reused_tokens == 60
    assert result.token_ids == right_answer(LLAMA, prompt, 8)
    assert any(scope.endswith(EXACT) for scope, _ in contents(other))


def exact_ask(prompt, exact):
    return replace(ask(prompt, 8, thread="t"), exact=exact)


def test_a_managed_budget_is_kept_and_nothing_is_lost_for_it(make_engine, tmp_path):
    engine = make_engine(tiny_model(LLAMA), config=ROOMY)
    grow(engine)
    engine.kv.save("t", tmp_path)
    config = managed(budget_tokens=72, guard=Guard(max_kl=1e-9, canary_tokens=4))
    other = make_engine(tiny_model(LLAMA), config=config)
    run(other, ask(ids(40, seed=30), 4, call="mine"))
    with other.kv.pin("mine"), pytest.raises(BudgetExceeded, match="nothing of the saved thread"):
        other.kv.load(tmp_path, "t")
    assert not other.kv.run_receipt().n_acts
    other.kv.check_integrity()
    assert other.kv.usage().n_tokens == 43


def test_what_a_conversation_cleared_stays_cleared(make_engine, tmp_path):
    """Without a policy too; whoever cleared nothing does not build on it."""
    engine, other = (make_engine(model_of(LLAMA)) for _ in range(2))
    prompt, spans = ids(70), (20, 50)
    first = run(engine, asked(prompt, call="one", thread="t"))
    more = [*prompt, *first.token_ids, *ids(6, seed=4)]
    second = run(engine, clear(asked(more, call="two", thread="t"), spans))
    last = [*more, *second.token_ids, *ids(6, seed=5)]
    engine.kv.save("t", tmp_path)
    kept = contents(engine)
    other.kv.load(tmp_path, "t")
    other.kv.check_integrity()
    assert_same(contents(other), kept)
    assert sum(len(one["cleared"]) for one in kept.values()) == 30
    one, two = (run(e, clear(asked(last, thread="t"), spans)) for e in (engine, other))
    assert one.n_reused_tokens == two.n_reused_tokens > 50
    assert one.token_ids == two.token_ids
    whole = run(other, ask(last, 8, thread="t"))
    assert whole.n_reused_tokens == 20
    assert whole.token_ids == right_answer(LLAMA, last, 8)
