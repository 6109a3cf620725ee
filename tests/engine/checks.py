"""What must hold of an engine's answers, as functions that raise `AssertionError`.

`test_exact` runs them for every family, `test_mutants` on engines that were broken on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest, GenerationResult
from sidequest_langchain.errors import RequestCancelledError
from tests.engine.driving import (
    ask,
    audit,
    ids,
    longest_head,
    model_of,
    n_distinct,
    recorded,
    resident,
    right_answer,
    run,
    run_together,
    stored,
    submit_all,
    token_bytes,
)
from tests.support import oracle
from tests.support.force import force

TRUNK = ids(30)
SUFFIXES = {"one": ids(1, 1), "five": ids(5, 2), "seventeen": ids(17, 3)}
LENGTHS = {"one": 9, "five": 2, "seventeen": 5}
"""Tokens each branch generates: every row ends at another step."""


def check_answer(
    engine: Engine, family: str, request: GenerationRequest, *, n_reused: int
) -> GenerationResult:
    """One request alone: the right ids, and the tokens counted as computed by hand."""
    result = run(engine, request)
    check_result(family, request, result)
    assert result.n_reused_tokens == n_reused
    return result


def check_result(family: str, request: GenerationRequest, result: GenerationResult) -> None:
    """The ids are those of plain `generate`, and the counts add up."""
    n = request.sampling.max_tokens
    assert n is not None
    assert result.token_ids == right_answer(family, request.prompt_ids, n)
    assert result.n_prompt_tokens == len(request.prompt_ids)
    assert result.n_prompt_tokens == result.n_reused_tokens + result.n_prefilled_tokens


def check_cold_and_warm(engine: Engine, family: str) -> None:
    """The same prompt three times: the same answer, and nothing grows."""
    cold = ask(ids(40), 12)
    result = check_answer(engine, family, cold, n_reused=0)
    kept = stored(cold, result)
    audit(engine, [kept])
    assert engine.kv.usage().n_bytes == len(kept) * token_bytes(model_of(family))
    for _ in range(2):
        check_answer(engine, family, ask(ids(40), 12), n_reused=40)
        audit(engine, [kept])
        assert engine.kv.usage().n_segments == 2, "the prompt, and its one answer"


def check_partly_reused(engine: Engine, family: str) -> None:
    """Prompts that leave a resident path in the prompt, at its end, and inside of the answer."""
    first = ask(ids(40), 12)
    answer = check_answer(engine, family, first, n_reused=0)
    paths = [stored(first, answer)]
    for head, n_reused in (
        (ids(40)[:23], 23),
        (ids(40)[:1], 1),
        (ids(40), 40),
        (ids(40) + list(answer.token_ids[:3]), 43),
    ):
        request = ask([*head, *ids(6, seed=5 + n_reused)], 6)
        result = check_answer(engine, family, request, n_reused=n_reused)
        paths.append(stored(request, result))
        audit(engine, paths)


def check_shorter_prompts(engine: Engine, family: str) -> None:
    """Prompts that are resident to their end, down to a single token, and one more cold."""
    first = ask(ids(40), 8)
    paths = [stored(first, check_answer(engine, family, first, n_reused=0))]
    for n in (39, 17, 10, 1):
        request = ask(ids(n), 6)
        result = check_answer(engine, family, request, n_reused=n)
        paths.append(stored(request, result))
        audit(engine, paths)
    check_answer(engine, family, ask(ids(1, seed=9), 6), n_reused=0)


def check_conversation(engine: Engine, family: str) -> None:
    """Four turns; each prompt is the last one, its answer, and something new."""
    prompt, n_resident, paths = ids(20), 0, []
    for turn in range(4):
        request = ask(prompt, 7)
        result = check_answer(engine, family, request, n_reused=n_resident)
        paths.append(stored(request, result))
        n_resident = len(paths[-1])
        assert resident(engine)[request.label.call_id] == paths[-1]
        audit(engine, paths)
        prompt = [*prompt, *result.kept_ids, *ids(9, seed=20 + turn)]


def branch(name: str) -> GenerationRequest:
    """One of three branches of the trunk."""
    return ask([*TRUNK, *SUFFIXES[name]], LENGTHS[name])


def check_forks_in_turn(engine: Engine, family: str) -> None:
    """Three branches one after another, in every order: the order changes nothing."""
    for order in itertools.permutations(SUFFIXES):
        paths: list[Sequence[int]] = []
        for n_before, name in enumerate(order):
            request = branch(name)
            n_reused = len(TRUNK) if n_before else 0
            result = check_answer(engine, family, request, n_reused=n_reused)
            paths.append(stored(request, result))
        audit(engine, paths)
        engine.kv.clear()
        audit(engine, [])


def check_forks_together(engine: Engine, family: str) -> None:
    """Three branches in one batch, in every order, over a cold and over a resident trunk."""
    for is_cold, order in itertools.product((True, False), itertools.permutations(SUFFIXES)):
        paths: list[Sequence[int]] = []
        if not is_cold:
            trunk = ask(TRUNK, 1)
            paths.append(stored(trunk, run(engine, trunk)))
        requests = [branch(name) for name in order]
        for request, result in zip(requests, run_together(engine, requests), strict=True):
            check_result(family, request, result)
            is_first = is_cold and request is requests[0]
            assert result.n_reused_tokens == (0 if is_first else len(TRUNK))
            paths.append(stored(request, result))
        audit(engine, paths)
        engine.kv.clear()


def check_around_windows(engine: Engine, family: str) -> None:
    """Prompts around and past every sliding window, forked before and after it."""
    paths = []
    for n in (7, 8, 9, 10, 11, 12, 16, 17, 60):
        request = ask(ids(n, seed=4), 4)
        result = run(engine, request)
        check_result(family, request, result)
        paths.append(stored(request, result))
    for n_head in (8, 40):
        request = ask([*ids(n_head, seed=4), *ids(25, seed=6)], 8)
        n_reused = longest_head(request.prompt_ids, paths)
        assert n_reused >= n_head
        paths.append(stored(request, check_answer(engine, family, request, n_reused=n_reused)))
    audit(engine, paths)


def check_prune_and_return(engine: Engine, family: str) -> None:
    """Back to the first 8 tokens, then the same question again: the same answer."""
    trunk = ask(ids(8), 1, call="trunk")
    stay = [stored(trunk, check_answer(engine, family, trunk, n_reused=0))]
    audit(engine, stay)
    for _ in range(2):
        long = ask(ids(60), 8, call="long")
        result = check_answer(engine, family, long, n_reused=8)
        n_bytes = engine.kv.usage().n_bytes
        check_release(engine, "long", n_tokens=len(stored(long, result)) - 8)
        assert engine.kv.usage().n_bytes < n_bytes
        audit(engine, stay)
    check_answer(engine, family, ask(ids(8), 12), n_reused=8)


def check_release(engine: Engine, path: str, *, n_tokens: int) -> None:
    """A release frees what was predicted, and as many tokens as computed by hand."""
    before = engine.kv.usage()
    predicted = engine.kv.predict_release(path)
    receipt = engine.kv.release(path)
    after = engine.kv.usage()
    assert receipt.freed_tokens == predicted.freed_tokens == n_tokens
    assert receipt.freed_bytes == predicted.freed_bytes == before.n_bytes - after.n_bytes
    assert receipt.freed_bytes == n_tokens * token_bytes(engine._core.adapter.model)
    assert receipt.segments == predicted.segments
    again = engine.kv.release(path)
    assert (again.n_paths, again.freed_bytes, again.segments) == (0, 0, ())


def check_logits(engine: Engine, family: str) -> None:
    """Log-probabilities cold, warm, forked and batched: those of a fresh plain forward."""
    run(engine, ask(TRUNK, 3))
    requests = [ask([*TRUNK, *suffix], 6, top_logprobs=5) for suffix in SUFFIXES.values()]
    requests += [ask(TRUNK, 6, top_logprobs=5), ask(ids(50, seed=8), 6, top_logprobs=5)]
    for request, result in zip(requests, run_together(engine, requests), strict=True):
        check_logprobs(family, request, result)


def check_logprobs(family: str, request: GenerationRequest, result: GenerationResult) -> None:
    """Every log-probability of a result against the plain model's logits."""
    full = [*request.prompt_ids, *result.token_ids]
    logits = oracle.logits(model_of(family), full)[len(request.prompt_ids) - 1 :]
    expected = torch.log_softmax(logits, -1)
    assert len(result.logprobs) == len(result.token_ids)
    for found, token_id, row in zip(result.logprobs, result.token_ids, expected, strict=False):
        assert found.token_id == token_id
        assert abs(found.logprob - float(row[token_id])) <= 1e-4
        best = row.topk(len(found.top))
        assert len(found.top) == request.sampling.top_logprobs
        for (top_id, _, _, logprob), value in zip(found.top, best.values, strict=True):
            assert abs(logprob - float(value)) <= 1e-4
            assert abs(float(row[top_id]) - float(value)) <= 1e-4


