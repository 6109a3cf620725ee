"""Prompt lookup: guesses save steps and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.drafting import LONG_N_GRAM, N_GRAM, NEAR, Drafter
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.sequence import Sequence
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.models.quantising import quantise_weights
from tests.engine.driving import ask, audit, ids, model_of, right_answer, run, run_together
from tests.support.oracle import greedy
from tests.support.tiny import FAMILIES, tiny_model

MakeEngine = Callable[..., Engine]


class TestDrafter:
    def test_says_what_came_after_the_same_words(self):
        assert Drafter([1, 2, 3, 4, 5, 6, 1, 2, 3]).guess(2) == [4, 5]

    def test_the_last_occurrence_counts(self):
        assert Drafter([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]).guess(1) == [5]

    @pytest.mark.parametrize("read", [[], [1], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
    def test_nothing_repeats_nothing(self, read):
        assert Drafter(read).guess(5) == []

    def test_a_repeat_of_itself_is_guessed_up_to_what_is_known(self):
        assert Drafter([7] * (N_GRAM + 1)).guess(5) == [7]

    def test_reading_in_pieces_is_reading(self):
        whole, pieces = Drafter([1, 2, 3, 4, 1, 2, 3]), Drafter([1, 2])
        for token in (3, 4, 1, 2, 3):
            pieces.add([token])

        assert pieces.guess(3) == whole.guess(3) == [4, 1, 2]

    def test_reaches_further_when_it_was_right(self):
        drafter = Drafter([1, 2, 3, *range(10, 30), 1, 2, 3])
        assert len(drafter.guess(10)) == NEAR
        for _ in range(10):
            drafter.learn(3, 3)
        assert len(drafter.guess(10)) == 10

    def test_wants_a_longer_repeat_when_it_was_wrong(self):
        short = Drafter([1, 2, 3, 4, 5, 6, 1, 2, 3])
        repeated = list(range(100, 100 + LONG_N_GRAM))
        long = Drafter([*repeated, 4, 5, 6, *repeated])
        for drafter in (short, long):
            for _ in range(20):
                drafter.learn(3, 0)

        assert short.guess(3) == []
        assert long.guess(3) == [4, 5, 6]


def foresee(
    monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[int, ...], list[int]], *, wrong: int = 5
) -> None:
    """Let guesses be the coming tokens, every `wrong`th of them spoilt: models of random weights
    repeat nothing by themselves."""

    def guess(self: Sequence, n_most: int) -> list[int]:
        answer = answers[self.request.prompt_ids]
        at = len(self.generated)
        coming = range(at, min(at + n_most, len(answer))) if at else ()
        return [answer[i] if i % wrong else (answer[i] + 1) % 400 for i in coming]

    monkeypatch.setattr(Sequence, "guess", guess)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(config=CacheConfig(prompt_lookup=6))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("wrong", [1, 4, 1000])
def test_greedy_answers_are_those_of_the_plain_model(
    family: str, wrong: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All guesses wrong, some, none: alone, beside siblings, beside one that is prefilled."""
    prompts = [tuple(ids(n)) for n in (50, 55, 30)] + [(*ids(50), 7, 8)]
    answers = {p: list(right_answer(family, p, 30)) for p in prompts}
    foresee(monkeypatch, answers, wrong=wrong)
    engine = make_engine(family, config=CacheConfig(prompt_lookup=6, prefill_chunk=16))
    results = run_together(engine, [ask(prompt, 30) for prompt in prompts])

    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == answers[prompt]
    counters = engine._core.counters
    assert counters.n_guessed_tokens > 0
    assert (counters.n_right_guesses > 0) == (wrong > 1)
    audit(engine)


def test_right_guesses_save_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tuple(ids(9))
    answer = greedy(model_of("llama"), prompt, 71, ignore_eos=True)
    foresee(monkeypatch, {prompt: answer}, wrong=1000)
    result = run(engine, ask(prompt, 71, ignore_eos=True))
    counters = engine._core.counters

    assert list(result.token_ids) == answer
    # The prompt and its first token, then seven tokens a step.
    assert counters.n_steps == 1 + 70 // 7
    assert counters.n_right_guesses == 71 - counters.n_steps


