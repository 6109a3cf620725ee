"""Attention to one block of keys: what the device computes against float64 written down plainly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.kv import tree_attention
from sidequest_langchain.kv.partial import Partial, math_partial
from sidequest_langchain.kv.partial_cuda import is_fused

from .findings import Findings, Setting

OUTPUT = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Largest error of an output, over 1 + its size: keys and values are of size 1."""
LSE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 8e-3}
"""Largest error of a log-sum-exp where scores are rounded to the dtype."""
FUSED_LSE = 5e-3
"""The same where the kernel keeps scores in float32."""
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2047, 2048, 2049, 4097, 7000)
QUERIES = (1, 2, 3, 7, 8, 16, 31, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: sizes and features."""

    dtype: torch.dtype
    heads: tuple[int, int]
    """Query heads and KV heads."""
    dim: int
    n_queries: int
    n_keys: int
    feature: str
    """`all`, `causal`, `window`, `softcap`, or `blind`: some queries see no key."""


def check_partials(setting: Setting, findings: Findings) -> None:
    """The partial of this device, and `math_partial` on it, over every feature."""
    ways: dict[str, Partial] = {
        "device": tree_attention._PARTIALS.get(setting.device.type, math_partial),
        "math": math_partial,
    }
    n_cases = n_fused = 0
    for case in _cases(setting):
        setting.require(2, "comparing partial attention")
        q, k, v, visible = _inputs(case, setting.device)
        softcap = 2.0 if case.feature == "softcap" else None
        is_causal = case.feature == "causal"
        scaling = case.dim**-0.5
        wanted, wanted_lse = _plainly(q, k, v, scaling, _mask(case, visible), softcap)
        for way, partial in ways.items():
            out, lse = partial(
                q, k, v, scaling=scaling, is_causal=is_causal, visible=visible, softcap=softcap
            )
            is_flash = setting.device.type == "cuda" and is_fused(
                q, k, v, is_masked=visible is not None, softcap=softcap
            )
            exact = way == "device" and is_flash
            n_fused += exact
            _compare(findings, way, case, (out, lse), (wanted, wanted_lse), is_fused=exact)
        n_cases += 1
    findings.figures |= {"n_cases": n_cases, "n_fused": n_fused}


def _cases(setting: Setting) -> Iterator[Case]:
    """Every dtype, head dim and feature; lengths and numbers of queries drawn for each."""
    rng = random.Random(0)
    n_draws = setting.pick(1, 3)
    lengths = [n for n in LENGTHS if n <= setting.pick(129, 7000)]
    for dtype in DTYPES:
        for dim in setting.pick((64, 80), (64, 80, 128, 256)):
            for heads in ((8, 8), (8, 2), (14, 2), (7, 1)):
                for feature in ("all", "causal", "window", "softcap", "blind"):
                    for _ in range(n_draws):
                        n_keys = rng.choice(lengths)
                        n_queries = rng.choice(QUERIES + setting.pick((), (512,)))
                        if feature == "causal":
                            n_queries = n_keys = min(n_keys, 2049)
                        yield Case(
                            dtype=dtype,
                            heads=heads,
                            dim=dim,
                            n_queries=n_queries,
                            n_keys=n_keys,
                            feature=feature,
                        )


def _inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, and keys and values as a segment has them: views of storage with room to grow."""
    generator = torch.Generator().manual_seed(case.n_keys * 131 + case.n_queries)
    n_heads, n_kv = case.heads
    q = torch.randn(n_heads, case.n_queries, case.dim, generator=generator)
    whole = torch.randn(2, n_kv, case.n_keys + 5, case.dim, generator=generator)
    whole[:, :, case.n_keys :] = float("nan")
    k, v = whole.to(case.dtype).to(device).narrow(2, 0, case.n_keys).unbind(0)
    visible = None
    if case.feature in ("window", "blind"):
        # A chunk's own tokens, or those of an ancestor, which a window leaves behind.
        first = case.n_keys - case.n_queries if case.feature == "window" else case.n_keys
        queries = first + torch.arange(case.n_queries).unsqueeze(1)
        gap = queries - torch.arange(case.n_keys).unsqueeze(0)
        visible = ((gap >= 0) & (gap < 16)).to(device)
    return q.to(case.dtype).to(device), k, v, visible


def _mask(case: Case, visible: Tensor | None) -> Tensor | None:
    if case.feature == "causal":
        return torch.ones(case.n_queries, case.n_keys, dtype=torch.bool).tril()
    return visible


def _plainly(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64; on the host where the device has none."""
    home = torch.device("cpu") if q.device.type == "mps" else q.device
    group = q.shape[0] // k.shape[0]
    q, k, v = (t.to(home).double() for t in (q, k, v))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask.to(home), float("-inf"))
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ v.repeat_interleave(group, 0), torch.logsumexp(scores, -1)


def _compare(
    findings: Findings,
    way: str,
    case: Case,
    found: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    *,
    is_fused: bool,
) -> None:
    out, lse = (t.to(wanted[0].device).double() for t in found)
    dtype = str(case.dtype).removeprefix("torch.")
    sees = wanted[1].isfinite()
    error = ((out - wanted[0]).abs() / (1 + wanted[0].abs()))[sees]
    text = str(case)
    findings.at_most(f"{way} output {dtype}", _largest(error), OUTPUT[case.dtype], text)
    lse_error = (lse - wanted[1])[sees].abs()
    allowed = FUSED_LSE if is_fused else LSE[case.dtype]
    name = f"{way} log-sum-exp {dtype}{' fused' if is_fused else ''}"
    findings.at_most(name, _largest(lse_error), allowed, text)
    is_blind = bool((lse[~sees] == float("-inf")).all() and out[~sees].isfinite().all())
    findings.holds(f"{way} blind queries", ok=is_blind, case=text)


def _largest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0
