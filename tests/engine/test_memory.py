"""Memory: what is released is gone, what is shared is there once, and budgets hold.

Expected rows come from the ids alone: the nodes of the trie of all live paths.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.replies import Reply
from sidequest_langchain.engine.request import GenerationResult
from sidequest_langchain.errors import RequestCancelledError
from sidequest_langchain.labels import PathSelector
from tests.engine import checks
from tests.engine.driving import (
    ask,
    audit,
    ids,
    longest_head,
    model_of,
    n_distinct,
    n_fed,
    recorded,
    resident,
    right_answer,
    run,
    run_together,
    stored,
    submit_all,
)
from tests.support import oracle
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

MakeEngine = Callable[..., Engine]
LLAMA = "llama"
PER_TOKEN = 512


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(model_of(LLAMA))


# -- release -----------------------------------------------------------------------------


def test_a_trunk_of_1000_tokens_in_8_branches(make_engine: MakeEngine) -> None:
    model = tiny_model(LLAMA, max_position_embeddings=2048)
    engine = make_engine(model)
    trunk = [(13 * i * i + 7 * i) % 400 for i in range(1000)]
    requests = [
        ask([*trunk, *ids(n, seed=n)], 3, ignore_eos=True, branch=str(n)) for n in range(1, 9)
    ]
    with recorded(model) as passes:
        results = run_together(engine, requests)
    assert [result.n_reused_tokens for result in results] == [0] + 7 * [1000]
    assert n_fed(passes) == 1000 + 36 + 8 * 2
    audit(engine, map(stored, requests, results))
    assert engine.kv.usage().n_bytes == (1000 + 36 + 8 * 2) * PER_TOKEN
    for request, result in zip(requests[::4], results[::4], strict=True):
        assert list(result.token_ids) == oracle.greedy(
            model, request.prompt_ids, 3, ignore_eos=True
        )
    for n in range(1, 8):
        checks.check_release(engine, str(n), n_tokens=n + 2)
    checks.check_release(engine, "8", n_tokens=1000 + 8 + 2)
    audit(engine, [])


def test_released_storages_are_gone(engine: Engine) -> None:
    """No view keeps the storage of a whole prefill alive."""
    run(engine, ask(ids(64), 1, call="first"))
    whole = weakref.ref(next(iter(engine._core.tree.segments())).storage._parts[0])
    for n in range(1, 4):
        run(engine, ask([*ids(16 * n), *ids(48, seed=n)], 1, call=str(n)))
    gc.collect()
    assert whole() is None
    audit(engine)
    checks.check_release(engine, "first", n_tokens=16)
    checks.check_release(engine, "3", n_tokens=48 + 16)
    audit(engine, [[*ids(16), *ids(48, seed=1)], [*ids(32), *ids(48, seed=2)]])


def test_the_trunk_is_never_written_by_its_branches(engine: Engine) -> None:
    run(engine, ask(ids(40), 1, call="trunk"))

    def print_of() -> tuple[Any, ...]:
        [segment] = [s for s in engine._core.tree.segments() if s.start == 0]
        tensors = (*segment.keys, *segment.values)
        return (
            tuple(segment.token_ids),
            [t.data_ptr() for t in tensors],
            [t.sum().item() for t in tensors],
        )

    before = print_of()
    for n in (1, 2, 3, 1):
        request = ask([*ids(40), *ids(5, seed=n)], 6)
        assert run(engine, request).token_ids == right_answer(LLAMA, request.prompt_ids, 6)
        assert print_of() == before


def test_a_release_takes_every_path_of_its_name(engine: Engine) -> None:
    for n in range(3):
        run(engine, ask([*ids(20), *ids(4, seed=n)], 2, branch="b", thread=f"t{n % 2}"))
    run(engine, ask([*ids(20), *ids(4, seed=7)], 2, branch="other", thread="t0"))
    receipt = engine.kv.release("b", thread_id="t1")
    assert (receipt.n_paths, receipt.freed_tokens) == (1, 5)
    receipt = engine.kv.release("b")
    assert (receipt.n_paths, receipt.freed_tokens, len(receipt.segments)) == (2, 10, 2)
    receipt = engine.kv.release("b")
    assert (receipt.n_paths, receipt.freed_bytes) == (0, 0)
    assert engine.kv.clear("t0").freed_tokens == 25
    audit(engine, [])
    assert [r.freed_tokens for r in engine.kv.receipts()] == [5, 10, 0, 25]
    assert engine.kv.usage().n_released_bytes == 40 * PER_TOKEN


def test_a_posted_release_waits_for_nothing(engine: Engine) -> None:
    run(engine, ask(ids(20), 2, call="old"))
    futures = []

    def post(n: int) -> None:
        if n == 3:
            selector = PathSelector(path_id="old")
            futures.append(engine.kv.post_release(selector, reason="posted"))

    with recorded(model_of(LLAMA), post):
        run(engine, ask(ids(20, seed=1), 6, ignore_eos=True))
    receipt = futures[0].result(5)
    assert (receipt.reason, receipt.freed_tokens) == ("posted", 21)


# -- release of what is in use -----------------------------------------------------------


def test_released_while_running_goes_at_its_end(engine: Engine) -> None:
    request = ask(ids(20), 8, call="busy", ignore_eos=True)
    receipts = []

    def release(n: int) -> None:
        if n == 4:
            receipts.append(engine.kv.predict_release("busy"))
            receipts.append(engine.kv.release("busy"))

    with recorded(model_of(LLAMA), release):
        result = run(engine, request)
    assert result.token_ids == tuple(oracle.greedy(model_of(LLAMA), ids(20), 8, ignore_eos=True))
    assert [(r.n_paths, r.n_deferred, r.freed_bytes) for r in receipts] == [(1, 1, 0)] * 2
    audit(engine, [])
    last = engine.kv.receipts()[-1]
    assert (last.path, last.freed_tokens, last.n_deferred) == ("busy", 27, 0)


def test_a_released_trunk_stays_while_a_branch_runs(engine: Engine) -> None:
    run(engine, ask(ids(40), 5, call="trunk"))
    request = ask([*ids(40), *ids(5, seed=1)], 8)
    with recorded(model_of(LLAMA), lambda n: engine.kv.release("trunk") if n == 3 else None):
        result = run(engine, request)
    checks.check_result(LLAMA, request, result)
    audit(engine, [stored(request, result)])


@pytest.mark.parametrize("when", ["before", "while running"])
def test_pinned_paths_stay(engine: Engine, when: str) -> None:
    request = ask(ids(20), 5, call="pinned")
    pins = []
    at = 2 if when == "while running" else 0
    with recorded(
        model_of(LLAMA), lambda n: pins.append(engine.kv.pin("pinned")) if n == at else None
    ):
        kept = stored(request, run(engine, request))
    pins = pins or [engine.kv.pin("pinned")]
    audit(engine, [kept])
    receipt = engine.kv.release("pinned")
    assert (receipt.n_paths, receipt.n_deferred, receipt.freed_bytes) == (1, 1, 0)
    audit(engine, [kept])
    checks.check_answer(engine, LLAMA, ask(ids(20), 5, call="again"), n_reused=20)
    engine.kv.release("again")
    audit(engine, [kept])
    pins[0].unpin()
    audit(engine, [])
    pins[0].unpin()
    assert engine.kv.receipts()[-1].freed_tokens == len(kept)


def test_a_pin_is_a_context_manager_and_counts(engine: Engine) -> None:
    kept = stored(ask(ids(20), 5), run(engine, ask(ids(20), 5, call="pinned")))
    with engine.kv.pin("pinned"):
        with engine.kv.pin("pinned"):
            pass
        engine.kv.clear()
        audit(engine, [kept])
    audit(engine, [])
    with engine.kv.pin("unknown"):
        pass


def test_pinned_while_running_and_wholly_shared(engine: Engine) -> None:
    """The pinned path adds no row of its own: it ends in rows that were there."""
    kept = stored(ask(ids(20), 5), run(engine, ask(ids(20), 5, call="first")))
    with recorded(
        model_of(LLAMA), lambda n: pins.append(engine.kv.pin("second")) if n == 1 else None
    ):
        pins: list[Any] = []
        run(engine, ask(ids(20), 5, call="second"))
    audit(engine, [kept])
    engine.kv.clear()
    audit(engine, [kept])
    pins[0].unpin()
    audit(engine, [])


def test_pinned_while_running_and_cancelled(engine: Engine) -> None:
    def act(n: int) -> None:
        if n == 2:
            pins.append(engine.kv.pin("doomed"))
        if n == 4:
            ticket.cancel()

    pins: list[Any] = []
    with recorded(model_of(LLAMA), act):
        [(listener, ticket)] = submit_all(
            engine, [ask(ids(20), 50, call="doomed", ignore_eos=True)]
        )
        assert isinstance(listener.outcome(), RequestCancelledError)
    engine.kv.check_integrity()
    pins[0].unpin()
    audit(engine, [])


def test_a_pin_outlives_its_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA))
    run(engine, ask(ids(20), 5, call="pinned"))
    with engine.kv.pin("pinned"):
        engine.close()


# -- everything at random ----------------------------------------------------------------


class Walk:
    """Random acts on an engine, beside the ids of all paths that must be live."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.live: dict[str, tuple[int, ...]] = {}
        self.n_calls = 0

    def act(self) -> None:
        acts = [self.expand, self.expand, self.fork, self.prune, self.prune_twice, self.cancel]
        acts += [self.fail, self.again, self.back]
        self.random.choice(acts)()

    def prompt(self) -> list[int]:
        """Some head of a live path, with something new."""
        paths = list(self.live.values())
        path = self.random.choice(paths) if paths else ()
        head = path[: self.random.randint(0, len(path))]
        return [*head, *ids(self.random.randint(1, 9), seed=self.random.randint(0, 5))]

    def request(self, prompt: list[int] | None = None, n: int = 3) -> Any:
        self.n_calls += 1
        return ask(prompt or self.prompt(), n, call=f"c{self.n_calls}")

    def expand(self, request: Any = None) -> None:
        request = request or self.request()
        result = run(self.engine, request)
        n_reused = longest_head(request.prompt_ids, [(), *self.live.values()])
        assert result.n_reused_tokens == n_reused
        self.note(request, result)

    def note(self, request: Any, result: GenerationResult) -> None:
        checks.check_result(LLAMA, request, result)
        self.live[request.label.call_id] = stored(request, result)

    def fork(self) -> None:
        requests = [self.request() for _ in range(self.random.randint(2, 4))]
        for request, result in zip(requests, run_together(self.engine, requests), strict=True):
            self.note(request, result)

    def again(self) -> None:
        if self.live:
            self.expand(self.request(list(self.random.choice(list(self.live.values())))))

    def prune(self, *, times: int = 1) -> None:
        if not self.live:
            return
        name = self.random.choice(list(self.live))
        n_before = n_distinct(self.live.values())
        del self.live[name]
        checks.check_release(self.engine, name, n_tokens=n_before - n_distinct(self.live.values()))

    def prune_twice(self) -> None:
        self.prune()
        assert self.engine.kv.release("nobody").n_paths == 0

    def back(self) -> None:
        """Everything that goes through one path's middle."""
        if not self.live:
            return
        path = self.random.choice(list(self.live.values()))
        head = path[: max(1, len(path) // 2)]
        for name in [n for n, p in self.live.items() if p[: len(head)] == head]:
            del self.live[name]
            self.engine.kv.release(name)

    def cancel(self) -> None:
        request = self.request(n=60)
        at = self.random.randint(1, 4)
        with recorded(model_of(LLAMA), lambda n: ticket.cancel() if n == at else None):
            [(listener, ticket)] = submit_all(self.engine, [request])
            outcome = listener.outcome()
        if isinstance(outcome, GenerationResult):
            self.note(request, outcome)

    def fail(self) -> None:
        request, other = self.request(n=60), self.request()
        at = self.random.randint(1, 4)

        def act(n: int) -> None:
            if n >= at:
                raise ZeroDivisionError

        with recorded(model_of(LLAMA), act):
            submitted = submit_all(self.engine, [request, other])
            outcomes = [listener.outcome() for listener, _ in submitted]
        for each, outcome in zip((request, other), outcomes, strict=True):
            if isinstance(outcome, GenerationResult):
                self.note(each, outcome)


@pytest.mark.parametrize("seed", [0, 1])
def test_100_random_acts(engine: Engine, seed: int) -> None:
    walk = Walk(engine, seed)
    for _ in range(100):
        walk.act()
        audit(engine, walk.live.values())
        assert resident(engine) == walk.live
    names = list(walk.live)
    for name in names:
        engine.kv.release(name)
    audit(engine, [])
    usage = engine.kv.usage()
    assert (usage.n_bytes, usage.n_segments, usage.n_paths) == (0, 0, 0)


# -- budgets -----------------------------------------------------------------------------


def budget_run(engine: Engine, n_calls: int = 12) -> None:
    """A conversation and some branches, all right whatever was swept."""
    prompt = ids(20)
    for n in range(n_calls):
        request = ask(prompt if n % 2 else [*ids(25), *ids(9, seed=n)], 6, ignore_eos=True)
        result = run(engine, request)
        assert result.token_ids == tuple(
            oracle.greedy(model_of(LLAMA), request.prompt_ids, 6, ignore_eos=True)
        )
        if n % 2:
            prompt = [*prompt, *result.kept_ids][:40]
        engine.kv.check_integrity()


def test_budget_in_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_tokens=100))
    most = 0

    def look(n: int) -> None:
        nonlocal most
        most = max(most, engine._core.tree.n_tokens)

    with recorded(model_of(LLAMA), look):
        budget_run(engine)
    assert 60 < most <= 100
    assert 60 < engine.kv.usage().n_tokens <= 100


