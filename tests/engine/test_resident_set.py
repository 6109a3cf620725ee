"""The operating system gets the memory back: RSS falls with the bytes that a release reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the allocator decides for itself")
@pytest.mark.parametrize("shape", ["one", "many", "branches"])
def test_rss_falls_with_what_is_released(shape: str) -> None:
    """In one piece, in 40 small ones, and branch by branch; 37 MiB in all."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.resident_set", shape],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left"] == 0
    assert found["freed"] == found["held"] >= 32 * 2**20
    assert found["rss_fell"] >= 0.95 * found["freed"]
