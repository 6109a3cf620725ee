"""What one request may ask: how tokens are drawn, what ends an answer, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import SamplingParams, ToolResultSpan
from sidequest_langchain.errors import ContextLengthError, RequestCancelledError, RequestError
from sidequest_langchain.kinds import TokenKind
from tests.engine import checks
from tests.engine.driving import (
    Listener,
    ask,
    audit,
    ids,
    model_of,
    recorded,
    resident,
    right_answer,
    run,
    run_together,
    stored,
    submit_all,
)
from tests.support import oracle
from tests.support.force import force
from tests.support.tiny import END_ID, tiny_model

MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(model_of("llama"))


def spell(engine: Engine, text: str) -> list[int]:
    """A text one letter a token, where the tokenizer would take longer ones."""
    return [token for letter in text for token in engine.tokenizer.encode(letter)]


# -- what ends an answer -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("end", ["length", "eos", "stop"])
def test_rows_are_the_tokens_kept(engine: Engine, end: str, n: int) -> None:
    """After `n` tokens, ended in each way: every layer holds what the next turn can use."""
    encode = engine.tokenizer.encode
    said = encode("Now fly from Oslo to Rome and back then")[:n]
    tail = {"length": encode(" trip"), "eos": [END_ID], "stop": encode(";")}[end]
    request = ask(ids(20), n if end == "length" else 30, stop=(";",), call="first")
    with force(model_of("llama"), [*said, *tail]):
        result = run(engine, request)
    assert result.finish_reason == ("length" if end == "length" else "stop")
    assert list(result.kept_ids) == said
    assert list(result.token_ids) == said + (tail if end == "stop" else [])
    assert result.n_generated_tokens == n + (end != "length")
    n_kept = n - 1 if end == "length" else n
    assert resident(engine)["first"] == (*ids(20), *said[:n_kept])
    audit(engine, [[*ids(20), *said[:n_kept]]])
    turn = ask([*ids(20), *said, END_ID, *ids(4, seed=1)], 6)
    checks.check_answer(engine, "llama", turn, n_reused=20 + n_kept)


def test_rows_after_a_cancelled_answer_are_those_before(engine: Engine) -> None:
    checks.check_cancelled(engine, "llama")


def test_end_of_turn_is_a_token_like_others_if_ignored(engine: Engine) -> None:
    with force(model_of("llama"), [9, END_ID, 11, END_ID]):
        result = run(engine, ask(ids(20), 4, ignore_eos=True))
    assert result.token_ids == (9, END_ID, 11, END_ID)
    assert result.finish_reason == "length"


STOPS: dict[str, tuple[list[str], tuple[str, ...], str, list[str]]] = {
    # script as pieces of text; stop strings; text; the pieces kept
    "over three tokens": ([" plan", "E", "N", "D", " more"], ("END",), " plan", [" plan"]),
    "inside of a longer token": ([" plan", " days", "."], ("ay",), " plan d", [" plan"]),
    "at the end of a token": ([" plan", " day", "."], ("ay",), " plan d", [" plan"]),
    "one letter": ([" yes", ";", " no"], (";",), " yes", [" yes"]),
    "over a line end": (
        [" yes", "\n", "Observation", ":", " no"],
        ("\nObservation:",),
        " yes",
        [" yes"],
    ),
    "of several the first": ([" a", "x", "y", "z"], ("z", "y"), " ax", [" a", "x"]),
    "CJK": (["城市", "。", "你好"], ("。",), "城市", ["城市"]),
    "first of all": (["END", " more"], ("END",), "", []),
    "begun and never completed": (
        [" plan", "E", "N", "<|im_end|>"],
        ("END",),
        " planEN",
        [" plan", "E", "N"],
    ),
    "begun twice": (["E", "E", "N", "D"], ("END",), "E", ["E"]),
}


@pytest.mark.parametrize("case", STOPS)
def test_stop_string(engine: Engine, case: str) -> None:
    pieces, stop, text, kept = STOPS[case]
    encode = engine.tokenizer.encode
    script = [token for piece in pieces for token in encode(piece)]
    kept_ids = [token for piece in kept for token in encode(piece)]
    listener = Listener()
    with force(model_of("llama"), script):
        engine.submit(ask(ids(20), 30, stop=stop, call="stopped"), listener)
        result = listener.result()
    assert (result.text, result.finish_reason) == (text, "stop")
    assert listener.text == text, "a piece of the stop string was streamed"
    assert list(result.kept_ids) == kept_ids
    assert resident(engine)["stopped"] == (*ids(20), *kept_ids)
    audit(engine, [[*ids(20), *kept_ids]])
    turn = ask([*ids(20), *kept_ids, *ids(4, seed=1)], 6)
    checks.check_answer(engine, "llama", turn, n_reused=20 + len(kept_ids))


def test_stop_string_in_the_prompt_is_no_end(engine: Engine) -> None:
    encode = engine.tokenizer.encode
    prompt = [*ids(10), *encode("END. E")]
    with force(model_of("llama"), [*encode("ND yes"), END_ID]):
        result = run(engine, ask(prompt, 30, stop=("END",)))
    assert result.text == "ND yes"


def test_most_tokens_is_the_rest_of_the_context_unless_said(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model(max_position_embeddings=64))
    result = run(engine, ask(ids(40), None, ignore_eos=True))
    assert (result.n_generated_tokens, result.finish_reason) == (24, "length")


# -- how tokens are drawn ----------------------------------------------------------------


def hot(prompt: list[int], seed: int | None, **sampling: Any) -> Any:
    return ask(prompt, 10, **{"temperature": 1.5, "seed": seed, "ignore_eos": True, **sampling})


def test_a_seed_decides_whatever_else_runs(engine: Engine) -> None:
    prompts = [ids(n, seed=n) for n in (5, 21, 34)]
    alone = {
        (i, seed): run(engine, hot(prompt, seed)).token_ids
        for i, prompt in enumerate(prompts)
        for seed in range(3)
    }
    assert len(set(alone.values())) == len(alone)
    engine.kv.clear()
    together = run_together(engine, [hot(prompts[i], seed) for i, seed in reversed(alone)])
    assert [result.token_ids for result in together] == list(alone.values())[::-1]
    for mates in ([ask(ids(9), 20)], [hot(ids(9), None), hot(prompts[0], 1)]):
        results = run_together(engine, [*mates, hot(prompts[0], 0)])
        assert results[-1].token_ids == alone[0, 0]


def test_without_a_seed_samples_differ(engine: Engine) -> None:
    samples = run_together(engine, [hot(ids(20), None) for _ in range(6)])
    assert len({result.token_ids for result in samples}) == 6


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 5.0, "top_p": 1e-6},
        {"temperature": 1e-4},
    ],
    ids=str,
)
def test_sampling_of_one_candidate_is_greedy(engine: Engine, sampling: dict[str, float]) -> None:
    result = run(engine, ask(ids(40), 12, seed=3, **sampling))
    assert result.token_ids == right_answer("llama", ids(40), 12)


def test_samples_of_a_prompt_share_its_rows(engine: Engine) -> None:
    requests = [hot(ids(60), seed) for seed in range(5)]
    with recorded(model_of("llama")) as passes:
        results = run_together(engine, requests)
    paths = list(map(stored, requests, results))
    audit(engine, paths)
    assert engine.kv.usage().n_tokens < 60 + 5 * 9 + 1
    # The first computes the prompt; the others run its last token again, and all 9 of their own.
    assert sum(len(step.token_ids) for step in passes) == 60 + 4 + 5 * 9
    assert [result.n_reused_tokens for result in results] == [0, 60, 60, 60, 60]


# -- log-probabilities -------------------------------------------------------------------


@pytest.mark.parametrize("n_top", [0, 1, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_models_own(engine: Engine, n_top: int, temperature: float) -> None:
    """Whatever the sampling, those of temperature 1 over the whole vocabulary."""
    request = ask(ids(40), 8, top_logprobs=n_top, temperature=temperature, seed=1, top_k=50)
    for _ in range(2):
        listener = Listener()
        engine.submit(request, listener)
        result = listener.result()
        checks.check_logprobs("llama", request, result)
        streamed = [found for event in listener.events[:-1] for found in event.logprobs]  # type: ignore[union-attr]
        assert streamed == list(result.logprobs)


def test_logprobs_name_the_tokens(engine: Engine) -> None:
    with force(model_of("llama"), engine.tokenizer.encode("你好 plan")):
        result = run(engine, ask(ids(20), 5, top_logprobs=1))
    assert b"".join(found.raw for found in result.logprobs).startswith("你好 pl".encode())
    for found in result.logprobs:
        assert found.raw == engine.tokenizer.token_bytes(found.token_id)
        assert found.token == engine.tokenizer.decode([found.token_id], skip_special=False)
        [(top_id, text, raw, logprob)] = found.top
        assert (top_id, text, raw) == (found.token_id, found.token, found.raw)
        assert math.isclose(logprob, found.logprob)


def test_no_logprobs_unless_asked(engine: Engine) -> None:
    assert run(engine, ask(ids(20), 3)).logprobs == ()


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_context_window(family: str, make_engine: MakeEngine) -> None:
    model = tiny_model(family, max_position_embeddings=64)
    engine = make_engine(model)
    for n in (64, 65, 200):
        with recorded(model) as passes, pytest.raises(ContextLengthError) as caught:
            run(engine, ask(ids(n), 5))
        assert (caught.value.n_prompt_tokens, caught.value.context_length) == (n, 64)
        assert str(n) in str(caught.value)
        assert "64" in str(caught.value)
        assert passes == []
        audit(engine, [])
    for n, n_more in ((63, 1), (60, 4)):
        result = run(engine, ask(ids(n), 32, ignore_eos=True))
        assert (result.finish_reason, len(result.token_ids)) == ("length", n_more)
        assert list(result.token_ids) == oracle.greedy(model, ids(n), n_more, ignore_eos=True)


def test_a_conversation_that_grows_past_the_context(make_engine: MakeEngine) -> None:
    model = tiny_model(max_position_embeddings=64)
    engine = make_engine(model)
    prompt = ids(20)
    for _ in range(3):
        request = ask(prompt, 10, ignore_eos=True)
        result = run(engine, request)
        assert list(result.token_ids) == oracle.greedy(model, prompt, 10, ignore_eos=True)
        prompt = [*prompt, *result.kept_ids, *ids(5)]
    before = engine.kv.usage()
    with pytest.raises(ContextLengthError, match=r"65 tokens.* 64 "):
        run(engine, ask(prompt, 10))
    assert engine.kv.usage() == before


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([], "no tokens"),
        ([5, 416], r"token id 416\b.* to 415\b"),
        ([5, 10**9], r"token id 1000000000\b"),
        ([400, -1], r"token id -1\b"),
    ],
)
def test_bad_prompts(engine: Engine, prompt: list[int], what: str) -> None:
    with recorded(model_of("llama")) as passes, pytest.raises(RequestError, match=what):
        run(engine, ask(prompt))
    assert passes == []
    audit(engine, [])
    run(engine, ask([415, 0], 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("a", 3)),
        ("stop", "END"),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
    ],
)
def test_parameters_out_of_range(name: str, value: Any) -> None:
    """The message says which one, what is expected, and what was found."""
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("kinds", {"kinds": bytes(8)}),
        ("kinds", {"kinds": bytes(10)}),
        ("kinds", {"kinds": bytes([*[0] * 8, max(TokenKind) + 1])}),
        ("spans", {"spans": (ToolResultSpan(first=-1, last=3),)}),
        ("spans", {"spans": (ToolResultSpan(first=3, last=3),)}),
        ("spans", {"spans": (ToolResultSpan(first=0, last=2), ToolResultSpan(first=5, last=10))}),
    ],
)
def test_what_is_said_of_the_prompt_must_fit_it(what: str, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        replace(ask(ids(9)), **given)
    assert "9" in str(caught.value) or "from 0 to" in str(caught.value)


def test_what_is_said_of_the_prompt_changes_no_answer(engine: Engine) -> None:
    spans = (ToolResultSpan(first=0, last=9, tool_call_id="c", name="f"),)
    request = replace(ask(ids(9), 4), kinds=bytes([max(TokenKind)] * 9), spans=spans, exact=True)
    checks.check_result("llama", request, run(engine, request))


def test_largest_values_are_taken(engine: Engine) -> None:
    request = ask(ids(9), 3, top_k=10**6, seed=2**63 - 1, temperature=100.0, top_p=1.0)
    assert run(engine, request).n_generated_tokens <= 3
    assert run(engine, ask(ids(9), 3, top_k=10**6, seed=-1, temperature=1.0, top_p=0.99))


# -- constraints -------------------------------------------------------------------------


class OnlyThese(Constraint):
    """Allows one token after another, then says that the text is complete."""

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = list(allowed)

    def mask(self, logits: Any) -> Any:
        keep = logits[self._allowed[0]].clone()
        logits.fill_(-math.inf)
        logits[self._allowed[0]] = keep
        return logits

    def accept(self, token_id: int) -> None:
        assert token_id == self._allowed.pop(0)

    @property
    def is_done(self) -> bool:
        return not self._allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_decides_for_its_request_only(engine: Engine, temperature: float) -> None:
    free = ask(ids(20), 6)
    bound = ask(ids(25), 9, constraint=OnlyThese([7, 300, 7]), temperature=temperature)
    bound_result, free_result = run_together(engine, [bound, free])
    assert (bound_result.token_ids, bound_result.finish_reason) == ((7, 300, 7), "stop")
    checks.check_result("llama", free, free_result)
    audit(engine, [stored(bound, bound_result), stored(free, free_result)])


def test_logprobs_under_a_constraint_are_the_models_own(engine: Engine) -> None:
    request = ask(ids(25), 9, constraint=OnlyThese([7, 300, 7]), top_logprobs=3)
    checks.check_logprobs("llama", request, run(engine, request))


def test_a_constraint_that_raises_fails_its_request_only(engine: Engine) -> None:
    class Broken(OnlyThese):
        def mask(self, logits: Any) -> Any:
            raise ZeroDivisionError

    free = ask(ids(20), 6)
    requests = [ask(ids(25), 9, constraint=Broken([7])), free]
    (broken, _), (well, _) = submit_all(engine, requests)
    assert isinstance(broken.outcome(), ZeroDivisionError)
    checks.check_result("llama", free, well.result())
    audit(engine, [stored(free, well.result())])


def test_cancelled_before_it_began(engine: Engine) -> None:
    from tests.engine.driving import held

    listener = Listener()
    with recorded(model_of("llama")) as passes:
        with held(engine):
            engine.submit(ask(ids(20)), listener).cancel()
        assert isinstance(listener.outcome(), RequestCancelledError)
    assert passes == []
    audit(engine, [])
