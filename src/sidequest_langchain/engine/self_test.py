"""The load-time check: a short prompt through the plain model and through the tree must agree.

Paper: none; a model that is served silently wrong is worse than one that is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.errors import UnsupportedModelError
from sidequest_langchain.kv.segment import Path
from sidequest_langchain.kv.step_plan import Row
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.labels import PathSelector, StepLabel

TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Largest difference allowed, as a share of the largest logit; halves get `HALF_TOLERANCE`."""
HALF_TOLERANCE = 0.06


def self_test(adapter: ModelAdapter) -> None:
    """Compare logits over three segments and two siblings with the plain model's.

    Raises:
        UnsupportedModelError: They differ: the architecture computes something that tree
            attention does not.
    """
    tree = SegmentTree(adapter.layout)
    n = max(8, min(24, adapter.context_length - 1))
    trunk = [(7919 * i + 13) % adapter.vocab_size for i in range(n - 5)]
    branches = [
        [(31 * i + 5) % adapter.vocab_size for i in range(3)],
        [(17 * i + 3) % adapter.vocab_size for i in range(5)],
    ]
    cut = len(trunk) // 2
    _feed(adapter, tree, [trunk[:cut]])
    _feed(adapter, tree, [trunk])
    _feed(adapter, tree, [trunk + branch[:-1] for branch in branches])
    logits = _feed(adapter, tree, [trunk + branch for branch in branches])
    for branch, got in zip(branches, logits, strict=True):
        _compare(adapter, adapter.plain_logits(trunk + branch), got)
    tree.release(PathSelector(), reason="self-test")


def _feed(adapter: ModelAdapter, tree: SegmentTree, prompts: list[list[int]]) -> Tensor:
    paths: list[Path] = []
    rows, ids = [], []
    for prompt in prompts:
        path = tree.begin("self-test", prompt, StepLabel(call_id="self-test"))
        new = prompt[path.n_reused :]
        tree.reserve(path, len(new))
        rows.append(Row(tip=path.tip, n_new=len(new), position=path.n_reused))
        ids.extend(new)
        paths.append(path)
    logits = adapter.forward(rows, ids)
    for path, prompt in zip(paths, prompts, strict=True):
        tree.extend(path, prompt[path.n_reused :])
        tree.commit(path)
    return logits


def _compare(adapter: ModelAdapter, expected: Tensor, got: Tensor) -> None:
    share = max(TOLERANCE.get(layer.dtype, HALF_TOLERANCE) for layer in adapter.layout)
    allowed = share * max(1.0, float(expected.abs().max()))
    difference = float((expected - got).abs().max())
    if not difference <= allowed:
        name = type(adapter.model).__name__
        msg = (
            f"{name} cannot be served over a segment tree: in the load-time check its logits "
            f"differ from the plain model's by {difference:.3g} (allowed {allowed:.3g}); its "
            "attention computes something that tree attention does not"
        )
        if getattr(adapter.model, "is_quantized", False):
            msg += (
                ", or its quantisation lets a token depend on the others of its pass: use one "
                "of the weights only"
            )
        raise UnsupportedModelError(msg)