def test_budget_in_bytes_holds_at_the_peak(make_engine: MakeEngine) -> None:
    budget = 150 * PER_TOKEN
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_bytes=budget))
    for n in range(10):
        budget_run(engine, n_calls=2)
        run(engine, ask([*ids(25), *ids(9, seed=n)], 6))
    # A call's own 14 rows end in room for 41. What is resident is at most 114 rows when a tip with
    # 9 rows gets its 32 more; at the allocator it is 141 when such a tip closes, and its 14 again.
    usage = engine.kv.usage()
    assert usage.peak_resident_bytes == (114 + 32) * PER_TOKEN <= budget
    assert usage.peak_bytes == (141 + 14) * PER_TOKEN


def test_budget_in_bytes_holds_while_a_segment_is_split(make_engine: MakeEngine) -> None:
    """What a split leaves is what the segment held; in between it is there twice."""
    budget = 145 * PER_TOKEN
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_bytes=budget))
    run(engine, ask(ids(100), 1))
    result = run(engine, ask([*ids(60), *ids(9, seed=1)], 2))
    assert result.n_reused_tokens == 60
    usage = engine.kv.usage()
    assert usage.peak_resident_bytes == (100 + 9 + 32) * PER_TOKEN <= budget
    assert usage.peak_bytes == (100 + 60 + 40) * PER_TOKEN


