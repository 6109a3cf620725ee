"""Attention of a ragged batch over the tree: each distinct block once, merged by log-sum-exp.

It writes the new K/V into the tips, and must not know a model.

Paper: Hydragen, arXiv:2402.05099, §3; StreamingLLM's sinks are not meant by `sinks` here, but
the learned ones of gpt-oss (one more logit without a value).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sidequest_langchain.kv.blocks import Block
from sidequest_langchain.kv.features import Features
from sidequest_langchain.kv.part_attention import read, read_apart, read_segment
from sidequest_langchain.kv.partial import Partial, Partials, math_partial, merge, one_by_one
from sidequest_langchain.kv.partial_cpu import cpu_partial, cpu_partials
from sidequest_langchain.kv.partial_cuda import cuda_partial
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.kv.step_plan import StepPlan
from sidequest_langchain.kv.watching import Decoded, Prefilled

__all__ = ["Features", "attend"]

_PARTIALS: dict[str, Partial] = {"cpu": cpu_partial, "cuda": cuda_partial}
_OF_MANY: dict[Partial, Partials] = {cpu_partial: cpu_partials}
"""Partials that have a quicker way for several blocks."""


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
        return _decode(plan, layer, q, k.shape[0], features, partial).transpose(0, 1).to(q.dtype)
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
    if plan.decoding:
        tokens = plan.decoding_tokens(q.device)
        decoded = _decode(plan, layer, q[:, tokens], k.shape[0], features, partial)
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


def _decode(
    plan: StepPlan, layer: int, q: Tensor, n_kv: int, features: Features, partial: Partial
) -> Tensor:
    """Output of the decoding rows, `[Hq, R, Dv]`."""
    is_watched = plan.watcher is not None and layer in plan.watcher.layers
    reads = plan.reads(features.window, is_watched=is_watched)
    calls = reads.calls
    # The query heads of a KV group are queries of one head, so that K and V are read once for
    # them: `G` heads of `r` rows make `[H, G * r, D]`. They stay so until the parts are merged.
    grouped = q.view(n_kv, -1, *q.shape[1:])
    shape = q.shape[:2]
    everyone = grouped.flatten(1, 2)
    by_piece: list[Tensor] = []
    if reads.are_whole and not (is_watched and reads.bunches) and features.softcap is None:
        of_many = _OF_MANY.get(partial) or one_by_one(partial)
        loaded = [call.load(layer) for call in calls]
        parts, sums = of_many(everyone, loaded, scaling=features.scaling)
        lses = list(sums.unbind()) if is_watched else []
    else:
        outputs, lses = [], []
        singles = grouped.unbind(2) if plan.has_single(calls) else ()
        for call in calls:
            if call.rows is None:
                queries = everyone
            elif len(call.rows) == 1:
                queries = singles[call.rows[0]]
            else:
                members = plan.index(call.rows, call.rows, q.device)
                queries = grouped.index_select(2, members).flatten(1, 2)
            if is_watched and not isinstance(call, Block):
                out, lse, of_pieces = read_apart(call, layer, queries, features, partial)
                by_piece += of_pieces
            else:
                out, lse = read(call, layer, queries, features, partial)
            outputs.append(out)
            lses.append(lse)
        if all(call.rows is None for call in calls):
            parts, sums = torch.stack(outputs), torch.stack(lses)
        else:
            parts, sums = _side_by_side(
                plan.places(features.window, grouped.shape[1], q.device, is_watched=is_watched),
                outputs,
                lses,
            )
    if len(parts) == 1:
        out, sums = parts[0].reshape(*shape, -1), sums[0].reshape(shape)
    else:
        out, sums = merge(parts, sums).reshape(*shape, -1), sums.reshape(-1, *shape)
    if is_watched:
        seen = Decoded(
            q=q,
            blocks=reads.blocks,
            lses=reads.by_block(lses, by_piece),
            sums=_with_sink_part(sums.view(-1, *shape), features.sinks),
            features=features,
        )
        assert plan.watcher is not None
        plan.watcher.decoded(plan, layer, seen)
    return _with_sinks(out, sums, features.sinks)


def _side_by_side(
    where: tuple[Tensor, Tensor], outputs: list[Tensor], lses: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Parts that belong to some rows only, sorted into slots: one of a row in each.

    Args:
        where: What `StepPlan.places` says of all calls.
        outputs: `[H, G * r, Dv]` of every call, for `r` rows each.
        lses: `[H, G * r]` of every call.

    Returns:
        The parts, `[slots, H, G * R, Dv]`, and their log-sum-exps, -inf where a row has none.
    """
    places, holes = where
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
    limit = plan.limit(i)
    owners: list[tuple[Segment, int]] = []
    is_watched = plan.watcher is not None and layer in plan.watcher.layers
    segments: Sequence[Segment] = plan.lineage(i)
    if not is_watched:
        reads, segments = plan.behind(i, window)
        parts += [read(call, layer, q, features, partial) for call in reads.calls]
    for segment in segments:
        managed = plan.parts(segment)
        if managed is not None:
            parts += read_segment(segment, managed, row, limit, layer, q, features, partial)
            owners.append((segment, len(parts)))
            continue
        oldest = 0 if window is None else row.position - window + 1
        n_rows = segment.n_rows if limit is None else min(segment.n_rows, limit - segment.start)
        if n_rows <= 0 or oldest >= segment.start + n_rows:
            continue
        keys, values = (rows[layer] for rows in plan.counted(segment))
        visible = None
        if window is not None and oldest + row.n_new - 1 > segment.start:
            visible = plan.visible(i, segment, window, q.device)
        if n_rows < segment.n_rows:
            keys, values = keys[:, :n_rows], values[:, :n_rows]
            visible = None if visible is None else visible[:, :n_rows]
        parts.append(partial(q, keys, values, scaling=scaling, visible=visible, softcap=softcap))
        owners.append((segment, len(parts)))
    if is_watched:
        _tell_prefilled(plan, i, layer, q, parts, owners, features)
    if len(parts) == 1:
        return _with_sinks(*parts[0], features.sinks)
    lses = torch.stack([lse for _, lse in parts])
    out = merge(torch.stack([out for out, _ in parts]), lses)
    return _with_sinks(out, lses, features.sinks)


