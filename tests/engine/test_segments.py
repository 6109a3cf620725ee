"""What is told of the cache: segments, counters, receipts; and replies, also superseded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.replies import Reply, ReplyLog
from sidequest_langchain.engine.request import GenerationRequest
from tests.engine import checks
from tests.engine.driving import (
    PATIENCE_S,
    ask,
    audit,
    ids,
    model_of,
    recorded,
    resident,
    run,
    run_together,
    stored,
)
from tests.support.force import force

MakeEngine = Callable[..., Engine]
LLAMA = "llama"


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(model_of(LLAMA))


def grow(engine: Engine) -> None:
    """A trunk of 20 in thread `t`, and two branches of it, one of another thread."""
    run(engine, ask(ids(20), 1, call="trunk", thread="t"))
    run(engine, ask([*ids(20), *ids(5, seed=1)], 1, call="left", thread="t", branch="b1"))
    run(engine, ask([*ids(20), *ids(7, seed=2)], 1, call="right", thread="u"))


def test_segments_show_the_tree(engine: Engine) -> None:
    grow(engine)
    trunk, *others = engine.kv.segments()
    left, right = sorted(others, key=lambda info: info.n_tokens)
    assert (trunk.parent_id, trunk.start, trunk.n_tokens, trunk.n_bytes) == (None, 0, 20, 20 * 512)
    assert (left.parent_id, left.start, left.n_tokens, left.n_bytes) == (
        trunk.segment_id,
        20,
        5,
        5 * 512,
    )
    assert (right.start, right.n_tokens) == (20, 7)
    named = [[label.call_id for label in info.labels] for info in (trunk, left, right)]
    assert named == [["trunk"], ["left"], ["right"]]
    assert left.labels[0].path_id == "b1"
    assert {info.n_readers for info in engine.kv.segments()} == {0}


def test_segments_of_a_thread_are_whole_paths(engine: Engine) -> None:
    grow(engine)
    sizes = {
        thread: sorted(info.n_tokens for info in engine.kv.segments(thread)) for thread in "tux"
    }
    assert sizes == {"t": [5, 20], "u": [7, 20], "x": []}


def test_readers_are_counted_while_they_read(engine: Engine) -> None:
    grow(engine)
    seen: list[dict[int, int]] = []

    def look(n: int) -> None:
        seen.append({info.n_tokens: info.n_readers for info in engine.kv.segments()})

    with recorded(model_of(LLAMA), look):
        run(engine, ask([*ids(20), *ids(5, seed=1)], 1))
    assert seen == [{20: 1, 5: 1, 7: 0, 0: 1}]


def test_usage_counts_as_computed_by_hand(engine: Engine) -> None:
    """Prompts of 100, 100 and 150 tokens that share 80, the second of them twice."""
    lengths = [(100, 1, 4), (100, 2, 4), (150, 3, 2), (100, 2, 4)]
    for n, seed, n_new in lengths:
        run(engine, ask([*ids(80), *ids(n - 80, seed=seed)], n_new, ignore_eos=True))
    usage = engine.kv.usage()
    assert usage.n_prompt_tokens == 100 + 100 + 150 + 100
    assert usage.n_reused_tokens == 0 + 80 + 80 + 100
    assert usage.n_prefilled_tokens == 100 + 20 + 70 + 0
    assert usage.n_generated_tokens == 4 + 4 + 2 + 4
    assert usage.n_steps == 4 + 4 + 2 + 4
    assert usage.n_tokens == 80 + (20 + 3) + (20 + 3) + (70 + 1)
    assert usage.n_paths == 4
    assert engine.kv.serial == 4


def test_a_failed_request_is_counted_nowhere(engine: Engine) -> None:
    def fail(n: int) -> None:
        raise ZeroDivisionError

    before = engine.kv.usage()
    with recorded(model_of(LLAMA), fail), pytest.raises(ZeroDivisionError):
        run(engine, ask(ids(20)))
    after = engine.kv.usage()
    assert (after.n_prompt_tokens, after.n_steps, after.n_bytes) == (
        before.n_prompt_tokens,
        before.n_steps,
        before.n_bytes,
    )


def test_the_peak_is_measured_anew(engine: Engine) -> None:
    run(engine, ask(ids(100), 2, call="big"))
    assert engine.kv.usage().peak_bytes >= 101 * 512
    engine.kv.release("big")
    assert engine.kv.usage().peak_bytes >= 101 * 512
    engine.kv.reset_peak()
    usage = engine.kv.usage()
    assert usage.peak_bytes == usage.peak_resident_bytes == 0
    run(engine, ask(ids(10), 1))
    usage = engine.kv.usage()
    assert usage.peak_bytes == usage.peak_resident_bytes == 10 * 512


def test_observers_hear_of_every_release(engine: Engine) -> None:
    heard: list[Any] = []
    grow(engine)
    undo = engine.kv.observe(heard.append)
    receipts = [engine.kv.release("b1"), engine.kv.release("nobody"), engine.kv.clear("u")]
    undo()
    engine.kv.clear()
    assert heard == receipts
    assert engine.kv.receipts()[:3] == tuple(receipts)
    assert receipts[1].to_json() == {
        "path": "nobody",
        "reason": "released",
        "freed_bytes": 0,
        "freed_tokens": 0,
        "segments": (),
        "n_paths": 0,
        "is_known": False,
        "n_deferred": 0,
        "exact": True,
    }


def test_times_are_in_order(engine: Engine) -> None:
    results = run_together(engine, [ask(ids(40, seed=n), 4) for n in range(3)])
    for result in results:
        assert 0 <= result.queue_s <= result.first_token_s <= result.total_s < PATIENCE_S
        assert result.segment_id in {info.segment_id for info in engine.kv.segments()}


# -- replies -----------------------------------------------------------------------------


def test_a_reply_is_remembered_as_it_was_generated(engine: Engine) -> None:
    """A word in a split that its text would not be encoded with; the next turn reuses it."""
    spelt = [token for letter in "Hanzi" for token in engine.tokenizer.encode(letter)]
    assert engine.tokenizer.encode("Hanzi") != spelt
    request = ask(ids(20), 30, call="said", stop=(".",))
    with force(model_of(LLAMA), [*spelt, *engine.tokenizer.encode(". And")]):
        result = run(engine, request)
    reply = engine.replies.get("said")
    assert reply == Reply(text="Hanzi", token_ids=tuple(spelt))
    assert result.kept_ids == tuple(spelt)
    turn = ask([*ids(20), *reply.token_ids, 7, 8], 5)
    checks.check_answer(engine, LLAMA, turn, n_reused=20 + len(spelt))
    assert engine.replies.get("unsaid") is None


def test_the_log_of_replies_is_bounded() -> None:
    log = ReplyLog(n_most=3)
    for n in range(3):
        log.add(str(n), Reply(text=str(n), token_ids=(n,)))
    assert log.get("0") is not None
    log.add("3", Reply(text="3", token_ids=(3,)))
    assert [log.get(str(n)) is not None for n in range(4)] == [True, False, True, True]
    log.add("3", Reply(text="new", token_ids=(4,)))
    found = log.get("3")
    assert found is not None
    assert (found.text, len(log)) == ("new", 3)


def superseding(prompt: list[int], *calls: str) -> GenerationRequest:
    request = ask(prompt, 5)
    return GenerationRequest(
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        label=request.label,
        superseded=calls,
    )


def test_a_superseded_reply_is_let_go(engine: Engine) -> None:
    """Its head is still in the new prompt and stays; a branch of somebody else's stays too."""
    old = ask(ids(20), 12, call="old", ignore_eos=True)
    answer = run(engine, old)
    other = ask([*stored(old, answer), *ids(3, seed=9)], 2, call="other")
    kept_other = stored(other, run(engine, other))
    new = superseding([*ids(20), *answer.token_ids[:4], *ids(6, seed=3)], "old", "unknown")
    result = run(engine, new)
    checks.check_result(LLAMA, new, result)
    assert result.n_reused_tokens == 24
    audit(engine, [kept_other, stored(new, result)])
    engine.kv.release("other")
    # What `old` has left is what it shares with the new prompt.
    assert resident(engine)["old"] == stored(new, result)[:24]
    audit(engine, [stored(new, result)])