def test_the_least_recently_used_goes_first(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_tokens=80))
    for n in range(3):
        run(engine, ask(ids(20, seed=n), 1, call=str(n)))
    run(engine, ask(ids(20, seed=0), 1, call="0 again"))
    run(engine, ask(ids(39, seed=5), 1, call="new"))
    assert set(resident(engine)) == {"0", "0 again", "2", "new"}


def test_leaves_go_before_what_they_stand_on(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_tokens=60))
    run(engine, ask(ids(20), 1, call="trunk"))
    branches = [ask([*ids(20), *ids(15, seed=n)], 4) for n in range(4)]
    for request in branches:
        result = run(engine, request)
        checks.check_result(LLAMA, request, result)
        assert result.n_reused_tokens >= 20
    engine.kv.check_integrity()


def test_a_request_above_the_budget_runs_and_then_goes(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_tokens=30))
    checks.check_answer(engine, LLAMA, ask(ids(60), 6), n_reused=0)
    assert engine.kv.usage().n_tokens <= 30
    requests = [ask(ids(25, seed=n), 6) for n in range(4)]
    for request, result in zip(requests, run_together(engine, requests), strict=True):
        checks.check_result(LLAMA, request, result)
    assert engine.kv.usage().n_tokens <= 30
    engine.kv.check_integrity()