def _tell_prefilled(
    plan: StepPlan,
    i: int,
    layer: int,
    q: Tensor,
    parts: list[tuple[Tensor, Tensor]],
    owners: list[tuple[Segment, int]],
    features: Features,
) -> None:
    """Report a chunk: `parts` are its own, then those of each segment up to a number of them."""
    segments, lses = [], []
    first = 1
    for segment, last in owners:
        if last > first:
            segments.append(segment)
            lses.append(torch.logsumexp(torch.stack([lse for _, lse in parts[first:last]]), 0))
        first = last
    total = _total(torch.stack([lse for _, lse in parts]), features.sinks)
    seen = Prefilled(
        row=i,
        q=q,
        segments=segments,
        lses=lses,
        own_lse=parts[0][1],
        total=total,
        features=features,
    )
    assert plan.watcher is not None
    plan.watcher.prefilled(plan, layer, seen)


def _total(sums: Tensor, sinks: Tensor | None) -> Tensor:
    """Log-sum-exp over parts, `[Hq, R]` or `[P, Hq, R]`, and sinks."""
    total = sums if sums.dim() == 2 else torch.logsumexp(sums, 0)
    return total if sinks is None else torch.logaddexp(total, sinks.float().unsqueeze(1))


def _with_sink_part(sums: Tensor, sinks: Tensor | None) -> Tensor:
    """Log-sum-exps of parts, `[P, Hq, R]`, with that of the sinks, if there are any."""
    if sinks is None:
        return sums
    return torch.cat([sums, sinks.float().view(1, -1, 1).expand(1, *sums.shape[1:])])


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