def check_short_common_head(engine: Engine, family: str) -> None:
    """A head too short to wait for: computed by each request of the batch, stored once."""
    requests = [ask([*ids(10), *ids(6, seed=n)], 3 + n) for n in (1, 2, 3)]
    results = run_together(engine, requests)
    for request, result in zip(requests, results, strict=True):
        check_result(family, request, result)
        assert resident(engine)[request.label.call_id] == stored(request, result)
    audit(engine, map(stored, requests, results))
    for request in requests:
        check_answer(engine, family, ask(request.prompt_ids, 7), n_reused=16)


def check_release_of_inner_path(engine: Engine, family: str) -> None:
    """What stands on a released path lives on; only what nobody needs goes."""
    inner = ask(ids(30), 6, call="inner")
    kept = stored(inner, check_answer(engine, family, inner, n_reused=0))
    outer = ask([*ids(24), *ids(8, seed=7)], 5, call="outer")
    result = check_answer(engine, family, outer, n_reused=24)
    check_release(engine, "inner", n_tokens=len(kept) - 24)
    audit(engine, [stored(outer, result)])
    check_answer(engine, family, ask(outer.prompt_ids, 5), n_reused=len(outer.prompt_ids))
    again = ask([*outer.prompt_ids, *ids(3, seed=8)], 5, call="again")
    check_answer(engine, family, again, n_reused=len(outer.prompt_ids))


