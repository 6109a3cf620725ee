"""More than one process, and processes that die: a model is there whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sidequest_langchain.models import conversion
from sidequest_langchain.models.child import run_child
from sidequest_langchain.models.home import model_folder, sole_maker
from sidequest_langchain.models.progress import Stage
from sidequest_langchain.models.pulling import installed, pull
from tests.models.fakes import BLOB, copying_convert, files_below

_ROOT = Path(__file__).parents[2]
_WAIT_S = 30

_PULL = """\
import sys, time
from pathlib import Path
from sidequest_langchain.models.pulling import pull
from tests.models.fakes import Shop, copying_convert, entry_of

shelf, trace, pause_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def convert(blob, folder, on_stage):
    copying_convert(blob, folder, on_stage)
    with trace.open("a") as stream:
        stream.write("converted\\n")
    time.sleep(pause_s)

pull(entry_of(), download=Shop(shelf), convert=convert)
"""


def _spawn(script: str, *words: object) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "src")])
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )


def _wait_for(is_so, what: str) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not is_so():
        if time.monotonic() > end_s:
            pytest.fail(f"waited in vain until {what}")
        time.sleep(0.02)


def test_killed_while_writing(home, entry, shop, tmp_path):
    trace = tmp_path / "trace"
    puller = _spawn(_PULL, shop.shelf, trace, 600)
    _wait_for(trace.exists, "the model is written")
    puller.send_signal(signal.SIGKILL)
    puller.communicate()

    assert files_below(home) != set(), "it was killed in the middle of its work"
    assert not model_folder("tiny").exists()
    assert not installed(entry)

    def convert(blob: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
        assert len(list((home / ".staging" / "tiny").iterdir())) == 1, "the old remains are gone"
        copying_convert(blob, folder, on_stage)

    pull(entry, download=shop, convert=convert)

    assert installed(entry)
    assert (model_folder("tiny") / "model.safetensors").read_bytes() == BLOB
    assert not [name for name in files_below(home) if name.startswith(".staging")]


def test_two_at_once_make_it_once(home, entry, shop, tmp_path):
    trace = tmp_path / "trace"
    pullers = [_spawn(_PULL, shop.shelf, trace, 0.5) for _ in range(3)]
    said = [puller.communicate(timeout=_WAIT_S)[1].decode() for puller in pullers]

    assert [puller.returncode for puller in pullers] == [0, 0, 0], said
    assert trace.read_text() == "converted\n"
    assert installed(entry)


def test_says_that_it_waits_for_another(home, entry, shop, tmp_path):
    puller = _spawn(_PULL, shop.shelf, tmp_path / "trace", 1)
    _wait_for((tmp_path / "trace").exists, "the other has the lock")
    stages: list[Stage] = []

    pull(entry, progress=stages.append, download=shop, convert=copying_convert)

    puller.communicate()
    assert [stage.text for stage in stages] == ["waiting for another process that is making tiny"]


def test_the_lock_is_per_model(home):
    said: list[Stage] = []
    with sole_maker("one", said.append), sole_maker("two", said.append):
        assert said == []


_PARENT = """\
import sys
from pathlib import Path
from sidequest_langchain.models.child import run_child

run_child(["-c", sys.argv[1]], Path(sys.argv[2]), on_tick=lambda: None)
"""

_WORKER = """\
import time
from sidequest_langchain.models.gguf_worker import _end_with_parent

_end_with_parent()
print("watching", flush=True)
time.sleep(600)
"""


def _children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def test_the_worker_does_not_outlive_its_parent(tmp_path):
    log = tmp_path / "log"
    parent = _spawn(_PARENT, _WORKER, log)
    _wait_for(lambda: log.exists() and log.read_text(), "the worker watches")
    (worker,) = _children(parent)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()

    worker.wait(timeout=_WAIT_S)


def test_a_child_is_ended_when_its_run_is_left_early(tmp_path):
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(child.pid for child in psutil.Process().children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(["-c", "import time; time.sleep(600)"], tmp_path / "log", on_tick=interrupt)

    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_killed_for_memory_is_said(tmp_path, monkeypatch):
    blob = tmp_path / "x.gguf"
    blob.write_bytes(b"GGUF" + bytes(100))

    def run_child(arguments, log, **given):
        log.write_text("")
        return -9

    monkeypatch.setattr(conversion, "run_child", run_child)

    with pytest.raises(OSError, match="memory ran out"):
        conversion.convert_gguf(blob, tmp_path, lambda doing: None)
