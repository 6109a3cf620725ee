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
from sidequest_langchain.kv.step_plan import StepPlan

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
    if not plan.stored:
        return
    keys, values = torch.split(k, plan.sizes, 1), torch.split(v, plan.sizes, 1)
    if len(plan.stored) < len(plan.rows):
        keys = tuple(keys[i] for i in plan.stored)
        values = tuple(values[i] for i in plan.stored)
    # One call for all rows: a Python loop of copies costs more than the copies.
    torch._foreach_copy_(plan.targets(layer), [*keys, *values])


def _decode(plan: StepPlan, layer: int, q: Tensor, features: Features, partial: Partial) -> Tensor:
    """Output of the decoding rows, `[Hq, R, Dv]`."""
    blocks = plan.blocks(features.window)
    # The query heads of a KV group are queries of one head, so that K and V are read once for
    # them: `G` heads of `r` rows make `[H, G * r, D]`. They stay so until the parts are merged.
    grouped = q.view(blocks[0].keys[layer].shape[0], -1, *q.shape[1:])
    shape = q.shape[:2]
    everyone = grouped.flatten(1, 2)
    singles = grouped.unbind(2) if plan.has_single(blocks) else ()
    outputs, lses = [], []
    for block in blocks:
        if block.rows is None:
            queries = everyone
        elif len(block.rows) == 1:
            queries = singles[block.rows[0]]
        else:
            members = plan.index(block.rows, block.rows, q.device)
            queries = grouped.index_select(2, members).flatten(1, 2)
        out, lse = partial(
            queries,
            block.keys[layer],
            block.values[layer],
            scaling=features.scaling,
            softcap=features.softcap,
        )
        outputs.append(out)
        lses.append(lse)
    if len(blocks) == 1:
        out, lse = outputs[0], lses[0]
        return _with_sinks(out.reshape(*shape, -1), lse.reshape(shape), features.sinks)
    if all(block.rows is None for block in blocks):
        parts, sums = torch.stack(outputs), torch.stack(lses)
    else:
        parts, sums = _side_by_side(plan, features.window, grouped.shape[1], outputs, lses)
    out = merge(parts, sums).reshape(*shape, -1)
    return _with_sinks(out, sums.reshape(-1, *shape), features.sinks)


def _side_by_side(
    plan: StepPlan, window: int | None, n_group: int, outputs: list[Tensor], lses: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Parts that belong to some rows only, sorted into one slot for each depth of the paths.

    Args:
        plan: The step.
        window: The layer's sliding window.
        n_group: Query heads of a KV head, `G`.
        outputs: `[H, G * r, Dv]` of every block, `r` rows each.
        lses: `[H, G * r]` of every block.

    Returns:
        The parts, `[slots, H, G * R, Dv]`, and their log-sum-exps, -inf where a row has none.
    """
    places, holes = plan.places(window, n_group, lses[0].device)
    n_kv = lses[0].shape[0]
    parts = torch.cat(outputs, 1).index_select(1, places).view(n_kv, *holes.shape, -1)
    sums = torch.cat(lses, 1).index_select(1, places).view(n_kv, *holes.shape) + holes
    return parts.transpose(0, 1), sums.transpose(0, 1)


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
        seen = plan.band(i, window, q.device)
        parts = [partial(q, k, v, scaling=scaling, visible=seen, softcap=softcap)]
    for segment in plan.lineage(i):
        oldest = 0 if window is None else row.position - window + 1
        if segment.n_rows == 0 or oldest >= segment.end:
            continue
        keys, values = (rows[layer] for rows in plan.counted(segment))
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
