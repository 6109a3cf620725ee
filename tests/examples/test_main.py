"""The command line: words in, a status out, one JSON document at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import UnknownModelError
from sidequest_langchain.examples.tree_of_thoughts import main as planner
from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.options import parse
from sidequest_langchain.examples.tree_of_thoughts.problem import ProblemError
from sidequest_langchain.examples.tree_of_thoughts.problem_file import save_problems
from sidequest_langchain.examples.tree_of_thoughts.report import CALLS_SCHEMA, SCHEMA
from tests.examples.scripted import tiny_chat

FEW = ["--cities", "3", "--max-calls", "12", "--samples", "2"]


@pytest.fixture(scope="module")
def chat() -> Iterator[SideQuestChatModel]:
    made = tiny_chat()
    yield made
    made.engine.close()


@pytest.fixture
def tiny_planner(chat: SideQuestChatModel, monkeypatch: pytest.MonkeyPatch) -> SideQuestChatModel:
    """The command line, over random weights instead of the model it names."""
    monkeypatch.setattr(planner, "SideQuestChatModel", lambda model: chat)
    return chat


@pytest.mark.usefixtures("tiny_planner")
class TestRuns:
    def test_the_last_line_is_one_json_document(self, capsys: Any) -> None:
        assert planner.main([*FEW, "--json", "--baseline", "cot", "--seeds", "0-1"]) == 0
        out = capsys.readouterr().out
        assert out.endswith("}\n")
        document = json.loads(out.splitlines()[-1])
        assert document["schema"] == SCHEMA
        assert [(run["problem"][-1], run["method"]) for run in document["runs"]] == [
            (seed, method) for seed in "01" for method in ("beam", "dfs", "cot")
        ]
        check_run(document["runs"][1])
        assert "all runs" in out

    def test_quiet_shows_the_document_alone(self, capsys: Any) -> None:
        assert planner.main([*FEW, "--mode", "dfs", "--json", "--quiet"]) == 0
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 1
        assert captured.err == ""

    def test_without_replay_nothing_is_said_of_it(self, capsys: Any) -> None:
        planner.main([*FEW, "--mode", "dfs", "--json", "--quiet", "--no-replay"])
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["kv"]["peak_bytes"] > 0
        assert run["kv"]["peak_bytes_without_release"] is None

    def test_a_record_holds_every_call_with_its_ids(
        self, tmp_path: Path, tiny_planner: SideQuestChatModel
    ) -> None:
        path = tmp_path / "calls.json"
        assert planner.main([*FEW, "--mode", "beam", "--quiet", "--record", str(path)]) == 0
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["schema"] == CALLS_SCHEMA
        (run,) = document["runs"]
        kinds = {call["kind"] for call in run["calls"]}
        assert kinds == {"read", "calibrate", "propose", "evaluate"}
        written = {call["reply"]["id"]: call["reply"]["text"] for call in run["calls"]}
        for call in run["calls"]:
            assert call["reply"]["token_ids"] == list(
                tiny_planner.engine.replies.get(call["reply"]["id"]).token_ids  # type: ignore[union-attr]
            )
            assert [m["role"] for m in call["messages"]][::1][0] == "system"
            assert call["messages"][-1]["role"] == "user"
            for message in call["messages"]:
                if "id" in message:
                    assert written[message["id"]] == message["content"]
        rounds = [call["n_round"] for call in run["calls"]]
        assert rounds == sorted(rounds)

    def test_problems_come_from_a_file(self, tmp_path: Path, capsys: Any) -> None:
        path = tmp_path / "trips.json"
        save_problems(path, [generate(3, 5), generate(3, 6)])
        words = [*FEW, "--mode", "dfs", "--json", "--quiet", "--no-replay"]
        assert planner.main([*words, "--problems", str(path), "--limit", "1"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["problem"] == "trip_3_cities_seed_5"

    def test_a_record_that_cannot_be_written_is_one_line(self, tmp_path: Path, capsys: Any) -> None:
        path = tmp_path / "absent" / "calls.json"
        assert planner.main([*FEW, "--mode", "dfs", "--quiet", "--record", str(path)]) == 1
        assert one_line(capsys).startswith("error: cannot write the record of calls")


def check_run(run: dict[str, Any]) -> None:
    assert set(run) == {
        "problem", "n_cities", "method", "solved", "outcome", "plan", "violations", "calls",
        "samples", "tokens", "wall_s", "kv", "agreement", "thoughts",
    }  # fmt: skip
    tokens = run["tokens"]
    assert tokens["prompt"] == tokens["reused"] + tokens["prefilled"]
    assert run["kv"]["peak_bytes_without_release"] >= run["kv"]["peak_bytes"] > 0
    for release in run["kv"]["releases"]:
        assert set(release) == {"thought", "reason", "bytes", "tokens"}
        assert release["bytes"] > 0
    ids = {thought["id"] for thought in run["thoughts"]}
    assert {thought["parent"] for thought in run["thoughts"]} <= {None, *ids}
    assert run["solved"] == (run["violations"] == [])
    assert run["calls"] <= run["samples"]


def one_line(capsys: Any) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return str(captured.err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cities", "9"], "problems of 3 to 8 cities can be made, found 9"),
        (["--seeds", "4-1"], "--seeds is a list such as 0-4 or 0,3,7; found '4-1'"),
        (["--seeds", "one"], "found 'one'"),
        (["--samples", "0"], "--samples must be at least 1, found 0"),
        (["--beam-width", "-2"], "--beam-width must be at least 1, found -2"),
        (["--max-depth", "0"], "--max-depth must be at least 1"),
        (["--problems", "absent.json"], "cannot read trip problems from absent.json"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(words: list[str], message: str, capsys: Any) -> None:
    assert planner.main(words) == 1
    assert message in one_line(capsys)


def test_an_unknown_model_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refuse(model: str) -> None:
        msg = f"no model {model!r};\nlook at `sidequest models`"
        raise UnknownModelError(msg)

    monkeypatch.setattr(planner, "SideQuestChatModel", refuse)
    assert planner.main(["--quiet", "--model", "nonsense"]) == 1
    assert one_line(capsys) == "error: no model 'nonsense'; look at `sidequest models`\n"


def test_help_teaches_with_examples(capsys: Any) -> None:
    with pytest.raises(SystemExit) as leaving:
        planner.main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    for option in ("--cities", "--seeds", "--mode", "--baseline", "--record", "--json"):
        assert option in text


def test_words_become_options() -> None:
    options = parse(["--seeds", "0-2,7", "--cities", "4", "--mode", "beam", "--beam-width", "4"])
    assert options.seeds == (0, 1, 2, 7)
    assert options.problems == tuple(generate(4, seed) for seed in (0, 1, 2, 7))
    (limits,) = options.limits
    assert (limits.mode, limits.beam_width) == ("beam", 4)
    assert [limits.mode for limits in parse([]).limits] == ["beam", "dfs"]
    with pytest.raises(ProblemError):
        parse(["--max-calls", "0"])
    with pytest.raises(SystemExit):
        parse(["--mode", "sideways"])
