"""`sidequest eval`: what it says, where it writes, and mistakes."""

from __future__ import annotations

import json
import re

import pytest

from sidequest_langchain import cli
from sidequest_langchain.evaluation.command import TASKS
from sidequest_langchain.evaluation.pages import marks

SMALL = ["--tokens", "200", "--samples", "1", "--policies", "none"]

BEGIN, END = marks("evaluation")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["eval", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


class TestHelp:
    def test_teaches_and_fits(self, capsys):
        status, out, _ = run(capsys, "--help")

        assert status == 0
        assert "sidequest eval --out eval.jsonl" in out
        assert all(name in re.sub(r"\s", "", out) for name in (*TASKS, "planner"))
        assert max(map(len, out.splitlines())) <= 100

    def test_list_says_what_tasks_ask(self, capsys):
        status, out, _ = run(capsys, "--list")

        assert status == 0
        assert len(out.splitlines()) == len(TASKS) + 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "nope"], "no task is called 'nope'; there are needle, keys"),
        (["--policies", "lur"], "there is no policy 'lur'; did you mean 'lru'?"),
        (["--budgets", "2"], "--budgets are shares above 0 and at most 1"),
        (["--budgets", "half"], "--budgets are shares"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--tokens", "3"], "--tokens must be at least 50"),
    ],
)
def test_a_mistake_is_one_line(capsys, words, said):
    status, out, err = run(capsys, *words)

    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


class TestRun:
    def test_every_task_on_a_tiny_model(self, capsys, folder):
        status, out, err = run(capsys, *SMALL, "--model", str(folder))

        assert status == 0
        document = json.loads(out.splitlines()[-1])
        assert document["schema"] == "sidequest.eval/1"
        assert list(document["tasks"]) == list(TASKS)
        (full,) = document["results"]
        assert full["errors"] == {}
        assert full["n_runs"] == len(TASKS)
        assert set(full["scores"]) == {t.name for t in TASKS.values() if not t.is_forced}
        assert all(0 <= score <= 1 for score in full["scores"].values())
        assert full["peak_bytes"] >= full["bytes"] > 0
        assert f"{len(TASKS)}/{len(TASKS)}  replay 0 none" in err

    def test_a_cut_run_goes_on(self, capsys, folder, tmp_path):
        words = [*SMALL, "--model", str(folder), "--tasks", "needle,keys"]
        words += ["--out", str(tmp_path / "log"), "--docs", str(tmp_path / "page.md")]
        (tmp_path / "page.md").write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
        _, first, _ = run(capsys, *words)
        lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / "log").write_text("".join(lines[:-1]), encoding="utf-8")

        status, again, err = run(capsys, *words)
        assert status == 0
        assert "keys 0 none" in err
        assert "needle 0 none" not in err
        one, other = (json.loads(out.splitlines()[-1]) for out in (first, again))
        assert one["results"][0]["scores"] == other["results"][0]["scores"]
        page = (tmp_path / "page.md").read_text(encoding="utf-8")
        assert "| full cache |" in page
        assert str(tmp_path / "log") not in page

    def test_the_predictor_is_handed_on_and_told(self, capsys, folder, tmp_path):
        words = ["--model", str(folder), "--tasks", "needle", "--tokens", "200", "--samples", "1"]
        words += ["--policies", "staged", "--budgets", "0.5"]
        _, out, _ = run(capsys, *words, "--predictor", str(tmp_path / "nothing"))
        document = json.loads(out.splitlines()[-1])
        assert document["predictor"] == str(tmp_path / "nothing")
        assert "importance weights cannot be read" in str(document["results"][1]["errors"])
        _, out, _ = run(capsys, *words, "--predictor", "none")
        document = json.loads(out.splitlines()[-1])
        assert document["predictor"] == "none"
        assert document["results"][1]["errors"] == {}

    def test_a_log_of_another_seed_is_refused(self, capsys, folder, tmp_path):
        words = [*SMALL, "--model", str(folder), "--tasks", "needle", "--out", str(tmp_path / "l")]
        run(capsys, *words)
        status, _, err = run(capsys, *words, "--seed", "1")

        assert status == 2
        assert "other settings" in err
