"""Clearing results in the cache: logits as with rows masked, exact bytes, nobody else harmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from sidequest_langchain.config import Tiers
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.errors import RequestError
from sidequest_langchain.kv.clearing import ClearedId, has_cleared
from sidequest_langchain.policy.receipts import ActReceipt
from tests.engine.clearing import Cleared, asked, clear, differs
from tests.engine.driving import (
    held,
    ids,
    model_of,
    n_fed,
    recorded,
    resident,
    run,
    submit_all,
    token_bytes,
)
from tests.engine.managing import TOLERANCE, Shadow, managed, settle
from tests.support import oracle
from tests.support.tiny import FAMILIES

MakeEngine = Callable[..., Engine]
SYSTEM, RESULT, TAIL = ids(20, seed=1), ids(30, seed=2), ids(12, seed=3)
FIRST, LAST = len(SYSTEM), len(SYSTEM) + len(RESULT)
PROMPT = [*SYSTEM, *RESULT, *TAIL]


def close(family: str) -> float:
    return TOLERANCE.get(family, 1e-4)


def right(prompt: Sequence[int], n: int = 8) -> tuple[int, ...]:
    """What plain transformers says, past the end of a turn, too."""
    return tuple(oracle.greedy(model_of("llama"), prompt, n, ignore_eos=True))


def acts(engine: Engine) -> list[ActReceipt]:
    return [r for r in engine.kv.receipts() if isinstance(r, ActReceipt)]


def books_balance(engine: Engine) -> None:
    """Bytes are those of the storages, and the tree is whole."""
    settle(engine)
    engine.kv.check_integrity()
    assert oracle.storage_bytes(engine._core.tree) == engine.kv.usage().n_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_is_as_with_the_rows_masked(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(family))
    first = run(engine, asked(PROMPT, call="one"))
    before = engine.kv.usage()
    prompt = [*PROMPT, *first.token_ids, *ids(6, seed=4)]
    request = clear(asked(prompt), (FIRST, LAST))
    with recorded(model_of(family)) as passes:
        second = run(engine, request)
    assert differs(family, request, second, [Cleared(FIRST, LAST, second.n_reused_tokens)]) < close(
        family
    )
    # Nothing that follows the result was computed again: the last reply and the new tokens only.
    assert second.n_reused_tokens == len(PROMPT) + len(first.token_ids) - 1
    assert n_fed(passes) == len(prompt) - second.n_reused_tokens + len(second.token_ids) - 1
    n_bytes = len(RESULT) * token_bytes(model_of(family))
    report = second.clearing
    assert report is not None
    assert (report.n_rows, report.freed_bytes) == (len(RESULT), n_bytes)
    assert (report.cleared, report.kept) == ((f"result-{FIRST}",), ())
    usage = engine.kv.usage()
    n_new = len(prompt) - second.n_reused_tokens + len(second.token_ids) - 1
    assert usage.n_bytes == before.n_bytes - n_bytes + n_new * token_bytes(model_of(family))
    assert usage.n_tokens == before.n_tokens - len(RESULT) + n_new
    books_balance(engine)


def test_the_edit_is_repeated_and_does_nothing_more(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of("llama"))
    prompt, cleared = PROMPT, []
    for turn in range(4):
        request = asked(prompt)
        if turn:
            request = clear(request, (FIRST, LAST))
        result = run(engine, request)
        if turn == 1:
            cleared = [Cleared(FIRST, LAST, result.n_reused_tokens)]
        assert differs("llama", request, result, cleared) < close("llama")
        if turn > 1:
            assert result.clearing is not None
            assert result.clearing.is_reused
            assert result.clearing.cleared == (f"result-{FIRST}",)
            assert result.clearing.n_rows == result.clearing.freed_bytes == 0
            assert result.n_reused_tokens > LAST
        prompt = [*prompt, *result.token_ids, *ids(5, seed=10 + turn)]
    [receipt] = acts(engine)
    assert (receipt.verb, receipt.outcome, receipt.policy) == ("evict", "done", "clearing")
    assert receipt.runs == ((FIRST, LAST - 1),)
    assert receipt.reason == f"cleared: result-{FIRST}"
    assert receipt.text == engine.tokenizer.decode(RESULT, skip_special=False).strip()
    assert not receipt.exact
    books_balance(engine)


def test_several_results_one_after_another(make_engine: MakeEngine) -> None:
    """Each turn brings a result, and clears the one before; a segment each, then all at once."""
    engine = make_engine(model_of("llama"))
    prompt, runs = list(SYSTEM), []
    cleared: list[Cleared] = []
    for turn in range(5):
        first = len(prompt)
        prompt += [*ids(17 + turn, seed=20 + turn), *ids(4, seed=40 + turn)]
        request = asked(prompt)
        if runs:
            request = clear(request, *runs)
        result = run(engine, request)
        cleared += [
            Cleared(*one, result.n_reused_tokens) for one in runs if (one not in known(cleared))
        ]
        assert differs("llama", request, result, cleared) < close("llama")
        assert turn == 0 or result.n_reused_tokens >= first - 1
        runs.append((first, first + 17 + turn))
        prompt += result.token_ids
    n_cleared = sum(last - first for first, last in runs[:-1])
    # The last token sampled was never stored.
    assert engine.kv.usage().n_tokens == len(prompt) - 1 - n_cleared
    books_balance(engine)


def known(cleared: list[Cleared]) -> set[tuple[int, int]]:
    return {(one.first, one.last) for one in cleared}


def test_whoever_did_not_clear_it_is_answered_exactly(make_engine: MakeEngine) -> None:
    """The same conversation, whole: it stops at what was cleared, and is computed again."""
    engine = make_engine(model_of("llama"))
    first = run(engine, asked(PROMPT))
    prompt = [*PROMPT, *first.token_ids, *TAIL]
    run(engine, clear(asked(prompt), (FIRST, LAST)))
    whole = run(engine, asked(prompt))
    assert whole.token_ids == right(prompt)
    assert whole.n_reused_tokens == FIRST
    # Both are resident now, and each is found again.
    again = run(engine, clear(asked([*prompt, *TAIL]), (FIRST, LAST)))
    assert again.clearing is not None
    assert again.clearing.n_rows == 0
    assert again.n_reused_tokens >= len(prompt)
    assert run(engine, asked(prompt)).n_reused_tokens >= len(prompt) - 1
    books_balance(engine)


def test_what_is_not_resident_is_served_as_text(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of("llama"))
    told: list[str] = []
    request = clear(asked(PROMPT), (FIRST, LAST), on_instead=lambda: told.append("instead"))
    result = run(engine, request)
    assert request.clearing is not None
    instead = request.clearing.instead.prompt_ids
    assert told == ["instead"]
    assert result.token_ids == right(instead)
    assert (result.n_prompt_tokens, result.n_reused_tokens) == (len(instead), 0)
    assert result.clearing is not None
    assert not result.clearing.is_reused
    assert "not in the cache" in result.clearing.why
    assert not acts(engine)
    assert resident(engine).popitem()[1] == (*instead, *result.token_ids[:-1])


def test_a_released_conversation_is_served_as_text(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of("llama"))
    run(engine, asked(PROMPT))
    engine.kv.clear()
    request = clear(asked([*PROMPT, *TAIL]), (FIRST, LAST))
    result = run(engine, request)
    assert request.clearing is not None
    assert result.token_ids == right(request.clearing.instead.prompt_ids)


class TestOthers:
    """Whoever reads a result and did not agree keeps it."""

    def turn(self, engine: Engine, seed: int, **given: str) -> list[int]:
        prompt = [*PROMPT, *ids(7, seed=seed)]
        result = run(engine, asked(prompt, **given))
        return [*prompt, *result.token_ids]

    def test_a_sibling_that_has_not_cleared_it(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"))
        mine = self.turn(engine, 5, thread="t", call="mine")
        theirs = self.turn(engine, 6, thread="t", call="theirs")
        request = clear(asked([*mine, *TAIL], thread="t"), (FIRST, LAST), history=["mine"])
        result = run(engine, request)
        assert result.clearing is not None
        assert result.clearing.n_rows == 0
        [(name, why)] = result.clearing.kept
        assert (name, why) == (
            f"result-{FIRST}",
            "path 'theirs' reads it and has not cleared it",
        )
        [receipt] = acts(engine)
        assert (receipt.outcome, receipt.n_rows) == ("refused", len(RESULT))
        # Both go on exactly.
        assert result.token_ids == right([*mine, *TAIL])
        other = run(engine, asked([*theirs, *TAIL], thread="t"))
        assert other.token_ids == right([*theirs, *TAIL])
        assert other.n_reused_tokens >= len(theirs) - 1
        books_balance(engine)

    def test_a_sibling_that_asks_for_the_same(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"))
        mine = self.turn(engine, 5, thread="t", call="mine")
        theirs = self.turn(engine, 6, thread="t", call="theirs")
        runs = (FIRST, LAST)
        run(engine, clear(asked([*mine, *TAIL], thread="t", call="m2"), runs, history=["mine"]))
        request = clear(asked([*theirs, *TAIL], thread="t"), runs, history=["theirs"])
        result = run(engine, request)
        # `mine`, the older call, has not asked; the conversation that goes on from it has.
        assert result.clearing is not None
        assert result.clearing.n_rows == 0
        engine.kv.release("mine")
        request = clear(asked([*theirs, *TAIL, *TAIL], thread="t"), runs, history=["theirs"])
        result = run(engine, request)
        assert result.clearing is not None
        assert result.clearing.n_rows == len(RESULT)
        cleared = [Cleared(*runs, result.n_reused_tokens)]
        assert differs("llama", request, result, cleared) < close("llama")
        again = run(engine, clear(asked([*mine, *TAIL], thread="t"), runs))
        assert again.clearing is not None
        assert again.clearing.is_reused
        assert again.n_reused_tokens >= len(mine)
        books_balance(engine)

    def test_another_thread(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"))
        first = run(engine, asked(PROMPT, thread="a", call="a1"))
        run(engine, asked(PROMPT, thread="b", call="b1"))
        prompt = [*PROMPT, *first.token_ids, *TAIL]
        result = run(engine, clear(asked(prompt, thread="a"), (FIRST, LAST), history=["a1"]))
        assert result.clearing is not None
        assert [why for _, why in result.clearing.kept] == [
            "path 'b1' reads it and has not cleared it"
        ]
        assert result.token_ids == right(prompt)

    def test_a_path_of_the_history_that_went_on_otherwise(self, make_engine: MakeEngine) -> None:
        """A reply that is rendered in another way: its path is nobody else's."""
        engine = make_engine(model_of("llama"))
        self.turn(engine, 5, call="reply")
        request = clear(asked([*PROMPT, *TAIL]), (FIRST, LAST), history=["reply"])
        result = run(engine, request)
        assert result.clearing is not None
        assert result.clearing.n_rows == len(RESULT)
        cleared = [Cleared(FIRST, LAST, result.n_reused_tokens)]
        assert differs("llama", request, result, cleared) < close("llama")

    def test_a_call_that_runs(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"))
        mine = self.turn(engine, 5, call="mine")
        runs = asked(mine, 40, call="runs")
        request = clear(asked([*mine, *TAIL]), (FIRST, LAST), history=["mine", "runs"])
        [(first, _), (second, _)] = submit_all(engine, [runs, request])
        report = second.result().clearing
        assert report is not None
        assert [why for _, why in report.kept] == ["a call that runs reads it"]
        assert first.result().token_ids == right(mine, 40)
        assert second.result().token_ids == right([*mine, *TAIL])

    def test_a_pin(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"))
        mine = self.turn(engine, 5, call="mine")
        request = clear(asked([*mine, *TAIL]), (FIRST, LAST), history=["mine"])
        with engine.kv.pin("mine"):
            report = run(engine, request).clearing
            assert report is not None
            assert [why for _, why in report.kept] == ["it is pinned"]
        request = replace(request, label=replace(request.label, call_id="later"))
        report = run(engine, request).clearing
        assert report is not None
        assert report.n_rows == len(RESULT)

    def test_two_samples_of_one_prompt(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"))
        mine = self.turn(engine, 5)
        requests = [clear(asked([*mine, *TAIL]), (FIRST, LAST)) for _ in range(2)]
        results = [listener.result() for listener, _ in submit_all(engine, requests)]
        assert results[0].token_ids == results[1].token_ids
        assert [r.clearing.n_rows for r in results if r.clearing is not None] == [len(RESULT), 0]
        for request, result in zip(requests, results, strict=True):
            cleared = [Cleared(FIRST, LAST, result.n_reused_tokens)]
            assert differs("llama", request, result, cleared) < close("llama")
        books_balance(engine)


class TestManaged:
    """With a managed cache: copies in the archive, hidden rows, exact calls."""

    def two_turns(self, engine: Engine) -> list[int]:
        first = run(engine, asked(PROMPT, call="one"))
        return [*PROMPT, *first.token_ids, *TAIL]

    def test_recall_takes_it_back(self, make_engine: MakeEngine) -> None:
        tiers = Tiers(int8=False, int4=False, cpu_bytes=10**6)
        engine = make_engine(
            model_of("llama"), config=managed("h2o", budget_tokens=400, tiers=tiers)
        )
        prompt = self.two_turns(engine)
        second = run(engine, clear(asked(prompt, call="two"), (FIRST, LAST), history=["one"]))
        assert second.clearing is not None
        assert second.clearing.n_rows == len(RESULT)
        since = second.n_reused_tokens
        settle(engine)
        back = engine.kv.recall("two")
        assert sum(r.n_rows for r in back) == len(RESULT)
        # Seen again by whoever goes on, though not by what was computed meanwhile.
        last = clear(asked([*prompt, *second.token_ids, *TAIL]), (FIRST, LAST))
        third = run(engine, last)
        assert third.clearing is not None
        assert third.clearing.n_rows == 0
        seen = third.n_reused_tokens
        full = [*map(int, last.prompt_ids), *third.token_ids]
        assert seen >= len(prompt)
        assert differs("llama", last, third, [Cleared(FIRST, LAST, since)]) > 1e-3
        assert resident(engine)[last.label.call_id] == tuple(
            ClearedId(token) if FIRST <= at < LAST else token for at, token in enumerate(full[:-1])
        )
        # And a call that never agreed is computed again.
        whole = run(engine, asked(prompt))
        assert whole.token_ids == right(prompt)
        assert whole.n_reused_tokens == FIRST

    def test_rows_are_hidden_where_nothing_may_go(self, make_engine: MakeEngine) -> None:
        engine = make_engine(
            model_of("llama"), config=managed("h2o", budget_tokens=400, mask_only=True)
        )
        prompt = self.two_turns(engine)
        request = clear(asked(prompt), (FIRST, LAST))
        result = run(engine, request)
        assert result.clearing is not None
        assert (result.clearing.n_rows, result.clearing.freed_bytes) == (len(RESULT), 0)
        assert {r.verb for r in acts(engine) if r.policy == "clearing"} == {"hide"}
        cleared = [Cleared(FIRST, LAST, result.n_reused_tokens)]
        assert differs("llama", request, result, cleared) < close("llama")

    def test_under_a_budget_that_evicts(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model_of("llama"), config=managed("h2o", budget_tokens=72))
        prompt = self.two_turns(engine)
        for turn in range(3):
            result = run(engine, clear(asked(prompt), (FIRST, LAST)))
            assert result.clearing is not None
            assert result.clearing.is_reused
            prompt = [*prompt, *result.token_ids, *ids(5, seed=50 + turn)]
            books_balance(engine)
        assert engine.kv.usage().n_tokens <= 72

    def test_heads_with_rows_of_their_own_keep_them(self, make_engine: MakeEngine) -> None:
        engine = make_engine(
            model_of("llama"), config=managed("snapkv", budget_tokens=48, eviction="per_head")
        )
        prompt = self.two_turns(engine)
        report = run(engine, clear(asked(prompt), (FIRST, LAST))).clearing
        assert report is not None
        assert [why for _, why in report.kept] == ["its heads keep rows of their own"]
        engine.kv.check_integrity()


def test_no_memory_for_the_copy_keeps_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model_of("llama"))
    first = run(engine, asked(PROMPT))
    prompt = [*PROMPT, *first.token_ids, *TAIL]

    def no_memory(*given: object) -> int:
        raise MemoryError

    monkeypatch.setattr(engine._core.tree, "evict", no_memory)
    result = run(engine, clear(asked(prompt), (FIRST, LAST)))
    assert result.clearing is not None
    assert result.clearing.kept == ((f"result-{FIRST}", "MemoryError: "),)
    assert result.token_ids == right(prompt)
    [receipt] = acts(engine)
    assert receipt.outcome == "failed"
    assert not any(has_cleared(path) for path in resident(engine).values())
    books_balance(engine)


@pytest.mark.parametrize("runs", [[(5, 3)], [(2, 6), (4, 8)], [(0, len(PROMPT))], []])
def test_strange_runs_are_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(RequestError, match="runs to clear must ascend"):
        clear(asked(PROMPT), *runs)


def test_an_exact_call_clears_nothing() -> None:
    with pytest.raises(RequestError, match="exact=True agrees to no clearing"):
        replace(clear(asked(PROMPT), (FIRST, LAST)), exact=True)


def test_a_request_that_is_cancelled_clears_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of("llama"))
    run(engine, asked(PROMPT))
    before = engine.kv.usage().n_tokens
    with held(engine):
        request = clear(asked([*PROMPT, *TAIL]), (FIRST, LAST))
        engine.submit(request, lambda event: None).cancel()
    settle(engine)
    assert engine.kv.usage().n_tokens == before
    assert not acts(engine)


def test_managed_and_cleared_logits_are_those_of_all_that_is_masked(
    make_engine: MakeEngine,
) -> None:
    """A policy evicts, the conversation clears: later queries see neither."""
    engine = make_engine(model_of("llama"), config=managed("h2o", budget_tokens=90))
    shadow = Shadow(engine)
    prompt, runs = list(SYSTEM), []
    for turn in range(4):
        first = len(prompt)
        prompt += [*ids(20, seed=70 + turn), *ids(6, seed=80 + turn)]
        request = asked(prompt, 6)
        if runs:
            request = clear(request, *runs)
        result = run(engine, request)
        assert result.clearing is None or result.clearing.is_reused
        runs.append((first, first + 20))
        prompt += result.token_ids
    n_blind = shadow.check()
    assert n_blind > 20
    assert {r.policy for r in shadow.receipts if r.outcome == "done"} == {"clearing", "h2o"}
    shadow.check_books()
