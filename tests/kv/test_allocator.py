"""Freed host memory goes back to the operating system, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sidequest_langchain
from sidequest_langchain.kv import allocator

PROGRAM = """
import gc, json, sys

import psutil
import torch

from sidequest_langchain.kv.layout import LayerShape
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.labels import PathSelector, StepLabel

torch.set_num_threads(1)
n_layers, n_calls, n_tokens = 16, int(sys.argv[1]), int(sys.argv[2])
shape = LayerShape(
    n_kv_heads=2, key_dim=64, value_dim=64, dtype=torch.float32, device=torch.device("cpu")
)
tree = SegmentTree((shape,) * n_layers)
rss = psutil.Process().memory_info

# Blocks freed once raise glibc's threshold, after which tensors come from the heap.
for n in (2**20, 2**22, 2**23):
    torch.ones(n)

for i in range(n_calls):
    label = StepLabel(call_id=str(i), branch="odd" if i % 2 else "even")
    path = tree.begin("s", [i], label)
    tree.reserve(path, n_tokens)
    for tensor in (*path.tip.keys, *path.tip.values):
        tensor.fill_(i)
    del tensor  # a view, of which the last would keep its segment's storage
    tree.extend(path, [i] * n_tokens)
    tree.commit(path)
gc.collect()
before = rss().rss
receipt = tree.release(PathSelector(path_id="odd"), reason="test")
after = rss().rss
left = [(s.keys[0][0, 0, 0].item(), s.token_ids[0]) for s in tree.segments()]
print(json.dumps({
    "freed_bytes": receipt.freed_bytes,
    "fell_bytes": before - after,
    "n_paths": receipt.n_paths,
    "survivors_intact": len(left) == n_calls // 2 and all(a == b for a, b in left),
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="speaks of glibc's allocator")
@pytest.mark.parametrize(("n_calls", "n_tokens"), [(64, 64), (8, 512)])
def test_rss_falls_by_what_was_freed_between_survivors(n_calls, n_tokens):
    pytest.importorskip("psutil")
    n_paths = n_calls // 2
    n_bytes = n_paths * n_tokens * 16 * 2 * 2 * 64 * 4
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(n_calls), str(n_tokens)],
        env={**os.environ, "PYTHONPATH": str(Path(sidequest_langchain.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["freed_bytes"], found["n_paths"]) == (n_bytes, n_paths)
    assert found["survivors_intact"]
    assert found["fell_bytes"] >= 0.95 * n_bytes


def test_small_releases_add_up_to_a_trim(monkeypatch):
    trimmed = []
    monkeypatch.setattr(allocator, "_malloc_trim", lambda: trimmed.append)
    monkeypatch.setattr(allocator, "_pending", 0)
    allocator.return_to_system(allocator.TRIM_BYTES - 1)
    assert trimmed == []
    allocator.return_to_system(1)
    assert trimmed == [0]
    allocator.return_to_system(allocator.TRIM_BYTES - 1)
    assert trimmed == [0]


def test_systems_without_glibc_are_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    allocator._malloc_trim.cache_clear()
    try:
        allocator.return_to_system(2**30)
        assert allocator._malloc_trim() is None
    finally:
        allocator._malloc_trim.cache_clear()
