"""A managed cache in trouble: policies that err, a guard that says no, no memory, damaged copies.

The run goes on and what it says stays right: that of plain transformers over what is left.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from sidequest_langchain.config import CacheConfig, Guard, Tiers
from sidequest_langchain.kv.keeping import KeepingTree
from sidequest_langchain.policy.acts import Archive, Compress, Evict, EvictByHead, Release
from tests.engine.driving import (
    ask,
    held,
    ids,
    model_of,
    resident,
    right_answer,
    submit_all,
    token_bytes,
)
from tests.engine.managing import LITTLE, Shadow, managed, run
from tests.engine.test_managed_oracle import siblings, turns
from tests.support import oracle
from tests.support.tiny import tiny_model


def everything(kind, **given):
    def policy(facts):
        return [
            kind(s.segment_id, offsets=tuple(range(s.n_tokens)), **given) for s in facts.segments
        ]

    return policy


def raising(facts):
    msg = "no idea"
    raise ArithmeticError(msg)


def halfway(facts):
    yield Evict(facts.segments[0].segment_id, (1, 2, 3))
    raising(facts)


def twice(facts):
    for s in facts.segments:
        rows = tuple(range(s.n_tokens))
        yield Evict(s.segment_id, rows)
        yield Compress(s.segment_id, rows, bits=8)
        yield Evict(s.segment_id, rows)
        yield Compress(s.segment_id, rows, bits=4)


def mixed_heads(facts):
    """Rows by head of some segments, then acts that such segments do not bear."""
    for s in facts.segments:
        yield EvictByHead(s.segment_id, max(1, s.n_tokens // 2))
        yield Evict(s.segment_id, (0, s.n_tokens - 1))
        yield Compress(s.segment_id, tuple(range(s.n_tokens)), bits=8)
        yield Archive(s.segment_id, tuple(range(s.n_tokens)))


ERRING = {
    "raises": raising,
    "raises halfway": halfway,
    "nothing at all": lambda facts: None,
    "a number": lambda facts: 7,
    "words": lambda facts: ["evict", "all"],
    "unknown segments": lambda facts: [Evict(10**6, (0, 1)), Release(-1), Evict(None, (1,))],
    "a list for a segment": lambda facts: [Evict([1], (0, 1))],
    "offsets that are none": lambda facts: [
        Evict(s.segment_id, (0.5, 3.25, 10**9)) for s in facts.segments
    ],
    "a reason that is no text": lambda facts: [
        Evict(s.segment_id, (4, 5, 6), reason=object()) for s in facts.segments
    ],
    "past the end": lambda facts: [
        Evict(s.segment_id, tuple(range(5, 10**4))) for s in facts.segments
    ],
    "evict everything": everything(Evict),
    "archive everything": everything(Archive),
    "pack everything": everything(Compress, bits=4),
    "release everything": lambda facts: [Release(s.segment_id) for s in facts.segments],
    "no rows by head": lambda facts: [EvictByHead(s.segment_id, 0) for s in facts.segments],
    "twice and thrice": twice,
    "heads and rows": mixed_heads,
}


@pytest.mark.parametrize("name", ERRING)
def test_policies_that_err(name, make_engine, tmp_path):
    """Whatever a policy asks for, the budget holds, and protected rows stay."""
    row = token_bytes(model_of("llama"))
    engine = make_engine(
        model_of("llama"),
        config=managed(
            ERRING[name],
            budget_tokens=None,
            budget_bytes=150 * row,
            tiers=Tiers(),
            receipts_file=tmp_path / "receipts",
        ),
    )
    shadow = Shadow(engine, "llama")
    siblings(engine)
    turns(engine)
    shadow.check()
    shadow.check_books()
    for segment in engine._core.tree.segments():
        there = segment.residency
        if segment.start == 0 and there is not None:
            if there.kept_by_head is not None:
                assert all((there.kept_by_head == at).any(-1).all() for at in (0, 1))
            else:
                assert {0, 1} <= set(there.dense)
    assert engine.kv.usage().n_bytes <= 150 * row
    assert len((tmp_path / "receipts").read_text().splitlines()) == len(shadow.receipts)


class Switch:
    """A policy that does as it is told, when it is told."""

    def __init__(self, policy=None):
        self.policy = policy

    def __call__(self, facts):
        return [] if self.policy is None else self.policy(facts)


def evict_free(facts):
    for s in facts.segments:
        rows = tuple(int(at) for at in (s.resident & ~s.protected).nonzero()[0][::2])
        if rows:
            yield Evict(s.segment_id, rows)


# -- the guard ---------------------------------------------------------------------------


def test_guard_refuses_then_backs_off_and_yields_to_the_budget(make_engine, caplog):
    guard = Guard(max_kl=1e-12, canary_tokens=4)
    engine = make_engine(
        model_of("llama"), config=managed("h2o", guard=guard, budget_tokens=120, interval=2)
    )
    shadow = Shadow(engine, "llama")
    run(engine, ask(ids(64), 38, ignore_eos=True))  # over the trigger, not over the budget
    outcomes = {r.outcome for r in shadow.receipts}
    assert outcomes == {"refused"}
    assert all(r.kl > 1e-12 and "divergence" in r.reason for r in shadow.receipts)
    assert len({r.step for r in shadow.receipts}) == 1, "it asks again at once"
    assert not any(s.residency for s in engine._core.tree.segments())
    with caplog.at_level(logging.WARNING):
        turns(engine, n_prompt=100, n_new=30)
    done = [r for r in shadow.receipts if r.outcome == "done" and r.verb == "evict"]
    forced = [r for r in done if r.is_forced]
    assert forced
    assert all(r.kl > 1e-12 for r in forced if not r.kl_reason)
    assert all(r.kl is None and r.kl_reason for r in done if not r.is_forced)
    assert engine.kv.usage().n_tokens <= 120
    assert engine.kv.run_receipt().n_forced == len(forced)
    assert caplog.text.count("more than the guard allows") == 1
    shadow.check()
    shadow.check_books()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("verb", ["evict", "compress", "by_head"])
def test_the_divergence_is_that_of_plain_transformers(family, verb, make_engine):
    """KL of the next token over the last four tokens, run again before and after the acts."""
    w = 4
    row = token_bytes(model_of(family))
    switch = Switch()
    engine = make_engine(
        model_of(family),
        config=managed(
            switch,
            budget_tokens=None,
            budget_bytes=100 * row,
            guard=Guard(max_kl=50.0, canary_tokens=w),
            tiers=Tiers(),
            prefill_chunk=32,
        ),
    )
    shadow = Shadow(engine, family)
    result = run(engine, ask(ids(70), 16, ignore_eos=True))
    tokens = (*ids(70), *result.token_ids[:-1])
    before = shadow.again(tokens, w)
    acts = {
        "evict": evict_free,
        "compress": everything(Compress, bits=4),
        "by_head": lambda facts: [EvictByHead(s.segment_id, 12) for s in facts.segments],
    }
    switch.policy = acts[verb]
    receipts = [r for r in engine.kv.manage() if r.outcome == "done"]
    after = shadow.again(tokens, w)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert receipts
    assert float(kl) > 1e-4
    for receipt in receipts:
        assert receipt.kl == pytest.approx(float(kl), rel=2e-2, abs=1e-5)


# -- no memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_no_memory_for_an_act(error, make_engine, monkeypatch):
    engine = make_engine(model_of("llama"), config=managed("h2o"))
    shadow, tree = Shadow(engine, "llama"), engine._core.tree
    evict, n = tree.evict, []

    def failing(*args):
        n.append(1)
        if len(n) % 2:
            raise error
        return evict(*args)

    tree.evict = failing
    turns(engine)
    shadow.check()
    shadow.check_books()
    assert {r.outcome for r in shadow.receipts if r.verb == "evict"} == {"done", "failed"}


def test_no_memory_for_the_canary(make_engine):
    """What need not be done is left; who runs is not disturbed."""
    switch = Switch(evict_free)
    engine = make_engine(
        model_of("llama"),
        config=managed(switch, budget_tokens=120, guard=Guard(max_kl=50.0, canary_tokens=4)),
    )
    canary = engine._core.manager._cycles._canary

    def failing(*args, **given):
        raise torch.OutOfMemoryError

    canary._forward = failing
    prompt = ids(64)
    answer = run(engine, ask(prompt, 30, ignore_eos=True))
    assert answer.token_ids == tuple(oracle.greedy(model_of("llama"), prompt, 30, ignore_eos=True))


# -- copies ------------------------------------------------------------------------------


def archive_idle(facts):
    for s in facts.segments:
        rows = tuple(int(at) for at in (s.resident & ~s.protected).nonzero()[0])
        if s.is_idle and rows:
            yield Archive(s.segment_id, rows)


TIERS = {
    "cpu": lambda folder: Tiers(int8=False, int4=False, cpu_bytes=10**6),
    "disk": lambda folder: Tiers(int8=False, int4=False, disk_bytes=10**6, archive_folder=folder),
}


def left_and_archived(make_engine, tier, tmp_path, model=None, budget_tokens=160):
    """An engine whose first call idles in the archive, and what that call said."""
    model = model or model_of("llama")
    config = managed(archive_idle, budget_tokens=budget_tokens, tiers=TIERS[tier](tmp_path / "a"))
    engine = make_engine(model, config=config)
    prompt = ids(60, seed=1)
    answer = run(engine, ask(prompt, 8, ignore_eos=True, call="first"))
    run(engine, ask(ids(70, seed=2), 8, ignore_eos=True))
    receipts = [r for r in engine.kv.receipts() if r.verb == "archive" and r.outcome == "done"]
    assert sum(r.n_rows for r in receipts) > 40
    assert all(r.exact for r in receipts)
    return engine, [*prompt, *answer.token_ids, 9, 8, 7]


def check_return(engine, prompt, *, is_restored):
    answer = run(engine, ask(prompt, 8, ignore_eos=True))
    model = engine._core.adapter.model
    assert list(answer.token_ids) == oracle.greedy(model, prompt, 8, ignore_eos=True)
    back = [r for r in engine.kv.receipts() if r.verb == "restore" and r.outcome == "done"]
    assert bool(back) == is_restored
    assert (answer.n_reused_tokens >= len(prompt) - 4) == is_restored
    engine.kv.check_integrity()


@pytest.mark.parametrize("tier", TIERS)
def test_what_idled_in_an_archive_comes_back(tier, make_engine, tmp_path):
    engine, prompt = left_and_archived(make_engine, tier, tmp_path)
    engine._core.manager._returns.costs.tokens_a_second = 1e-3  # computing is slow here
    check_return(engine, prompt, is_restored=True)
    engine.close()
    assert not (tmp_path / "a").exists() or list((tmp_path / "a").iterdir()) == []


def test_no_room_for_what_comes_back(make_engine, tmp_path):
    engine, prompt = left_and_archived(make_engine, "cpu", tmp_path, budget_tokens=135)
    engine._core.manager._returns.costs.tokens_a_second = 1e-3
    check_return(engine, prompt, is_restored=False)


@pytest.mark.parametrize("tier", TIERS)
def test_computing_again_where_it_is_cheaper(tier, make_engine, tmp_path):
    engine, prompt = left_and_archived(make_engine, tier, tmp_path)
    engine._core.manager._returns.costs.bytes_a_second = 1e-3
    check_return(engine, prompt, is_restored=False)


def lose(engine, folder):
    archive = engine._core.tree.archive
    for entries in (archive._cpu, archive._disk):
        for key in list(entries):
            archive._forget(key)


def files_in(folder):
    """The copies; a lock is empty."""
    return [f for f in folder.rglob("*") if f.is_file() and f.stat().st_size > 100]


def truncate(engine, folder):
    for file in files_in(folder):
        file.write_bytes(file.read_bytes()[:-7])


def flip(engine, folder):
    for file in files_in(folder):
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(bytes(data))


def remove(engine, folder):
    for file in files_in(folder):
        file.unlink()


def retrain(engine, folder):
    with torch.no_grad():
        for parameter in engine._core.adapter.model.parameters():
            parameter.mul_(1.3)


DAMAGES = {
    "lost": ("cpu", lose),
    "lost on disk": ("disk", lose),
    "truncated": ("disk", truncate),
    "one bit": ("disk", flip),
    "removed": ("disk", remove),
    "other weights": ("cpu", retrain),
    "other weights on disk": ("disk", retrain),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_copies_are_computed_again(name, make_engine, tmp_path):
    tier, damage = DAMAGES[name]
    engine, prompt = left_and_archived(make_engine, tier, tmp_path, model=tiny_model("llama"))
    engine._core.manager._returns.costs.tokens_a_second = 1e-3
    with held(engine):
        damage(engine, tmp_path / "a")
    check_return(engine, prompt, is_restored=False)


def test_no_memory_to_restore(make_engine, tmp_path, monkeypatch):
    engine, prompt = left_and_archived(make_engine, "cpu", tmp_path)
    engine._core.manager._returns.costs.tokens_a_second = 1e-3

    def failing(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(KeepingTree, "restore", failing)
    check_return(engine, prompt, is_restored=False)


def rows_of(engine, tokens):
    """K and V of a path, `[L]` of `[2, H, T, D]`, where all of it is resident."""
    tree = engine._core.tree
    [tip] = {p.tip for p in tree.paths.values()}
    assert tuple(t for s in tip.path() for t in s.token_ids) == tuple(tokens)
    return [
        torch.cat(
            [
                torch.stack([s.keys[n][:, : s.n_rows], s.values[n][:, : s.n_rows]])
                for s in tip.path()
            ],
            2,
        )
        for n in range(len(tree.layout))
    ]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("act", ["evict", "pack", "hide"])
def test_recall_undoes(family, act, make_engine, tmp_path):
    """Rows come back bit for bit at their places, and the next answer is the unmanaged one."""
    switch = Switch()
    is_packing = act == "pack"
    row = token_bytes(model_of(family))
    engine = make_engine(
        model_of(family),
        config=managed(
            switch,
            budget_tokens=None,
            budget_bytes=140 * row,
            trigger=0.5,
            target=0.3,
            tiers=Tiers(int8=is_packing, int4=False, cpu_bytes=10**6),
            mask_only=act == "hide",
        ),
    )
    prompt = ids(70)
    answer = run(engine, ask(prompt, 12, ignore_eos=True, call="a")).kept_ids
    tokens = resident(engine)["a"]
    before = rows_of(engine, tokens)
    switch.policy = evict_free
    done = [r for r in engine.kv.manage() if r.outcome == "done"]
    assert sum(r.n_rows for r in done) > 20
    assert engine.kv.usage().n_tokens < len(tokens) or act == "hide"
    switch.policy = None
    back = engine.kv.recall("a")
    assert sum(r.n_rows for r in back) == sum(r.n_rows for r in done)
    assert sorted(run for r in back for run in r.runs) == sorted(
        run for r in done for run in r.runs
    )
    assert all(map(torch.equal, before, rows_of(engine, tokens)))
    following = [*prompt, *answer, 3, 1, 2]
    assert run(engine, ask(following, 8)).token_ids == right_answer(family, following, 8)


# -- who did not agree -------------------------------------------------------------------


def test_exact_calls_never_see_lossy_rows(make_engine):
    engine = make_engine(model_of("llama"), config=managed("h2o", budget_tokens=150))
    prompt = ids(90)
    run(engine, ask(prompt, 10, ignore_eos=True))
    turns(engine, n_prompt=120)  # presses
    assert engine.kv.run_receipt().n_rows_evicted > 0
    for n in (4, 9):
        longer = [*ids(70), *ids(n, seed=n)]
        plain, exact = ask(ids(120), 12, ignore_eos=True), replace(ask(longer, 8), exact=True)
        told = submit_all(engine, [plain, exact])
        assert told[1][0].result().token_ids == right_answer("llama", longer, 8)
        told[0][0].result()
        again = run(engine, replace(ask([*longer, 5], 8), exact=True))
        assert again.token_ids == right_answer("llama", [*longer, 5], 8)


def test_pinned_paths_are_left_alone(make_engine):
    engine = make_engine(model_of("llama"), config=managed("h2o", budget_tokens=150))
    prompt = ids(50, seed=5)
    answer = run(engine, ask(prompt, 6, branch="kept")).token_ids
    with engine.kv.pin("kept"):
        turns(engine)
        assert engine.kv.run_receipt().n_rows_evicted > 0
        following = [*prompt, *answer, 2, 4]
        result = run(engine, ask(following, 6))
    assert result.token_ids == right_answer("llama", following, 6)
    assert result.n_reused_tokens >= 55


# -- nothing is managed ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_observing_changes_nothing(family, make_engine):
    said = []
    for given in ({}, {"observe": True}):
        plain = CacheConfig(prefill_chunk=16)
        config = managed("staged", budget_tokens=90, observe=True) if given else plain
        engine = make_engine(model_of(family), config=config)
        shadow = Shadow(engine, family)
        turns(engine)
        siblings(engine)
        said.append([(one.tokens, one.logits) for one in shadow.said])
        if given:
            assert {r.outcome for r in shadow.receipts} == {"observed"}
            assert sum(r.freed_bytes for r in shadow.receipts) > 0
            assert not any(s.residency for s in engine._core.tree.segments())
            assert engine.kv.run_receipt().n_acts == 0
        kept = resident(engine)
    (first, second) = said
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    most = max(float((a - b).abs().max()) for (_, a), (_, b) in zip(first, second, strict=True))
    assert most < 3e-4
    assert kept


def test_without_a_policy_there_is_no_manager(make_engine):
    for given in ({}, {"policy": "none"}, {"budget_tokens": 100}):
        engine = make_engine(model_of("llama"), config=CacheConfig(**given))
        assert engine._core.manager is None
        assert engine._core.tree.archive is None
        assert engine._core.tree.most_joined_rows is None
    assert LITTLE.recent_window == 8
