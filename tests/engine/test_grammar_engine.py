"""Grammars in an engine: exact, whatever is forced, batched, stopped or broken."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine import grammar as grammar_module
from sidequest_langchain.engine import scheduler
from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.grammar import (
    Choice,
    FreeText,
    Grammar,
    Pattern,
    Repeat,
    Schema,
    Text,
    Then,
)
from sidequest_langchain.errors import GrammarError, RequestCancelledError
from tests.engine import checks
from tests.engine.driving import (
    ask,
    audit,
    ids,
    recorded,
    right_answer,
    run,
    run_together,
    stored,
    submit_all,
)
from tests.engine.grammars import (
    ARGUMENTS,
    AUTO,
    CALL,
    TOKENIZERS,
    let_end,
    right_tokens,
)
from tests.engine.test_grammar_texts import SCHEMAS, check_json
from tests.support.force import force
from tests.support.tiny import END_ID, tiny_model

MakeEngine = Callable[..., Engine]

GRAMMARS: dict[str, Grammar] = {
    "arguments": ARGUMENTS,
    "call": CALL,
    "calls": Repeat(CALL, 2, 3, "\n"),
    "auto": AUTO,
    "pattern": Pattern("[A-Z]{2}-[0-9]{3}"),
    "choice": Choice(("yes", "yes please", "no", "城市 🚀")),
    "thought": Then((Text("<think>"), FreeText(("</think>",)), Text("</think>"), ARGUMENTS)),
    "json": Schema("{}"),
}
SPELLED = {"arguments", "call", "calls"}
"""Most of their text is no choice."""


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture(params=["byte", "metaspace-special"])
def other(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Engine:
    return make_engine("llama", TOKENIZERS[request.param]())


@pytest.mark.parametrize("name", GRAMMARS)
def test_greedy_tokens_are_the_best_allowed_ones_of_the_plain_model(
    name: str, other: Engine
) -> None:
    """One masked forward after another by plain transformers; ours feeds what is forced at once."""
    grammar = GRAMMARS[name]
    for seed in range(3):
        prompt = ids(20 + seed, seed)
        result = run(other, ask(prompt, 40, constraint=other.grammars.constraint(grammar)))
        assert list(result.token_ids) == right_tokens(other, grammar, prompt, 40)
    if name in SPELLED:
        assert other._core.counters.n_right_guesses > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("name", GRAMMARS)
def test_forcing_saves_passes_and_changes_nothing(
    name: str, sampling: dict[str, Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, passes = [], []
    for n_forced in (0, 1, 7):
        monkeypatch.setattr(scheduler, "N_FORCED", n_forced)
        constraint = engine.grammars.constraint(GRAMMARS[name])
        request = ask(
            ids(20), 40, constraint=constraint, top_logprobs=2, scope=str(n_forced), **sampling
        )
        with recorded(engine._core.adapter.model) as seen:
            results.append(run(engine, request))
        passes.append(len(seen))
        checks.check_logprobs("llama", request, results[-1])
    assert len({result.token_ids for result in results}) == 1
    assert len({result.text for result in results}) == 1
    assert passes == sorted(passes, reverse=True)
    if name in SPELLED:  # they leave the model two choices a call
        assert passes[2] < passes[0] / 3


def test_mates_without_a_grammar_answer_as_ever(engine: Engine) -> None:
    grammars = [None, CALL, None, GRAMMARS["choice"], AUTO]
    requests = [
        ask(ids(20 + i, i), 20, constraint=grammar and engine.grammars.constraint(grammar))
        for i, grammar in enumerate(grammars)
    ]
    results = run_together(engine, requests)
    for grammar, request, result in zip(grammars, requests, results, strict=True):
        if grammar is None:
            assert result.token_ids == right_answer("llama", request.prompt_ids, 20)
        else:
            expected = right_tokens(engine, grammar, request.prompt_ids, 20)
            assert list(result.token_ids) == expected
    audit(engine, [stored(*pair) for pair in zip(requests, results, strict=True)])


def test_a_greedy_row_looks_through_the_vocabulary_only_where_it_must(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the best token is allowed, one bit is read."""
    vocabulary = type(engine.grammars.constraint(CALL)._vocabulary)  # type: ignore[attr-defined]
    searched: list[int] = []
    search = vocabulary.best
    monkeypatch.setattr(
        vocabulary, "best", lambda self, row: searched.append(1) or search(self, row)
    )
    said = engine.tokenizer.encode('<tool_call>\n{"name": "Rome", "value": 7}\n</tool_call>')
    with force(engine._core.adapter.model, said):
        result = run(engine, ask(ids(20), 60, constraint=engine.grammars.constraint(CALL)))
    assert list(result.token_ids) == said
    assert searched == []
    run(engine, ask(ids(21), 60, constraint=engine.grammars.constraint(CALL)))
    assert searched


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0]))
def test_random_schemas(closing: Engine, schema: Any, seed: int, temperature: float) -> None:
    constraint = closing.grammars.constraint(Schema.of(schema))
    prompt = ids(5 + seed % 20, seed % 7)
    result = run(
        closing, ask(prompt, 250, constraint=constraint, temperature=temperature, seed=seed)
    )
    if result.finish_reason == "stop":
        check_json(result.text, schema)


