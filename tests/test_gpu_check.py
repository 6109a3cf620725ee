"""The check of an accelerator runs on a CPU, and fails where attention is wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import command, findings, holding
from benchmarks.gpu.findings import Findings, Setting, Skipped
from sidequest_langchain.kv import tree_attention
from sidequest_langchain.kv.partial_cpu import cpu_partial

ROOT = Path(__file__).parents[1]
QUICK = ["--device", "cpu", "--quick"]
NEVER_FAILED = {"passed", "skipped"}


def document(capsys: pytest.CaptureFixture[str]) -> dict:
    """The last line, read strictly: JSON has no NaN."""
    line = capsys.readouterr().out.splitlines()[-1]
    return json.loads(line, parse_constant=pytest.fail)


def shifted(q, k, v, **features):
    """Attention that leaves a key out where there are more than the check at load has."""
    if k.shape[1] > 30 and not features.get("is_causal"):
        if features.get("visible") is not None:
            features["visible"] = features["visible"][:, 1:]
        k, v = k[:, 1:], v[:, 1:]
    return cpu_partial(q, k, v, **features)


class TestOnACpu:
    def test_every_stage_runs(self, capsys, tmp_path):
        table = tmp_path / "table.txt"

        assert command.main([*QUICK, "--profile", str(table)]) == 0

        found = document(capsys)
        assert found["benchmark"] == "gpu_check"
        assert found["failed"] == []
        assert found["skipped"] == ["catalogue", "syncs"]
        assert list(found["stages"]) == list(command.STAGES)
        assert found["machine"]["device"] == "cpu"
        for stage in found["stages"].values():
            assert set(stage) == {"status", "reason", "seconds", "checks", "figures"}
            assert stage["status"] in NEVER_FAILED
            assert (stage["reason"] is None) == (stage["status"] == "passed")
            for check in stage["checks"].values():
                assert set(check) == {"ok", "found", "allowed", "share", "case", "n_cases"}
                assert check["ok"]
        stages = {name: stage["figures"] for name, stage in found["stages"].items()}
        assert stages["partials"]["n_cases"] == 120
        assert stages["tokens"]["n_answers"] == 11
        assert stages["memory"]["released_bytes"] == stages["memory"]["fell_bytes"] > 0
        assert stages["exhaustion"]["ran_out"]
        for row in stages["steps"]["steps"]:
            assert min(row["pass_ms"], row["engine_ms"], row["generate_ms"]) > 0
            assert row["generate_over_pass"] > 0
        assert set(stages["prefill"]["tokens_per_s"]) == {"16", "32", "generate"}
        assert "aten::" in table.read_text(encoding="utf-8")

    def test_wrong_attention_is_found_by_every_stage_that_looks(self, capsys, monkeypatch):
        monkeypatch.setitem(tree_attention._PARTIALS, "cpu", shifted)

        assert command.main([*QUICK, "--only", "partials,tokens,halves,memory"]) == 1

        found = document(capsys)
        assert found["failed"] == ["partials", "tokens", "halves"]
        checks = found["stages"]["partials"]["checks"]
        assert not checks["device output float32"]["ok"]
        assert not checks["device log-sum-exp float32"]["ok"]
        assert "dtype=torch.float32" in checks["device output float32"]["case"]
        assert checks["math output float32"]["ok"], "which was not tampered with"
        assert not found["stages"]["tokens"]["checks"]["siblings, warm"]["ok"]

    def test_a_stage_that_breaks_fails_and_the_others_run(self, capsys, monkeypatch):
        def broken(*_args, **_features):
            msg = "no such kernel"
            raise RuntimeError(msg)

        monkeypatch.setitem(tree_attention._PARTIALS, "cpu", broken)

        assert command.main([*QUICK, "--only", "partials,memory,profile"]) == 1

        found = document(capsys)
        assert found["failed"] == ["partials", "memory"]
        assert found["stages"]["memory"]["reason"] == "RuntimeError: no such kernel"
        assert found["skipped"] == ["profile"]

    def test_memory_that_is_kept_is_found(self, capsys, monkeypatch):
        monkeypatch.setattr(holding, "_requested", lambda setting, engine: 4096)

        assert command.main([*QUICK, "--only", "memory"]) == 1

        check = document(capsys)["stages"]["memory"]["checks"]["bytes kept of a release"]
        assert check["found"] > 0

    def test_what_is_late_is_skipped_and_says_so(self, capsys):
        assert command.main([*QUICK, "--budget-s", "0"]) == 0

        found = document(capsys)
        assert "partials" in found["skipped"]
        assert "0 s are left" in found["stages"]["partials"]["reason"]

    def test_threads_are_as_they_were(self, capsys):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            command.main([*QUICK, "--only", "profile"])
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)


class TestCommandLine:
    def test_a_file_runs_where_nothing_is_installed(self, tmp_path):
        """Without a PYTHONPATH and from another folder; it finds `src` beside itself."""
        script = ROOT / "benchmarks" / "gpu_check.py"
        words = [sys.executable, str(script), *QUICK, "--only", "profile"]
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            words, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["skipped"] == ["profile"]

    def test_help_teaches(self, capsys):
        with pytest.raises(SystemExit) as left:
            command.main(["--help"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        for stage in command.STAGES:
            assert f"\n  {stage} " in text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--only", "speed"], "no stage is called speed"),
            (["--device", "tpu"], "invalid choice"),
        ],
    )
    def test_mistakes_are_named(self, capsys, words, said):
        with pytest.raises(SystemExit) as left:
            command.main(words)
        assert left.value.code == 2
        assert said in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
    def test_a_device_that_is_not_there(self, capsys):
        with pytest.raises(SystemExit):
            command.main(["--device", "cuda"])
        assert "torch sees no cuda device" in capsys.readouterr().err


class TestFindings:
    def test_the_worst_case_is_kept(self):
        found = Findings()
        for value, case in ((1.0, "a"), (3.0, "b"), (2.0, "c")):
            found.at_most("error", value, 2.5, case)
        check = found.checks["error"]
        assert (check["found"], check["case"], check["n_cases"]) == (3.0, "b", 3)
        assert not found.is_ok

    def test_a_nan_is_never_small_enough(self):
        found = Findings()
        found.at_most("error", math.nan, 1.0)
        found.at_most("error", 0.5, 1.0)
        assert not found.is_ok

    def test_a_deadline_is_kept(self):
        setting = Setting(device=torch.device("cpu"), is_quick=True, deadline=time.monotonic() + 5)
        setting.require(1, "something")
        with pytest.raises(Skipped, match="something: needs about 60 s"):
            setting.require(60, "something")
        assert findings.Skipped is Skipped


@pytest.mark.gpu
def test_on_the_device(capsys):
    assert command.main(["--device", "cuda", "--quick"]) == 0
    found = document(capsys)
    assert found["failed"] == []
    assert found["stages"]["partials"]["figures"]["n_fused"] > 0
    assert found["stages"]["syncs"]["status"] == "passed"
