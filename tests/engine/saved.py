"""What tests of saved threads share: a tree's contents bit for bit, and a child process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import torch

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.kv.clearing import ClearedId
from tests.engine.driving import PATIENCE_S
from tests.engine.managing import tokens_to
from tests.kv.archiving import same_bits


def contents(engine: Engine, thread: str | None = None) -> dict[Any, dict[str, Any]]:
    """Everything that is stored of the paths of a thread, by scope and tokens; tensors cloned."""
    tree = engine._core.tree

    def look() -> dict[Any, dict[str, Any]]:
        tips = [p.tip for p in tree.paths.values() if thread is None or p.label.thread_id == thread]
        return {(s.scope, tokens_to(s)): _of(s) for s in {s for tip in tips for s in tip.path()}}

    return engine._core.call(look).result(PATIENCE_S)


def _of(segment: Any) -> dict[str, Any]:
    managed = segment.residency
    found = {
        "start": segment.start,
        "n_tokens": segment.n_tokens,
        "cleared": [n for n, t in enumerate(segment.token_ids) if isinstance(t, ClearedId)],
        "kinds": bytes(segment.kinds),
        "labels": sorted(str(p.label) for p in segment.paths),
        "kept": segment.kept,
        "hidden": segment.hidden,
        "by_head": None if segment.kept_by_head is None else segment.kept_by_head.tolist(),
        "packed": [(block.bits, block.offsets) for block in segment.packed],
        "archived": [] if managed is None else [(a.offsets, a.bits) for a in managed.archived],
    }
    tensors = dict(segment.storage.tensors(*segment.place))
    for n, block in enumerate(segment.packed):
        tensors |= {f"{n}.{name}": t for name, t in block.tensors().items()}
    return found | {"tensors": {name: t.clone() for name, t in tensors.items()}}


def assert_same(one: dict[Any, dict[str, Any]], other: dict[Any, dict[str, Any]]) -> None:
    """Equal to the last bit."""
    assert one.keys() == other.keys()
    for key in one:
        a, b = dict(one[key]), dict(other[key])
        of_a, of_b = a.pop("tensors"), b.pop("tensors")
        assert a == b, {name: (a[name], b[name]) for name in a if a[name] != b[name]}
        assert of_a.keys() == of_b.keys()
        assert all(same_bits(of_a[name], of_b[name].contiguous()) for name in of_a)


def child(code: str) -> str:
    """What a new process prints; the repository's packages are importable in it."""
    start = f"import sys\nsys.path[:0] = {sys.path!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def n_payload(kept: dict[Any, dict[str, Any]]) -> int:
    """Bytes of all rows."""
    return sum(t.nbytes for one in kept.values() for t in one["tensors"].values())


def n_ids(kept: dict[Any, dict[str, Any]]) -> int:
    """Tokens of all segments."""
    return sum(one["n_tokens"] for one in kept.values())


def written_over(path: Any, place: int) -> None:
    """Flip one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def dtype_of(engine: Engine) -> torch.dtype:
    """Of its rows."""
    return engine._core.tree.layout[0].dtype
