"""Attention of a ragged batch over the tree: each distinct block once, merged by log-sum-exp.

It writes the new K/V into the tips, and must not know a model.

Paper: Hydragen, arXiv:2402.05099, §3; StreamingLLM's sinks are not meant by `sinks` here, but
the learned ones of gpt-oss (one more logit without a value).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidequest_langchain.kv.partial import Partial, math_partial, merge
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.partial_cuda import cuda_partial
from sidequest_langchain.kv.step_plan import Block, StepPlan

_PARTIALS: dict[str, Partial] = {"cpu": cpu_partial, "cuda": cuda_partial}


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a layer asks of attention beyond queries, keys and values."""

    scaling: float
    window: int | None = None
    """A token sees the last `window` positions, its own included; `None` is all."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """One logit a query head without a value, `[Hq]`."""


def attend(
    plan: StepPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, features: Features
) -> Tensor:
    """Store the new K/V of one layer and attend over every row's path.

    Exact up to rounding: equal to causal attention over each row's tokens. Writes rows
    `n_rows..` of the tips; the segments count them only when the whole step went well.

    Args:
        plan: The step.
        layer: Which layer's storage to use.
        q: Queries after RoPE, `[Hq, T, D]`.
        k: Keys after RoPE, `[H, T, D]`.
        v: Values, `[H, T, Dv]`.
        features: What this layer asks for.

    Returns:
        The output, `[T, Hq, Dv]`, dtype of `q`.
    """
    _store(plan, layer, k, v)
    partial = _PARTIALS.get(q.device.type, math_partial)
    if not plan.prefilling:
        return _decode(plan, layer, q, features, partial).transpose(0, 1).to(q.dtype)
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
    if plan.decoding:
        tokens = plan.decoding_tokens(q.device)
        decoded = _decode(plan, layer, q[:, tokens], features, partial)
        out[tokens] = decoded.transpose(0, 1).to(q.dtype)
    for i in plan.prefilling:
        a, b = plan.slices[i]
        chunk = _prefill(plan, i, layer, (q[:, a:b], k[:, a:b], v[:, a:b]), features, partial)
        out[a:b] = chunk.transpose(0, 1).to(q.dtype)
    return out


def _store(plan: StepPlan, layer: int, k: Tensor, v: Tensor) -> None:
    for row, (a, b) in zip(plan.rows, plan.slices, strict=True):
        if row.is_stored:
            n = row.tip.n_rows
            row.tip.keys[layer][:, n : n + row.n_new] = k[:, a:b]
            row.tip.values[layer][:, n : n + row.n_new] = v[:, a:b]


def _decode(plan: StepPlan, layer: int, q: Tensor, features: Features, partial: Partial) -> Tensor:
    """Output of the decoding rows, `[Hq, R, Dv]`."""
    blocks = plan.blocks(features.window)
    parts = [_block(plan, block, layer, q, features, partial) for block in blocks]
    if len(parts) == 1:
        out, lse = parts[0]
    elif all(block.rows is None for block in blocks):
        lses = torch.stack([lse for _, lse in parts])
        out, lse = merge(torch.stack([out for out, _ in parts]), lses), lses
    else:
        out, lse = _scatter(plan, q, blocks, parts)
    return _with_sinks(out, lse, features.sinks)


def _block(
    plan: StepPlan, block: Block, layer: int, q: Tensor, features: Features, partial: Partial
) -> tuple[Tensor, Tensor]:
    rows = slice(block.first, block.last)
    queries = q if block.rows is None else q[:, plan.index(block.rows, block.rows, q.device)]
    return partial(
        queries,
        block.segment.keys[layer][:, rows],
        block.segment.values[layer][:, rows],
        scaling=features.scaling,
        softcap=features.softcap,
    )


def _scatter(
    plan: StepPlan,
    q: Tensor,
    blocks: tuple[Block, ...],
    parts: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Merge parts that belong to some rows only: one slot for each depth of the paths."""
    n_slots = 1 + max(block.slot for block in blocks)
    shape = (n_slots, q.shape[0], q.shape[1])
    outputs = q.new_zeros((*shape, parts[0][0].shape[-1]), dtype=torch.float32)
    lses = q.new_full(shape, float("-inf"), dtype=torch.float32)
    for block, (out, lse) in zip(blocks, parts, strict=True):
        if block.rows is None:
            outputs[block.slot], lses[block.slot] = out, lse
        else:
            rows = plan.index(block.rows, block.rows, q.device)
            outputs[block.slot][:, rows], lses[block.slot][:, rows] = out.float(), lse
    return merge(outputs, lses), lses


def _prefill(
    plan: StepPlan,
    i: int,
    layer: int,
    chunk: tuple[Tensor, Tensor, Tensor],
    features: Features,
    partial: Partial,
) -> Tensor:
    """Output of one row's chunk: causal inside of it, full over what came before."""
    q, k, v = chunk
    window, scaling, softcap = features.window, features.scaling, features.softcap
    row = plan.rows[i]
    if window is None or row.n_new <= window:
        parts = [partial(q, k, v, scaling=scaling, is_causal=True, softcap=softcap)]
    else:
        order = torch.arange(row.n_new, device=q.device)
        gap = order.unsqueeze(1) - order.unsqueeze(0)
        seen = (gap >= 0) & (gap < window)
        parts = [partial(q, k, v, scaling=scaling, visible=seen, softcap=softcap)]
    for segment in plan.lineage(i):
        oldest = 0 if window is None else row.position - window + 1
        if segment.n_rows == 0 or oldest >= segment.end:
            continue
        keys, values = segment.keys[layer], segment.values[layer]
        keys, values = keys[:, : segment.n_rows], values[:, : segment.n_rows]
        visible = None
        if window is not None and oldest + row.n_new - 1 > segment.start:
            visible = plan.visible(i, segment, window, q.device)
        parts.append(partial(q, keys, values, scaling=scaling, visible=visible, softcap=softcap))
    if len(parts) == 1:
        return _with_sinks(*parts[0], features.sinks)
    lses = torch.stack([lse for _, lse in parts])
    out = merge(torch.stack([out for out, _ in parts]), lses)
    return _with_sinks(out, lses, features.sinks)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Let one more logit without a value take its share of every query's attention.

    Args:
        out: Output without it, `[Hq, R, Dv]`.
        lse: Log-sum-exp `[Hq, R]`, or of the parts, `[P, Hq, R]`.
        sinks: The logits, `[Hq]`.
    """
    if sinks is None:
        return out
    total = lse if lse.dim() == 2 else torch.logsumexp(lse, 0)
    share = torch.sigmoid(total - sinks.float().unsqueeze(1))
    return out.float() * share.unsqueeze(-1)
