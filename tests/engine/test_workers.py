"""OpenMP workers are given back, in a process of its own: how many there are is the process'."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
import torch
from sidequest_langchain.engine import workers

torch.set_num_threads(4)


def n_threads():
    return len(os.listdir("/proc/self/task"))


def work():
    return float((torch.ones(400, 4000).exp() + 1).log().sum())


alone = n_threads()
expected = work()
busy = n_threads()
workers.give_workers_back()
given_back = n_threads()
workers.give_workers_back()
assert n_threads() == given_back
assert work() == expected
print(alone, busy, given_back, n_threads(), len(workers._pauses()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_thread_without_workers_works_on_with_new_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    alone, busy, given_back, again, n_libraries = map(int, done.stdout.split())
    if n_libraries == 0:
        pytest.skip("this build of torch has another OpenMP")
    assert busy == alone + 3
    assert given_back == alone
    assert again == busy
