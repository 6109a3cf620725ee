"""What idles in a slower tier comes back before it is read: exact, and only where there is room."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from sidequest_langchain.config import Tiers
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.labels import PathSelector
from sidequest_langchain.policy.foreseeing import REASON
from tests.engine.driving import ask, ids, model_of, right_answer, submit_all
from tests.engine.managing import managed, run, settle
from tests.engine.saved import assert_same, contents
from tests.engine.test_managed_faults import Switch
from tests.engine.test_saving_managed import archived, grow, idle, on_tree

LLAMA = "llama"


@pytest.fixture(params=["cpu", "disk"])
def engine(request, make_engine, tmp_path):
    """An engine with a tier in memory, or on disk."""
    tiers = Tiers(cpu_bytes=2**24)
    if request.param == "disk":
        tiers = Tiers(disk_bytes=2**24, archive_folder=str(tmp_path / "archive"))
    return make_engine(model_of(LLAMA), config=managed(budget_tokens=9999, tiers=tiers))


def test_rows_come_back_bit_for_bit_and_are_not_restored_again(engine):
    prompt = grow(engine)
    whole = contents(engine)
    idle(engine)
    assert engine.kv.usage().n_tokens < 20
    receipts = engine.kv.prefetch("two")
    assert receipts
    assert all(
        (r.verb, r.outcome, r.reason, r.exact) == ("restore", "done", REASON, True)
        for r in receipts
    )
    assert_same(contents(engine), whole)
    engine.kv.check_integrity()
    assert engine._core.tree.archive.n_entries == 0
    assert engine.kv.prefetch("two") == ()
    result = run(engine, ask(prompt, 8, thread="t"))
    assert result.n_prefilled_tokens == 7
    assert result.token_ids == right_answer(LLAMA, prompt, 8)
    restored = [r for r in engine.kv.receipts() if getattr(r, "verb", "") == "restore"]
    assert restored == list(receipts)


def test_what_was_given_up_on_purpose_stays_away(engine):
    grow(engine)
    on_tree(engine, archived)
    before = contents(engine)
    assert engine.kv.prefetch("two") == ()
    assert_same(contents(engine), before)


def test_a_path_nobody_knows_and_another_threads(engine):
    grow(engine)
    idle(engine)
    assert engine.kv.prefetch("nobody") == ()
    assert engine.kv.prefetch("two", thread_id="u") == ()
    assert engine.kv.prefetch("two", thread_id="t")


def test_without_tiers_there_is_nothing_to_do(make_engine):
    for config in (managed(), None):
        engine = make_engine(model_of(LLAMA), config=config)
        run(engine, ask(ids(20), 4, call="one"))
        assert engine.kv.prefetch("one") == ()


def test_nothing_is_given_up_for_it(make_engine):
    """As much as fits below where cycles begin, from the trunk on; the rest waits for its call."""
    config = managed(
        Switch(), budget_tokens=100, trigger=0.8, target=0.7, tiers=Tiers(cpu_bytes=2**24)
    )
    engine = make_engine(model_of(LLAMA), config=config)
    run(engine, ask(ids(38), 3, call="one"))
    whole = engine.kv.usage().n_tokens
    idle(engine)
    run(engine, ask(ids(50, seed=7), 3, call="other"))
    n_tokens, n_acts = engine.kv.usage().n_tokens, engine.kv.run_receipt().n_acts
    receipts = engine.kv.prefetch("one")
    assert [r.verb for r in receipts] == ["restore"], "one piece of three"
    assert engine.kv.run_receipt().n_acts == n_acts + len(receipts)
    assert n_tokens <= engine.kv.usage().n_tokens <= 80 < n_tokens + whole
    engine.kv.check_integrity()
    result = run(engine, ask([*ids(38), 5, 6], 4))
    assert result.token_ids == right_answer(LLAMA, [*ids(38), 5, 6], 4)


def test_a_request_that_waits_is_foreseen(make_engine, tmp_path):
    tiers = Tiers(disk_bytes=2**24, archive_folder=str(tmp_path / "archive"))
    config = replace(managed(budget_tokens=9999, tiers=tiers), max_running=1)
    engine = make_engine(model_of(LLAMA), config=config)
    prompt = grow(engine)
    idle(engine)
    long = ask(ids(30, seed=9), 40, ignore_eos=True)
    late = ask(prompt, 8, thread="t")
    (first, _), (second, _) = submit_all(engine, [long, late])
    assert second.result().token_ids == right_answer(LLAMA, prompt, 8)
    assert second.result().n_prefilled_tokens == 7
    assert first.result().n_generated_tokens == 40
    settle(engine)
    reasons = {r.reason for r in engine.kv.receipts() if getattr(r, "verb", "") == "restore"}
    assert reasons == {REASON}
    engine.kv.check_integrity()


@pytest.fixture
def slow(make_engine, tmp_path, monkeypatch):
    """An engine with a disk that answers when it is let; its events."""
    tiers = Tiers(disk_bytes=2**24, archive_folder=str(tmp_path / "archive"))
    engine = make_engine(model_of(LLAMA), config=managed(budget_tokens=9999, tiers=tiers))
    prompt = grow(engine)
    idle(engine)
    reached, gate = threading.Event(), threading.Event()
    real = Archive.get

    def get(self, ticket):
        if threading.current_thread().name.startswith("sidequest-prefetch"):
            reached.set()
            assert gate.wait(30)
        return real(self, ticket)

    monkeypatch.setattr(Archive, "get", get)
    return engine, prompt, reached, gate


def test_nobody_waits_for_the_disk_and_the_room_counts(slow):
    engine, _, reached, gate = slow
    n_bytes = engine.kv.usage().n_bytes
    asked = engine.kv.post_prefetch(selector_of("two"))
    assert reached.wait(30)
    promised = engine.kv.usage().n_bytes
    assert promised > n_bytes
    engine.kv.check_integrity()
    other = ask(ids(25, seed=11), 4)
    assert run(engine, other).token_ids == right_answer(LLAMA, ids(25, seed=11), 4)
    assert not asked.done()
    engine.kv.release(other.label.call_id)
    gate.set()
    assert asked.result(30)
    assert engine.kv.usage().n_bytes == promised
    engine.kv.check_integrity()


def selector_of(path):
    return PathSelector(path_id=path)


def test_a_path_that_is_released_meanwhile(slow):
    engine, prompt, reached, gate = slow
    asked = engine.kv.post_prefetch(selector_of("two"))
    assert reached.wait(30)
    engine.kv.clear()
    gate.set()
    assert asked.result(30) == ()
    engine.kv.check_integrity()
    assert engine.kv.usage().n_bytes == 0
    assert engine._core.tree.archive.n_entries == 0
    assert run(engine, ask(prompt, 8)).token_ids == right_answer(LLAMA, prompt, 8)


def test_a_path_that_came_back_meanwhile(slow):
    engine, prompt, reached, gate = slow
    engine._core.manager._returns.costs.tokens_a_second = 1e-3
    asked = engine.kv.post_prefetch(selector_of("two"))
    assert reached.wait(30)
    assert run(engine, ask(prompt, 8)).token_ids == right_answer(LLAMA, prompt, 8)
    gate.set()
    assert asked.result(30) == ()
    engine.kv.check_integrity()


def test_an_engine_that_is_closed_meanwhile(slow):
    engine, _, reached, gate = slow
    asked = engine.kv.post_prefetch(selector_of("two"))
    assert reached.wait(30)
    engine.close()
    gate.set()
    with pytest.raises(Exception, match="engine is closed"):
        asked.result(30)


def test_a_copy_that_is_damaged_is_computed_again(make_engine, tmp_path):
    tiers = Tiers(disk_bytes=2**24, archive_folder=str(tmp_path / "archive"))
    engine = make_engine(model_of(LLAMA), config=managed(budget_tokens=9999, tiers=tiers))
    prompt = grow(engine)
    idle(engine)
    for path in (tmp_path / "archive").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    receipts = engine.kv.prefetch("two")
    assert [r.outcome for r in receipts] == ["failed"]
    engine.kv.check_integrity()
    assert run(engine, ask(prompt, 8, thread="t")).token_ids == right_answer(LLAMA, prompt, 8)
    engine.kv.check_integrity()