@pytest.fixture(scope="module")
def closing() -> Iterator[Engine]:
    """An engine whose model likes to close what it opened."""
    made = Engine(tiny_model("llama"), TOKENIZERS["byte"]())
    hook = let_end(made)
    yield made
    hook.remove()
    made.close()


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(make_engine: MakeEngine) -> None:
    """Logits are often wider than the vocabulary."""
    model = tiny_model("llama", vocab_size=501)
    engine = make_engine(model)
    n_known = engine.tokenizer.vocab_size
    with torch.no_grad():
        model.get_output_embeddings().weight[n_known:] *= 20  # they would win
    free = run(engine, ask(ids(20), 20, ignore_eos=True))
    assert max(free.token_ids) >= n_known
    for name, grammar in GRAMMARS.items():
        request = ask(ids(20), 30, constraint=engine.grammars.constraint(grammar))
        result = run(engine, request)
        assert max(result.token_ids) < n_known, name
        assert list(result.token_ids) == right_tokens(engine, grammar, ids(20), 30)


def test_samples_of_one_prompt_do_not_share_their_place(engine: Engine) -> None:
    grammar = Repeat(Choice(("a", "b", "plan", "城市")), 4, 4, ", ")
    requests = [
        ask(ids(20), 60, temperature=1.0, seed=n, constraint=engine.grammars.constraint(grammar))
        for n in range(8)
    ]
    results = run_together(engine, requests)
    assert len({result.text for result in results}) > 3
    for result in results:
        assert re.fullmatch("((a|b|plan|城市)(, |$)){4}", result.text)
        assert result.finish_reason == "stop"
    audit(engine)


def test_a_stop_string_ends_a_text_before_its_grammar_does(engine: Engine) -> None:
    request = ask(ids(20), 60, constraint=engine.grammars.constraint(CALL), stop=('"value"',))
    result = run(engine, request)
    assert re.fullmatch(r'<tool_call>\n\{"name": "(Paris|Rome|城市)", ', result.text)
    assert result.finish_reason == "stop"
    audit(engine, [stored(request, result)])


@pytest.mark.parametrize("n", [1, 2, 9, 17])
def test_a_text_is_cut_where_its_tokens_run_out(n: int, engine: Engine) -> None:
    request = ask(ids(20), n, constraint=engine.grammars.constraint(CALL))
    result = run(engine, request)
    assert (len(result.token_ids), result.finish_reason) == (n, "length")
    assert list(result.token_ids) == right_tokens(engine, CALL, ids(20), 60)[:n]
    audit(engine, [stored(request, result)])


def test_the_end_of_the_turn_ends_it_where_the_text_may_end_and_nowhere_else(
    engine: Engine,
) -> None:
    grammar = Choice(("yes", "yes please"))
    for said in (["yes", END_ID], [END_ID, "yes", END_ID]):
        script = [t for s in said for t in ([s] if s == END_ID else engine.tokenizer.encode(s))]
        with force(engine._core.adapter.model, script):
            constraint = engine.grammars.constraint(grammar)
            result = run(engine, ask(ids(20), 20, constraint=constraint))
        assert result.text.startswith("yes")
        assert result.finish_reason == "stop"
    with force(engine._core.adapter.model, [*engine.tokenizer.encode("yes please"), 7, 7]):
        result = run(engine, ask(ids(20), 20, constraint=engine.grammars.constraint(grammar)))
    assert result.text == "yes please"
    assert result.n_generated_tokens == len(result.token_ids), "a step was spent on the end"


