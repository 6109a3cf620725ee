"""The command of the benchmarks: who can take part, mistakes, what it says; without a model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import command, lineup
from benchmarks.contestant import Source
from benchmarks.roster import ROSTER
from benchmarks.workloads import WORKLOADS
from sidequest_langchain import cli
from sidequest_langchain.evaluation.pages import marks

SOURCE = Source(name="tiny", folder="/nowhere", gguf=None)


class TestLineup:
    def test_an_absent_peer_says_how_to_install_it(self, monkeypatch):
        monkeypatch.setattr(lineup, "find_spec", lambda _: None)

        why = lineup.why_absent("llamacpp", SOURCE)
        assert why is not None
        assert "pip install 'sidequest-langchain[bench]'" in why
        assert "llama-cpp-python" in why
        assert lineup.why_absent("ours", SOURCE) is None

    def test_a_peer_of_another_environment(self, monkeypatch):
        monkeypatch.delenv("SIDEQUEST_BENCH_VLLM_PYTHON", raising=False)
        monkeypatch.setattr(lineup, "find_spec", lambda _: None)
        assert "SIDEQUEST_BENCH_VLLM_PYTHON" in (lineup.why_absent("vllm", SOURCE) or "")

        monkeypatch.setenv("SIDEQUEST_BENCH_VLLM_PYTHON", "/nowhere/python")
        assert lineup.why_absent("vllm", SOURCE) is not None

    def test_a_file_that_is_not_here(self, monkeypatch):
        monkeypatch.setattr(lineup, "find_spec", lambda _: object())

        assert "--keep-gguf" in (lineup.why_absent("llamacpp", SOURCE) or "")

    def test_the_order_is_the_rosters(self):
        assert lineup.chosen(None) == list(ROSTER)
        assert lineup.chosen(["chathf", "ours"]) == ["ours", "chathf"]


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["nope"], "no workload is called 'nope'; there are planner, agent, chat, fork"),
            (["--contestants", "x"], "no contestant is called 'x'"),
            (["--rounds", "0"], "--rounds must be at least 1"),
            (["--from", "x.json"], "say where: --write"),
        ],
    )
    def test_a_mistake_is_one_line(self, capsys, words, said):
        assert cli.main(["bench", *words]) == 2

        found = capsys.readouterr()
        assert found.out == ""
        assert said in found.err
        assert found.err.count("\n") == 1

    def test_a_file_that_is_no_document(self, capsys, tmp_path):
        (tmp_path / "x.json").write_text("[]", encoding="utf-8")

        words = ["bench", "--from", str(tmp_path / "x.json"), "--write", str(tmp_path / "d.md")]
        assert cli.main(words) == 2
        assert "holds no document of `sidequest bench`" in capsys.readouterr().err

    def test_help_teaches_and_fits(self, capsys):
        assert cli.main(["bench", "--help"]) == 0

        said = capsys.readouterr().out
        assert "sidequest bench --quick" in said
        assert "minutes" in said
        assert max(map(len, said.splitlines())) <= 80

    def test_a_list_fetches_nothing(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path))
        # Whatever is installed here; the command has its own copy of the package.
        theirs = importlib.import_module("sidequest_langchain.examples.benchmarks.lineup")
        monkeypatch.setattr(theirs, "_has", lambda *given: True)

        assert cli.main(["bench", "--list"]) == 0
        said = capsys.readouterr().out
        assert all(f"{name} " in said for name in (*WORKLOADS, *ROSTER))
        assert "sidequest pull qwen2.5-coder-0.5b --keep-gguf" in " ".join(said.split())
        assert max(map(len, said.splitlines())) <= 80
        assert not list(tmp_path.iterdir())

    def test_a_command_is_noted_without_the_files_of_a_machine(self):
        words = ["chat", "--json", "/home/me/x.json", "--rounds", "3", "--write=/d.md"]
        assert command.without_files(words) == ["chat", "--rounds", "3"]

    def test_every_contestant_has_a_module(self):
        folder = Path(command.__file__).parent
        assert all((folder / f"{entry.module}.py").is_file() for entry in ROSTER.values())

    def test_the_document_of_the_docs_has_a_place(self):
        text = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
        assert all(mark in text for mark in marks("figures"))