def test_pinned_paths_are_not_swept(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_tokens=60))
    run(engine, ask(ids(30), 1, call="pinned"))
    with engine.kv.pin("pinned"):
        for n in range(1, 5):
            run(engine, ask(ids(25, seed=n), 3))
            assert resident(engine)["pinned"] == tuple(ids(30))
    checks.check_answer(engine, LLAMA, ask(ids(30), 3), n_reused=30)


def test_500_threads_under_a_budget(make_engine: MakeEngine) -> None:
    """Nothing is ever pruned; neither bytes nor objects pile up, and all goes with the engine."""
    engine = make_engine(model_of(LLAMA), config=CacheConfig(budget_bytes=2**20))
    tree = engine._core.tree
    n_objects = []
    for n in range(500):
        prompt = [n % 400, n // 400, *ids(60, seed=n % 7)]
        run(engine, ask(prompt, 2, scope=f"s{n}", thread=f"t{n}", call=f"c{n}"))
        assert tree.n_bytes <= 2**20
        if n in (150, 499):
            gc.collect()
            # The log of replies is bounded by itself, far above this.
            n_objects.append(sum(type(one) is not Reply for one in gc.get_objects()))
    # 31 calls of 63 rows and a running one of 62 with its room to grow; it closes with a copy.
    usage = engine.kv.usage()
    assert usage.peak_resident_bytes == (31 * 63 + 62 + 32) * PER_TOKEN <= 2**20
    assert usage.peak_bytes == usage.peak_resident_bytes + 63 * PER_TOKEN
    assert len(tree.paths) < 40
    assert len(tree._roots) < 40
    assert n_objects[1] - n_objects[0] < 100, "something is kept for each thread"
    audit(engine)


# -- what is stored ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.enable_grad,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference_mode", "enable_grad", "no_grad", "autocast"],
)
@pytest.mark.parametrize("made_inside", [False, True])
def test_the_callers_torch_modes_change_nothing(mode: Any, made_inside: bool) -> None:
    model = tiny_model(LLAMA).requires_grad_()
    engine = None if made_inside else Engine(model, byte_tokenizer())
    with mode():
        engine = engine or Engine(model, byte_tokenizer())
        requests = [ask(ids(40), 6), ask([*ids(20), *ids(5, seed=1)], 6)]
        results = [run(engine, request) for request in requests]
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == right_answer(LLAMA, request.prompt_ids, 6)
    for segment in engine._core.tree.segments():
        for tensor in (*segment.keys, *segment.values):
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
            assert not tensor.is_inference()
    audit(engine, map(stored, requests, results))
    engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_of_the_models_dtype(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    model = tiny_model(LLAMA).to(dtype)
    engine = make_engine(model)
    requests = [ask([*ids(20), *ids(n, seed=n)], 4, top_logprobs=0) for n in (1, 5)]
    results = run_together(engine, requests)
    assert engine.kv.usage().n_bytes == engine.kv.usage().n_tokens * PER_TOKEN // 2
    for request, result in zip(requests, results, strict=True):
        full = [*request.prompt_ids, *result.token_ids]
        expected = torch.log_softmax(oracle.logits(model, full), -1)
        for i, found in enumerate(result.logprobs):
            row = expected[len(request.prompt_ids) - 1 + i]
            assert abs(found.logprob - float(row[found.token_id])) < 0.25