def test_cancelled_in_the_middle(engine: Engine) -> None:
    requests = [
        ask(ids(20), 300, constraint=engine.grammars.constraint(FreeText()), ignore_eos=True),
        ask(ids(25, 1), 20, constraint=engine.grammars.constraint(CALL)),
    ]
    model = engine._core.adapter.model
    tickets: list[Any] = []
    with recorded(model, lambda n: tickets[0].cancel() if n == 5 else None):
        (cut, ticket), (well, _) = [*_begun(engine, requests, tickets)]
        assert isinstance(cut.outcome(), RequestCancelledError)
        assert list(well.result().token_ids) == right_tokens(engine, CALL, ids(25, 1), 20)
    audit(engine, [stored(requests[1], well.result())])
    assert ticket is tickets[0]


def _begun(engine: Engine, requests: list[Any], tickets: list[Any]) -> list[Any]:
    pairs = submit_all(engine, requests)
    tickets.extend(ticket for _, ticket in pairs)
    return pairs


def test_guesses_are_checked_by_the_grammar_first(make_engine: MakeEngine) -> None:
    plain, ahead = make_engine(), make_engine(config=CacheConfig(prompt_lookup=6))
    item = Then((Pattern("[ab]{3}"), Text(";")))
    for grammar in (Repeat(item, 6, 6), Repeat(Choice(("plan", "城市", "no")), 9, 9, ", ")):
        results = []
        for engine in (plain, ahead):
            prompt = engine.tokenizer.encode("aba;aba;aba;aba;plan, plan, plan, plan, ")
            constraint = engine.grammars.constraint(grammar)
            results.append(run(engine, ask(prompt, 60, constraint=constraint)))
        assert results[0].token_ids == results[1].token_ids
    assert ahead._core.counters.n_guessed_tokens > plain._core.counters.n_guessed_tokens
    constraint = plain.grammars.constraint(Text("aab plan"))
    said = plain.tokenizer.encode("aab pl")
    assert constraint.n_allowed([*said, said[2]]) == len(said)
    assert constraint.n_allowed(said) == len(said), "asking moved it"


# -- what goes wrong ---------------------------------------------------------------------