def test_only_what_was_confirmed_is_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tuple(ids(40))
    answer = greedy(model_of("llama"), prompt, 17, ignore_eos=True)
    foresee(monkeypatch, {prompt: answer}, wrong=3)
    result = run(engine, ask(prompt, 17, ignore_eos=True))

    (info,) = engine.kv.segments()
    assert info.n_tokens == engine.kv.usage().n_tokens == 40 + 17 - 1
    going_on = (*prompt, *result.kept_ids)
    foresee(monkeypatch, {going_on: []})
    again = run(engine, ask(going_on, 5))
    assert again.n_reused_tokens == 56
    assert list(again.token_ids) == greedy(model_of("llama"), going_on, 5)


@pytest.mark.parametrize("n_most", [1, 2, 3, 5])
def test_never_more_tokens_than_asked_for(n_most: int, engine: Engine) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    result = run(engine, ask(prompt, n_most, ignore_eos=True))

    assert len(result.token_ids) == n_most


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_p": 0.9, "seed": 11}, {}])
def test_what_is_drawn_is_what_is_drawn_without(
    sampling: dict[str, Any], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draw of the generator a token, in order, and the same log-probabilities."""
    prompt = tuple(ids(30))
    request = {**sampling, "top_logprobs": 2, "ignore_eos": True}
    plain = run(make_engine(config=CacheConfig(prompt_lookup=0)), ask(prompt, 40, **request))
    foresee(monkeypatch, {prompt: list(plain.token_ids)}, wrong=4)
    engine = make_engine(config=CacheConfig(prompt_lookup=6))
    result = run(engine, ask(prompt, 40, **request))

    assert result.token_ids == plain.token_ids
    assert engine._core.counters.n_right_guesses > 0
    for one, other in zip(result.logprobs, plain.logprobs, strict=True):
        assert (one.token_id, one.token) == (other.token_id, other.token)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_an_answer_that_ends_within_the_guesses_ends_there(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(ids(9))
    plain = make_engine(config=CacheConfig(prompt_lookup=0))
    free = run(plain, ask(prompt, 60, ignore_eos=True))
    stop = (free.text[30:34],)
    wanted = run(plain, ask(prompt, 60, ignore_eos=True, stop=stop))
    foresee(monkeypatch, {prompt: list(free.token_ids)}, wrong=1000)
    engine = make_engine(config=CacheConfig(prompt_lookup=6))
    result = run(engine, ask(prompt, 60, ignore_eos=True, stop=stop))

    assert 0 < len(wanted.text) < len(free.text)
    assert (result.text, result.kept_ids) == (wanted.text, wanted.kept_ids)
    assert engine.kv.usage().n_tokens == 9 + len(wanted.kept_ids)
    audit(engine)


def test_guesses_stay_within_the_context(make_engine: MakeEngine) -> None:
    """The last position is the context's last, whatever comes before it."""
    prompt = ([5, 6, 7, 8] * 200)[:500]
    engine = make_engine(config=CacheConfig(prompt_lookup=9))
    result = run(engine, ask(prompt, None, ignore_eos=True))

    assert len(prompt) + len(result.token_ids) == engine.context_length


def test_dense_weights_on_a_cpu_are_not_read_ahead_of(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run(engine, ask([1, 2, 3, 4] * 20, 20, ignore_eos=True))

    assert engine._core._scheduler._n_guesses == 0
    assert engine._core.counters.n_guessed_tokens == 0


def test_int8_weights_are_read_ahead_of(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    quantise_weights(model, ids(40), most_kl=9)
    engine = make_engine(model)

    assert engine._core._scheduler._n_guesses > 0


def test_settings_are_checked() -> None:
    assert CacheConfig(prompt_lookup=0).prompt_lookup == 0
    with pytest.raises(ConfigError, match="prompt_lookup must be at least 0"):
        CacheConfig(prompt_lookup=-1)
