"""What a recorder writes down is what the plain model's attention matrices say comes next."""

from __future__ import annotations

import numpy as np
import pytest

from sidequest_langchain.config import CacheConfig, Protection
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.importance import FEATURES
from tests.engine.driving import ask, ids, model_of, run
from tests.policy.test_monitor import attention_of
from tests.support.tok import byte_tokenizer

KEPT = Protection(n_sink=3, recent_window=6, ends=0.0, newest_tool_call=False)
OBSERVING = {"observe": True, "prompt_lookup": 0, "observed_layers": (0, 1), "protection": KEPT}
BASE = FEATURES.index("log_importance")
POSITION = FEATURES.index("log_position")


def engine_of(**settings):
    config = CacheConfig(**{**OBSERVING, **settings})
    return Engine(model_of("llama"), byte_tokenizer(), config=config)


@pytest.fixture
def engine():
    engine = engine_of()
    yield engine
    engine.close()


def positions_of(cycle):
    return np.rint(np.expm1(cycle.features[:, POSITION])).astype(int).tolist()


def record(engine, prompts, n=30, *, every=32, horizon=20):
    tokens = []
    with engine.kv.recording("s", KEPT, every=every, horizon=horizon) as recorder:
        for prompt in prompts:
            given = [*tokens, *prompt]
            tokens = given + list(run(engine, ask(given, n, ignore_eos=True)).token_ids)
    return recorder, tokens


def test_the_future_is_that_of_the_plain_model(engine):
    recorder, tokens = record(engine, [ids(40)])
    first = recorder.cycles[0]
    # After the prompt: its last 32 queries were looked at; the 20 that come next are the future.
    attention = attention_of("llama", tokens).numpy()[:2].mean(0)
    assert first.sample == "s"
    assert positions_of(first) == list(range(3, 34))
    assert first.future == pytest.approx(attention[40:60, 3:34].mean(0), abs=1e-5)
    seen = [attention[max(8, at) : 40, at].mean() for at in range(3, 34)]
    assert np.exp(first.features[:, BASE]) == pytest.approx(seen, abs=1e-5)


def test_it_goes_on_over_the_next_turn(engine):
    recorder, tokens = record(engine, [ids(40), ids(9, seed=2)], 10, horizon=24)
    attention = attention_of("llama", tokens).numpy()[:2].mean(0)
    # Of the 10 tokens answered 9 are fed, then a chunk of 10 ends the next prompt, then 5 are fed.
    first = recorder.cycles[0]
    assert first.future == pytest.approx(attention[40:64, 3:34].mean(0), abs=1e-5)


def test_what_diverged_has_no_future(engine):
    with engine.kv.recording("s", KEPT, every=32, horizon=12) as recorder:
        run(engine, ask(ids(40), 2, ignore_eos=True))
        run(engine, ask([*ids(20), *ids(30, seed=3)], 8, ignore_eos=True))
    assert positions_of(recorder.cycles[0]) == list(range(3, 20))


def test_half_of_the_future_is_enough_at_the_end(engine):
    recorder, _ = record(engine, [ids(40)], 13, horizon=20)
    assert len(recorder.cycles) == 1
    recorder, _ = record(engine, [ids(40, seed=5)], 8, horizon=20)
    assert recorder.cycles == []


def test_answers_and_notes_are_as_without(engine):
    plain = engine_of()
    want = run(plain, ask(ids(40), 30, ignore_eos=True)).token_ids
    plain._core.call(lambda: None).result()  # answers come before the last step is noted
    inner = engine._core.manager.monitor
    recorder, tokens = record(engine, [ids(40)])
    assert tuple(tokens[40:]) == tuple(want)
    assert engine._core.manager.monitor is inner is recorder.inner
    notes = [
        [m.notes_of(s) for s in e._core.tree.segments() if s.token_ids]
        for e, m in ((engine, inner), (plain, plain._core.manager.monitor))
    ]
    for one, other in zip(*notes, strict=True):
        for name in ("importance", "accumulated", "n_seen", "last", "window"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert inner.n_steps == plain._core.manager.monitor.n_steps
    plain.close()


def test_an_engine_that_observes_nothing_has_nothing_to_record():
    engine = engine_of(observe=False)
    with pytest.raises(ConfigError), engine.kv.recording("s", KEPT, every=1, horizon=2):
        pass
    engine.close()