BAD: dict[str, tuple[Grammar, str]] = {
    "keyword": (Schema('{"type":"array","uniqueItems":true}'), "uniqueItems"),
    "deep keyword": (Schema('{"properties":{"a":{"not":{}}}}'), '"not"'),
    "too many keys": (Schema('{"items":{"minProperties":2}}'), "minProperties 2"),
    "oneOf": (Schema('{"oneOf":[{"type":"integer"},{"type":"number"}]}'), "oneOf"),
    "type": (Schema('{"type":"text"}'), "text"),
    "look-around in a pattern": (Schema('{"type":"string","pattern":"(?=a)b"}'), "look-around"),
    "another's schema": (Schema('{"$ref":"http://x.org/y"}'), "http://x.org/y"),
    "unknown definition": (Schema('{"$ref":"#/$defs/none"}'), "none"),
    "nothing fits": (Schema('{"type":"integer","minimum":5,"maximum":3}'), "minimum"),
    "nothing": (Schema("false"), "allows nothing"),
    "no end": (Schema('{"$ref":"#"}'), "comes to an end"),
    "no schema": (Schema("[1]"), "object or true"),
    "no JSON": (Schema('{"type":'), "JSON text"),
    "empty enum": (Schema('{"enum":[]}'), "anyOf is empty|enum"),
    "regex": (Pattern("(a"), "unclosed group"),
    "look-around": (Pattern("(?<!a)b"), "look-around"),
    "back-reference": (Pattern(r"(a)\1"), "backreferences"),
    "empty choice": (Choice(()), "nothing to choose from"),
    "repeat": (Repeat(Text("a"), 3, 2), "at_least <= at_most"),
    "negative repeat": (Repeat(ARGUMENTS, -1), "at_least <= at_most"),
    "free text that nothing ends": (Then((FreeText(), ARGUMENTS)), "followed by Schema"),
    "free text before anything": (Then((FreeText(("<a>",)), Pattern("."), CALL)), "followed by"),
    "free text at the end of a turn": (Repeat(Then((CALL, FreeText(("<",))))), "repeated part"),
    "free text before nothing": (FreeText(("a", "")), "empty text"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_expressed_is_named_and_the_engine_serves_on(
    name: str, engine: Engine
) -> None:
    grammar, words = BAD[name]
    for refuse in (engine.grammars.check, engine.grammars.constraint):
        with pytest.raises(GrammarError, match=words):
            refuse(grammar)
    engine.grammars.check(ARGUMENTS)
    assert run(engine, ask(ids(20), 6)).token_ids == right_answer("llama", ids(20), 6)


def test_a_schema_must_be_json() -> None:
    for schema in ({"const": object()}, {"const": float("nan")}):
        with pytest.raises(GrammarError, match="no JSON"):
            Schema.of(schema)
    assert Schema.of({"title": "城市", "a": [1]}) == Schema('{"title":"城市","a":[1]}')


class Broken(Constraint):
    """Breaks where it is told to; allows everything."""

    def __init__(self, where: str) -> None:
        self.where, self.n = where, 0

    def _at(self, where: str) -> None:
        self.n += 1
        if self.where == where and self.n > 6:
            raise GrammarError(where)

    def mask(self, logits: Any) -> Any:
        self._at("mask")
        return logits

    def accept(self, token_id: int) -> None:
        self._at("accept")

    @property
    def is_done(self) -> bool:
        self._at("is_done")
        return False

    def forced(self) -> tuple[int, ...]:
        self._at("forced")
        return ()

    def n_allowed(self, token_ids: Any) -> int:
        self._at("n_allowed")
        return len(token_ids)


@pytest.mark.parametrize("where", ["mask", "accept", "is_done", "forced", "n_allowed"])
def test_a_constraint_that_breaks_fails_its_request_only(
    where: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(config=CacheConfig(prompt_lookup=3))
    repeating = [1, 2, 3, 4] * 6
    mates = [ask(ids(60), 12), ask(ids(70, 1), 12, constraint=engine.grammars.constraint(CALL))]
    with force(engine._core.adapter.model, {24: [1, 2, 3, 4] * 6}):
        broken = ask(repeating, 24, constraint=Broken(where), ignore_eos=True)
        (bad, _), (free, _), (held, _) = submit_all(engine, [broken, *mates])
        error = bad.outcome()
        assert isinstance(error, GrammarError)
        assert str(error) == where
        assert free.result().token_ids == right_answer("llama", ids(60), 12)
        assert len(held.result().token_ids) == 12
    audit(engine, [stored(*p) for p in zip(mates, (free.result(), held.result()), strict=True)])


def test_a_matcher_says_so_when_it_is_given_what_it_forbids(engine: Engine) -> None:
    constraint = engine.grammars.constraint(CALL)
    with pytest.raises(GrammarError, match="broke down"):
        constraint.accept(END_ID)
    with pytest.raises(GrammarError, match="broke down"):
        constraint.mask(torch.zeros(engine.vocab_size))
    assert list(constraint.forced()) == []


# -- the grammars of an engine -----------------------------------------------------------


def test_grammars_are_compiled_once_and_the_oldest_forgotten(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    begun = grammar_module.begun
    monkeypatch.setattr(
        grammar_module, "begun", lambda kit, lark: compiled.append(lark) or begun(kit, lark)
    )
    monkeypatch.setattr(grammar_module, "N_KEPT", 3)
    for text in "abacabbb":
        engine.grammars.constraint(Text(text))
    assert len(compiled) == 3
    for text in "dab":  # c was used least lately
        engine.grammars.check(Text(text))
    assert len(compiled) == 4
    engine.grammars.check(Text("c"))
    assert len(compiled) == 5


def test_nothing_is_read_until_a_grammar_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, ask(ids(20), 3))
    assert engine.grammars._vocabulary is None


def test_from_many_threads(engine: Engine) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(8)

    def ask_for(n: int) -> None:
        try:
            gate.wait(10)
            schema = {"type": "integer", "minimum": n % 3, "maximum": n % 3 + 9}
            constraint = engine.grammars.constraint(Schema.of(schema))
            text = run(engine, ask(ids(20 + n, n), 20, constraint=constraint)).text
            jsonschema.validate(json.loads(text), schema)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask_for, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
