"""Where a budget cannot hold all who run, the last to come wait, and answer as if they had not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidequest_langchain.config import Tiers
from sidequest_langchain.engine.request import TextDelta
from sidequest_langchain.engine.scheduler import Scheduler
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.labels import PathSelector
from tests.engine.driving import (
    ask,
    ids,
    model_of,
    recorded,
    resident,
    submit_all,
    token_bytes,
)
from tests.engine.managing import managed, run, settle
from tests.support import oracle

BUDGET, CHUNK, GROWTH = 110, 16, 32
N_TRUNK, N_OWN, N_NEW = 30, 8, 24


def siblings(n: int, **sampling):
    """Requests over one trunk that agree to nothing lossy: each needs `N_OWN + N_NEW` rows."""
    trunk = ids(N_TRUNK)
    return [
        replace(
            ask(
                [*trunk, *ids(N_OWN, seed=7 + i)],
                N_NEW,
                call=f"s{i}",
                branch=f"s{i}",
                ignore_eos=True,
                **sampling,
            ),
            exact=True,
        )
        for i in range(n)
    ]


def budgeted(make_engine, **settings):
    return make_engine(model_of("llama"), config=managed(budget_tokens=BUDGET, **settings))


@pytest.fixture
def times(monkeypatch):
    """The sequences that were held back, in order, with the number of tokens each had."""
    found = []
    hold_back = Scheduler.hold_back

    def watched(self):
        before = list(self.running)
        is_held = hold_back(self)
        found.extend((s, len(s.generated)) for s in before if s not in self.running)
        return is_held

    monkeypatch.setattr(Scheduler, "hold_back", watched)
    return found


def test_siblings_that_do_not_fit_together_answer_in_turn(make_engine, times):
    engine = budgeted(make_engine)
    requests = siblings(6)
    scheduler, sizes, waiting = engine._core._scheduler, [], []

    def look(_):
        sizes.append(len(scheduler.running))
        waiting.append([s.serial for s in scheduler.waiting])

    with recorded(model_of("llama"), look):
        results = [listener.result() for listener, _ in submit_all(engine, requests)]
    for request, result in zip(requests, results, strict=True):
        right = oracle.greedy(model_of("llama"), request.prompt_ids, N_NEW, ignore_eos=True)
        assert list(result.token_ids) == right
    assert any(n_generated for _, n_generated in times), "nobody was held back in mid-answer"
    assert max(sizes) >= 3
    assert waiting == [sorted(serials) for serials in waiting]
    settle(engine)
    row = token_bytes(model_of("llama"))
    assert engine.kv.usage().peak_resident_bytes <= (BUDGET + CHUNK + 6 * GROWTH) * row
    engine.kv.check_integrity()


def test_what_was_told_is_not_told_again(make_engine, times):
    engine = budgeted(make_engine)
    submitted = submit_all(engine, siblings(6, top_logprobs=2))
    for listener, _ in submitted:
        result = listener.result()
        assert listener.text == result.text
        told = [p for e in listener.events if isinstance(e, TextDelta) for p in e.logprobs]
        assert [p.token_id for p in told] == list(result.token_ids)
        assert result.queue_s <= result.first_token_s <= result.total_s
    assert times


def test_a_seed_means_what_it_means_alone(make_engine, times):
    requests = [
        replace(r, sampling=replace(r.sampling, temperature=1.0, seed=i))
        for i, r in enumerate(siblings(6))
    ]
    free = make_engine(model_of("llama"))
    alone = [run(free, request).token_ids for request in requests]
    engine = budgeted(make_engine)
    together = [listener.result().token_ids for listener, _ in submit_all(engine, requests)]
    assert together == alone
    assert len(set(alone)) == 6
    assert times


def test_a_call_that_is_released_while_it_waits_again_leaves_nothing(make_engine, monkeypatch):
    engine = budgeted(make_engine)
    scheduler, released = engine._core._scheduler, []
    hold_back = scheduler.hold_back

    def watched():
        is_held = hold_back()
        if is_held and not released:
            label = scheduler.waiting[0].request.label
            released.append(label.branch)
            engine._core.release(PathSelector(path_id=label.branch), reason="test")
        return is_held

    monkeypatch.setattr(scheduler, "hold_back", watched)
    submitted = submit_all(engine, siblings(6))
    assert all(len(listener.result().token_ids) == N_NEW for listener, _ in submitted)
    settle(engine)
    assert released
    assert not any(call in released for call in resident(engine))
    engine.kv.check_integrity()


def test_a_call_released_while_it_ran_is_still_released_after_it_waited(make_engine, times):
    engine = budgeted(make_engine)
    requests = siblings(6)

    def release(n):
        if max(t.label.branch or "" for t in engine._core.tree.paths.values()) == "s5" and not done:
            done.append(len(times))
            engine._core.release(PathSelector(path_id="s5"), reason="test")

    done = []
    with recorded(model_of("llama"), release):
        submitted = submit_all(engine, requests)
        assert all(len(listener.result().token_ids) == N_NEW for listener, _ in submitted)
    settle(engine)
    assert done == [0], "it was to be released before anybody was held back"
    assert any(s.request.label.branch == "s5" for s, _ in times)
    assert "s5" not in resident(engine)


def test_who_alone_exceeds_the_budget_is_refused_and_the_others_answer(make_engine):
    engine = budgeted(make_engine)
    heavy = replace(ask(ids(BUDGET + 40, seed=3), 4, call="heavy"), exact=True)
    requests = [heavy, *siblings(3)]
    outcomes = [listener.outcome() for listener, _ in submit_all(engine, requests)]
    assert isinstance(outcomes[0], BudgetExceeded)
    for request, outcome in zip(requests[1:], outcomes[1:], strict=True):
        assert not isinstance(outcome, BaseException), outcome
        right = oracle.greedy(model_of("llama"), request.prompt_ids, N_NEW, ignore_eos=True)
        assert list(outcome.token_ids) == right


def test_a_pinned_call_is_not_held_back(make_engine, times):
    engine = budgeted(make_engine)
    tree, pinned = engine._core.tree, []

    def pin(n):
        path = max(tree.paths.values(), key=lambda path: path.serial)
        if path.label.branch == "s5" and not pinned:
            pinned.append((path.label.branch, tree.pin(path)))

    with recorded(model_of("llama"), pin):
        for listener, _ in submit_all(engine, siblings(6)):
            listener.outcome()
    assert times
    branch, segment = pinned[0]
    assert all(s.request.label.branch != branch for s, _ in times)
    engine._core.call(lambda: tree.unpin(segment)).result(30)


def test_afterwards_as_many_run_as_before(make_engine, times):
    engine = budgeted(make_engine)
    for listener, _ in submit_all(engine, siblings(6)):
        listener.result()
    settle(engine)
    n_then = len(times)
    assert n_then
    engine.kv.clear()
    most = []
    small = [replace(r, sampling=replace(r.sampling, max_tokens=1)) for r in siblings(6)]
    with recorded(model_of("llama"), lambda n: most.append(len(engine._core._scheduler.running))):
        for listener, _ in submit_all(engine, small):
            listener.result()
    assert max(most) == 6
    assert len(times) == n_then


@pytest.mark.parametrize("n_bad", [7, 21])
def test_a_step_that_fails_for_another_reason_fails_nobody(make_engine, n_bad):
    """Run one by one after it, some find no room: they wait, as if the step had not failed."""
    row = token_bytes(model_of("llama"))
    engine = make_engine(
        model_of("llama"), config=managed(budget_tokens=None, budget_bytes=160 * row)
    )

    def fail(n):
        if n == n_bad:
            msg = "a passing failure"
            raise RuntimeError(msg)

    requests = siblings(4)
    with recorded(model_of("llama"), fail):
        results = [listener.result() for listener, _ in submit_all(engine, requests)]
    for request, result in zip(requests, results, strict=True):
        right = oracle.greedy(model_of("llama"), request.prompt_ids, N_NEW, ignore_eos=True)
        assert list(result.token_ids) == right


def test_reused_tokens_are_those_of_the_first_beginning(make_engine, times):
    """A twin's rows reach into the answer; what is counted are the prompt's."""
    engine = make_engine(
        model_of("llama"), config=managed(budget_tokens=105, prefill_chunk=64, interval=256)
    )
    one, two, three = siblings(3)
    lengths = (60, 20, 24, 60)
    requests = [
        replace(r, sampling=replace(r.sampling, max_tokens=n), label=replace(r.label, call_id=c))
        for r, n, c in zip((one, two, three, one), lengths, "abcd", strict=True)
    ]
    results = [listener.result() for listener, _ in submit_all(engine, requests)]
    assert times
    for result in results:
        assert 0 <= result.n_reused_tokens <= result.n_prompt_tokens
    assert results[0].n_reused_tokens == 0
    assert results[0].token_ids == results[3].token_ids


def test_as_many_run_as_before_when_those_who_waited_are_cancelled(make_engine):
    engine = budgeted(make_engine)
    scheduler = engine._core._scheduler
    submitted = submit_all(engine, siblings(6))
    while scheduler._most_running == 64:
        assert not submitted[0][0].is_over.wait(0.001), "nobody was held back"
    for _, ticket in submitted:
        ticket.cancel()
    for listener, _ in submitted:
        listener.outcome()
    settle(engine)
    assert scheduler.is_idle
    assert scheduler._most_running == 64


def test_what_is_called_back_makes_others_go(make_engine):
    """Packed or not, rows that come back must fit: others are lost for them, as was asked."""
    row = token_bytes(model_of("llama"))
    engine = make_engine(
        model_of("llama"),
        config=managed(
            budget_tokens=None,
            budget_bytes=200 * row,
            tiers=Tiers(int8=False, int4=False, cpu_bytes=2**24),
        ),
    )
    for n, seed, name in ((100, 1, "a"), (64, 2, "b"), (100, 3, "c")):
        run(engine, ask(ids(n, seed=seed), 10, branch=name, call=name, ignore_eos=True))
    receipts = engine.kv.recall("a")
    assert sum(r.n_rows for r in receipts if r.outcome == "done") > 0
    assert engine.kv.usage().n_bytes <= 200 * row
    engine.kv.check_integrity()
