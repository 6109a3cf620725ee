"""The engine's answers against those of `transformers.generate`, and its logits in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sidequest_langchain.engine.engine import Engine

from .driving import Forest, ask, engine_on, generate, plain_logits, run_together
from .findings import Findings, Setting
from .making import made, prompt

TIE = 1e-3
"""A token that differs is a tie if its logit is so near the best one's, as a share of it."""
HALF_SHARE = 2.0
"""How often the error of plain half precision the engine's may be: both round, differently."""


def check_tokens(setting: Setting, findings: Findings) -> None:
    """fp32, TF32 off: greedy tokens are those of `generate` on every shape of work."""
    model = made(_shape(setting), dtype=torch.float32, device=setting.device)
    _check_tokens(model, setting, findings, "")


def check_catalogue(setting: Setting, findings: Findings, model: PreTrainedModel) -> None:
    """The same with the weights of a real model."""
    _check_tokens(model, setting, findings, "real ")


def _shape(setting: Setting) -> str:
    return str(setting.pick("tiny", "qwen2-0.5b"))


def _check_tokens(model: PreTrainedModel, setting: Setting, findings: Findings, which: str) -> None:
    n_trunk, n = setting.pick((60, 6), (1000, 24))
    n_vocab = model.config.vocab_size
    trunk = prompt(n_trunk, n_vocab)
    lengths = setting.pick((1, 5), (1, 2, 3, 5, 9, 17, 33, 64))
    suffixes = [prompt(k, n_vocab, seed=k) for k in lengths]
    chunk = setting.pick(16, 256)
    findings.figures |= {f"{which}n_tied": 0, f"{which}n_answers": 0}

    def judge(name: str, ids: Sequence[int], found: Sequence[int]) -> None:
        _judge(model, findings, f"{which}{name}", ids, found)
        findings.figures[f"{which}n_answers"] += 1

    with engine_on(model, prefill_chunk=chunk) as engine:
        for k in setting.pick((1, 9), (1, 9, 300)):
            ids = prompt(k, n_vocab, seed=7)
            judge("one stream", ids, _alone(engine, ids, n))
        setting.require(20 * (not setting.is_quick), "eight siblings")
        prompts = [[*trunk, *suffix] for suffix in suffixes]
        for name in ("siblings, cold", "siblings, warm"):
            results = run_together(engine, [ask(ids, n) for ids in prompts])
            for ids, result in zip(prompts, results, strict=True):
                judge(name, ids, result.token_ids)
        # While some decode, a long prompt is fed in chunks: mixed steps.
        mixed = [prompts[0], prompt(3 * chunk + 5, n_vocab, seed=11), prompts[1]]
        for ids, result in zip(
            mixed, run_together(engine, [ask(ids, n) for ids in mixed]), strict=True
        ):
            judge("chunked prefill among decoding rows", ids, result.token_ids)
        call = "released"
        ids = prompt(n_trunk // 2, n_vocab, seed=13)
        for _ in range(2):
            (result,) = run_together(engine, [ask(ids, n, call=call)])
            judge("release and recompute", ids, result.token_ids)
            findings.holds(f"{which}a release frees", ok=engine.kv.release(call).freed_bytes > 0)
        engine.kv.check_integrity()


def _alone(engine: Engine, ids: Sequence[int], n: int) -> tuple[int, ...]:
    (result,) = run_together(engine, [ask(ids, n)])
    return result.token_ids


def _judge(
    model: PreTrainedModel,
    findings: Findings,
    name: str,
    ids: Sequence[int],
    found: Sequence[int],
) -> None:
    """Token for token the answer of `generate`, but for a tie that rounding decides."""
    ((wanted,), _) = generate(model, [ids], len(found))
    differs = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b]
    if not differs:
        findings.at_most(name, 0.0, TIE, f"{len(ids)} tokens")
        return
    at = differs[0]
    (logits,) = plain_logits(model, [*ids, *found[:at]], 1)
    best = float(logits.max())
    gap = (best - float(logits[found[at]])) / max(1.0, abs(best))
    case = f"{len(ids)} tokens, token {at} is {found[at]}, not {wanted[at]}"
    findings.at_most(name, gap, TIE, case)
    which = "real " if name.startswith("real ") else ""
    findings.figures[f"{which}n_tied"] += 1


def check_halves(setting: Setting, findings: Findings) -> None:
    """bf16: logits along given tokens are as near to fp32's as those of plain bf16 are."""
    for shape in setting.pick(("tiny",), ("qwen2-0.5b", "llama-1b")):
        setting.require(15 * (not setting.is_quick), f"half precision on {shape}")
        exact = made(shape, dtype=torch.float32, device=setting.device)
        for weight in exact.parameters():
            weight.data = weight.data.bfloat16().float()
        n_head, n_steps = setting.pick((50, 4), (700, 24))
        ids = prompt(n_head + n_steps, exact.config.vocab_size, seed=3)
        truth = plain_logits(exact, ids, n_steps)
        half = exact.to(torch.bfloat16)
        plain = plain_logits(half, ids, n_steps)
        ours = _fed(half, ids, n_steps, chunk=setting.pick(8, 256))
        errors: dict[str, Any] = {"plain": _error(truth, plain), "ours": _error(truth, ours)}
        findings.figures[shape] = errors
        allowed = HALF_SHARE * errors["plain"]
        findings.at_most(f"bf16 logits, {shape}", errors["ours"], allowed, "RMS error / RMS")
        del exact, half
        setting.forget()


def _fed(model: PreTrainedModel, ids: Sequence[int], n_steps: int, *, chunk: int) -> Tensor:
    """Logits of the last `n_steps` tokens, fed one by one beside a sibling; `[n_steps, V]`."""
    forest = Forest(model)
    try:
        head = list(ids[: len(ids) - n_steps])
        forest.plant(head, chunk=chunk)
        paths = [forest.begin([*head, *ids[-n_steps:]]), forest.begin([*head, 1])]
        found = []
        for token in ids[-n_steps:]:
            found.append(forest.feed(paths, [[token], [2 if token == 1 else 1]])[0])
        forest.clear()
        return torch.stack(found)
    finally:
        forest.close()


def _error(truth: Tensor, found: Tensor) -> float:
    return float((truth - found).square().mean().sqrt() / truth.square().mean().sqrt())