def check_scopes(engine: Engine, family: str) -> None:
    """Equal prompts in two scopes: nothing is shared, and a release leaves the other alone."""
    for scope in ("one", "two"):
        check_answer(engine, family, ask(ids(30), 5, scope=scope, call=scope), n_reused=0)
        check_answer(engine, family, ask(ids(30), 5, scope=scope), n_reused=30)
    assert engine.kv.usage().n_tokens == 2 * n_distinct(resident(engine).values())


def check_cancelled(engine: Engine, family: str) -> None:
    """A request that is cancelled as pass 4 begins runs no other pass and leaves nothing."""
    trunk = ask(ids(20), 1)
    paths = [stored(trunk, check_answer(engine, family, trunk, n_reused=0))]
    prompt = [*ids(20), *ids(6, seed=3)]
    with recorded(model_of(family), lambda n: ticket.cancel() if n == 4 else None) as passes:
        [(listener, ticket)] = submit_all(engine, [ask(prompt, 50, ignore_eos=True)])
        assert isinstance(listener.outcome(), RequestCancelledError)
        audit(engine, paths)
    assert len(passes) == 4
    check_answer(engine, family, ask(prompt, 6), n_reused=20)


def check_stop(engine: Engine, family: str) -> None:
    """Tokens of a stop string are not kept, and the next turn stands on what is."""
    encode = engine.tokenizer.encode
    kept = encode("The plan")
    script = [*kept, *(token for letter in "END" for token in encode(letter)), *encode(" more")]
    request = ask(ids(20), 30, stop=("END",))
    with force(model_of(family), script):
        result = run(engine, request)
    assert (result.text, result.finish_reason) == ("The plan", "stop")
    assert list(result.kept_ids) == kept
    audit(engine, [[*ids(20), *kept]])
    check_answer(engine, family, ask([*ids(20), *kept, 7, 8], 6), n_reused=20 + len(kept))
