"""The budget is a promise: random agent traces never leave it, and nothing protected goes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from sidequest_langchain.config import Protection, Tiers
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.errors import BudgetExceeded
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.kv.parts import parts_of
from tests.engine.driving import ask, ids, model_of, resident, right_answer, submit_all, token_bytes
from tests.engine.managing import Shadow, managed, run
from tests.support import oracle
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

CHUNK, GROWTH = 16, 32
RULES = Protection(n_sink=3, recent_window=6, ends=0.0, newest_tool_call=False)
N_SYSTEM = 5


class Trace:
    """An agent that forks, generates, prunes and comes back; watches what is taken from it."""

    def __init__(self, engine):
        self.engine, self.tree = engine, engine._core.tree
        self.histories = [tuple(ids(N_SYSTEM + 3))]
        self.names = []
        self.n = self.n_refused = self.most_running = 0
        self.broken = []
        tree = self.tree
        for name in ("evict", "hide", "evict_by_head"):
            setattr(tree, name, functools.partial(self._watched, name, getattr(tree, name)))

    def _watched(self, name, original, segment, what):
        if name == "evict_by_head":
            kept = [set(heads) for layer in what.tolist() for heads in layer]
            gone = set(range(segment.n_tokens)) - set.intersection(*kept)
            managed = segment.residency
            if managed is not None and managed.kept_by_head is not None:
                before = [set(h) for layer in managed.kept_by_head.tolist() for h in layer]
                gone &= set.intersection(*before)
        else:
            gone = set(what)
        for at in gone:
            if segment.kinds[at] == TokenKind.SYSTEM:
                self.broken.append(f"{name} of a system token")
            if segment.start + at < RULES.n_sink:
                self.broken.append(f"{name} of a sink")
        for path in self.tree.paths.values():
            if segment in path.tip.path() and (path.is_running or not path.tip.children):
                recent = path.tip.end - RULES.recent_window
                if any(segment.start + at >= recent for at in gone):
                    self.broken.append(f"{name} of a recent token")
        return original(segment, what)

    def requests(self, at, sizes, n_new):
        base = self.histories[at % len(self.histories)]
        for size in sizes:
            self.n += 1
            prompt = [*base, *ids(size, seed=100 + self.n)][:400]
            kinds = bytes([TokenKind.SYSTEM] * N_SYSTEM + [0] * (len(prompt) - N_SYSTEM))
            name = f"b{self.n}"
            self.names.append(name)
            yield replace(ask(prompt, n_new, branch=name, ignore_eos=True), kinds=kinds)

    def ask(self, at, sizes, n_new):
        requests = list(self.requests(at, sizes, n_new))
        self.most_running = max(self.most_running, len(requests))
        told = submit_all(self.engine, requests)
        for request, (listener, _) in zip(requests, told, strict=True):
            outcome = listener.outcome()
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, BudgetExceeded), outcome
                self.n_refused += 1
            else:
                assert len(outcome.token_ids) == n_new
                self.histories.append((*request.prompt_ids, *outcome.token_ids))

    def exact(self, at, size, n_new):
        """A call that agreed to nothing lossy: it answers as if nothing were managed."""
        [request] = self.requests(at, [size], n_new)
        [(listener, _)] = submit_all(self.engine, [replace(request, exact=True)])
        outcome = listener.outcome()
        if isinstance(outcome, BudgetExceeded):
            self.n_refused += 1
            return
        assert not isinstance(outcome, BaseException), outcome
        model = self.engine._core.adapter.model
        right = oracle.greedy(model, request.prompt_ids, n_new, ignore_eos=True)
        assert list(outcome.token_ids) == right

    def pin(self, at, rest):
        """Of what is pinned no row leaves, whatever comes; what idled in a tier may come back."""
        name = self.names[at % len(self.names)] if self.names else "nobody"
        with self.engine.kv.pin(name):
            tips = [p.tip for p in self.tree.paths.values() if p.label.branch == name]
            before = positions(tips)
            getattr(self, rest[0])(*rest[1:])
            assert before <= positions(tips)

    def prune(self, at):
        if self.names:
            self.engine.kv.release(self.names[at % len(self.names)])

    def audit(self, budget):
        assert not self.broken, self.broken
        usage = self.engine.kv.usage()
        row = self.tree.bytes_per_token
        self.engine.kv.check_integrity()
        assert (
            oracle.storage_bytes([[s.storage, s.packed] for s in self.tree.segments()])
            == usage.n_bytes
        )
        # A step's rows: a chunk, and room to grow for everyone who decodes.
        most = budget + (CHUNK + GROWTH * self.most_running) * row
        assert usage.peak_bytes <= most, (usage.peak_bytes - budget) / row


def positions(tips):
    """Where each of some paths has rows: (tip, position)."""
    found = set()
    for tip in tips:
        for segment in tip.path():
            for part in parts_of(segment):
                offsets = range(part.n_rows) if part.offsets is None else part.offsets
                found.update((tip.segment_id, segment.start + at) for at in offsets)
    return found


ASKING = st.tuples(
    st.just("ask"),
    st.integers(0, 9),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 20),
)
OPS = st.one_of(
    ASKING,
    st.tuples(st.just("exact"), st.integers(0, 9), st.integers(1, 20), st.integers(1, 6)),
    st.tuples(st.just("pin"), st.integers(0, 9), ASKING),
    st.tuples(st.just("ask"), st.integers(0, 9), st.just([90]), st.integers(1, 6)),
    st.tuples(st.just("prune"), st.integers(0, 9)),
)
MODES = {
    "evict": {"policy": "h2o"},
    "window": {"policy": "window"},
    "lru": {"policy": "lru"},
    "staged": {"policy": "staged", "tiers": Tiers()},
    "archive": {"policy": "staged", "tiers": Tiers(cpu_bytes=40_000)},
    "by_head": {"policy": "snapkv", "eviction": "per_head"},
    "nothing": {"policy": lambda facts: ()},
}


LONG_PIECES = [
    ("ask", 6, [90], 5),
    ("ask", 4, [90], 4),
    ("pin", 0, ("ask", 6, [21], 12)),
    ("prune", 7),
    ("ask", 5, [22], 14),
]
EXACT_PIECES = [
    ("exact", 1, 19, 1),
    ("exact", 5, 9, 2),
    ("exact", 3, 20, 5),
    ("pin", 1, ("ask", 6, [17], 20)),
    ("ask", 6, [90], 3),
    ("exact", 5, 19, 2),
    ("pin", 5, ("ask", 5, [29, 19], 18)),
]
"""Traces in which pieces that were read as one were copied beside too much else."""
UNLIKE_HEADS = [
    ("ask", 5, [90], 5),
    ("ask", 4, [29, 10, 3], 6),
    ("exact", 9, 14, 6),
    ("ask", 7, [90], 4),
    ("ask", 7, [4, 9, 5], 10),
    ("pin", 2, ("ask", 6, [23, 12, 15], 11)),
]
"""A trace in which a cut leaves one head with fewer rows than another has protected ones."""


@pytest.mark.parametrize("mode", MODES)
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes
)
@given(ops=st.lists(OPS, min_size=3, max_size=8), n_rows=st.integers(110, 200))
@example(ops=LONG_PIECES, n_rows=139)
@example(ops=EXACT_PIECES, n_rows=125)
@example(ops=UNLIKE_HEADS, n_rows=129)
def test_random_traces_keep_the_budget(mode, ops, n_rows):
    from sidequest_langchain.engine.engine import Engine

    model = model_of("llama")
    budget = n_rows * token_bytes(model)
    config = managed(
        budget_tokens=None,
        budget_bytes=budget,
        prefill_chunk=CHUNK,
        protection=RULES,
        **MODES[mode],
    )
    engine = Engine(model, byte_tokenizer(), config=config)
    try:
        trace = Trace(engine)
        for name, *given_ in ops:
            getattr(trace, name)(*given_)
            trace.audit(budget)
    finally:
        engine.close()


N_LAYERS, LONG_CHUNK = 24, 64
EXACT_AT_THE_END = [
    ("ask", 4, [107, 17], 11),
    ("prune", 7),
    ("ask", 1, [139, 150], 40),
    ("exact", 8, 3, 1),
]
OLDER_COPIES = [
    ("ask", 5, [34, 150], 4),
    ("exact", 4, 15, 3),
    ("ask", 4, [90, 108], 20),
    ("ask", 2, [150, 16], 2),
    ("exact", 5, 10, 6),
]
"""A trace in which a long segment went to the archive while a chunk was over the budget."""
LONG_OPS = st.one_of(
    st.tuples(
        st.just("ask"),
        st.integers(0, 9),
        st.lists(st.integers(1, 150), min_size=1, max_size=2),
        st.integers(1, 40),
    ),
    st.tuples(st.just("exact"), st.integers(0, 9), st.integers(1, 20), st.integers(1, 6)),
    st.tuples(st.just("prune"), st.integers(0, 9)),
)


@pytest.mark.parametrize("mode", ["evict", "lru", "staged", "archive", "disk", "by_head"])
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(ops=st.lists(LONG_OPS, min_size=3, max_size=6), n_rows=st.integers(400, 480))
@example(ops=[("ask", 0, [150], 30), ("ask", 1, [140], 40), ("ask", 2, [99], 20)], n_rows=400)
@example(ops=EXACT_AT_THE_END, n_rows=275)
@example(ops=OLDER_COPIES, n_rows=424)
def test_random_traces_keep_a_budget_in_rows(mode, ops, n_rows, tmp_path):
    """Paths of many layers lie in one storage, which changes layer by layer."""
    from sidequest_langchain.engine.engine import Engine

    model = tiny_model("llama", num_hidden_layers=N_LAYERS)
    row, united = token_bytes(model), []
    tiers = {
        "archive": {"cpu_bytes": 150 * row},
        "disk": {"cpu_bytes": 40 * row, "disk_bytes": 400 * row, "archive_folder": tmp_path},
    }
    of_mode = MODES.get(mode, MODES["archive"])
    if mode in tiers:
        of_mode = of_mode | {"tiers": Tiers(**tiers[mode])}
    config = managed(budget_tokens=n_rows, prefill_chunk=LONG_CHUNK, protection=RULES, **of_mode)
    engine = Engine(model, byte_tokenizer(), config=config)
    unite = engine._core.tree.unite

    def watched(tip, **most):
        unite(tip, **most)
        united.append(any(s.storage.changes_by_layer for s in tip.path()))

    engine._core.tree.unite = watched
    try:
        trace = Trace(engine)
        for name, *given_ in ops:
            getattr(trace, name)(*given_)
            # A step's rows, and as many again while rows move: a chunk each.
            n_more = 2 * LONG_CHUNK - CHUNK - GROWTH * trace.most_running
            trace.audit((n_rows + max(LONG_CHUNK - CHUNK, n_more)) * row)
            # What agreed to nothing may end over the budget, by a chunk like any step.
            assert engine.kv.usage().n_tokens <= n_rows + LONG_CHUNK
    finally:
        engine.close()
    if ops[0] == ("ask", 0, [150], 30):
        assert any(united), "nothing lay together"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unit", ["bytes", "tokens"])
def test_one_long_answer_keeps_the_budget(mode, unit, make_engine):
    """A path five times as long as the budget: every row goes once, and each act is worth it."""
    row = token_bytes(model_of("llama"))
    of_unit = {"bytes": (None, 80 * row), "tokens": (80, None)}[unit]
    budget = dict(zip(("budget_tokens", "budget_bytes"), of_unit, strict=True))
    engine = make_engine(model_of("llama"), config=managed(**budget, **MODES[mode]))
    shadow = Shadow(engine, "llama")
    run(engine, ask(ids(60), 200, ignore_eos=True))
    usage = engine.kv.usage()
    assert usage.peak_bytes <= (80 + CHUNK + GROWTH) * row
    assert usage.n_tokens <= 80
    done = [r for r in shadow.receipts if r.outcome == "done" and r.verb != "archive"]
    assert sum(r.freed_bytes for r in done) == (60 + 199) * row - usage.n_bytes
    assert len(done) <= 200
    assert shadow.check() > 100
    shadow.check_books()


def rows_of(tree):
    """What is resident: by segment its precision and rows."""
    return [
        (s.segment_id, s.n_bytes, s.kept, tuple(b.offsets for b in s.packed), s.hidden)
        for s in tree.segments()
        if s.token_ids
    ]


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_protected_rows_alone_exceed_the_budget(order, may_wait, make_engine, monkeypatch):
    """A clear error for who holds most, before anything is lost; who else runs goes on."""
    if not may_wait:  # as if both were pinned
        monkeypatch.setattr(Sequence, "may_be_held_back", False)
    engine = make_engine(model_of("llama"), config=managed(budget_tokens=90))
    manager, tree = engine._core.manager, engine._core.tree
    make_room, told = manager.make_room, []

    def watched(*args, **given):
        before = sorted(rows_of(tree))
        try:
            make_room(*args, **given)
        except BudgetExceeded as error:
            told.append(error)
            ids_before = {row[0] for row in before}
            # Sealing makes segments of what tips hold, and changes nothing else.
            after = sorted(row for row in rows_of(tree) if row[0] in ids_before)
            assert [r[2:] for r in after] == [r[2:] for r in before]
            assert sum(row[1] for row in before) == tree.n_bytes
            raise

    manager.make_room = watched
    kinds = bytes([TokenKind.SYSTEM] * 150)
    heavy = replace(ask(ids(150, seed=2), 4, call="heavy"), kinds=kinds)
    small = ask(ids(10, seed=3), 12, call="small")
    with pytest.raises(BudgetExceeded, match=r"protected .*larger budget"):
        run(engine, heavy)
    assert resident(engine) == {}
    requests = [small, heavy]
    submitted = submit_all(engine, [requests[i] for i in order])
    outcomes = {i: listener.outcome() for i, (listener, _) in zip(order, submitted, strict=True)}
    assert isinstance(outcomes[1], BudgetExceeded)
    assert not isinstance(outcomes[0], BaseException), outcomes[0]
    assert len(outcomes[0].token_ids) == 12
    assert len(told) >= 2
    engine.kv.check_integrity()
    # Who came first runs first; what a call left that is over may go for one that runs.
    is_last = order == (1, 0) or not may_wait
    assert set(resident(engine)) == ({"small"} if is_last else set())
    assert len(run(engine, ask(ids(20, seed=5), 6, ignore_eos=True)).token_ids) == 6


def test_idle_calls_that_agreed_to_nothing_are_released(make_engine):
    """Exact calls lose no row, but what idles of them goes as a whole: that is exact."""
    config = managed(budget_tokens=100, isolation="shared")
    engine = make_engine(model_of("llama"), config=config)
    for n in range(5):
        prompt = ids(50, seed=n)
        request = replace(ask(prompt, 6), exact=True)
        assert run(engine, request).token_ids == right_answer("llama", prompt, 6)
        assert engine.kv.usage().n_tokens <= 100
    run(engine, ask(ids(60, seed=9), 40, ignore_eos=True))
    assert engine.kv.usage().n_tokens <= 100
    with pytest.raises(BudgetExceeded):
        run(engine, replace(ask(ids(120, seed=8), 4), exact=True))
    assert run(engine, ask(ids(20, seed=7), 4)).token_ids == right_answer(
        "llama", ids(20, seed=7), 4
    )
