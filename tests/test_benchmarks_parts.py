"""The benchmarks' own arithmetic, tables and processes, without a model."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import tables
from benchmarks.contestant import Source
from benchmarks.figures import comparison, contestant_figures, result, spread, workload_figures
from benchmarks.measuring import Field, Measured
from benchmarks.ours import fewest_tokens
from benchmarks.peers_transformers import n_to_the_end
from benchmarks.recording import steps_of
from benchmarks.work import Answer, Call, Step, Work, asked
from benchmarks.workers import Worker, WorkerDied, WorkerError
from benchmarks.workloads import WORKLOADS
from sidequest_langchain import cli
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation.pages import marks

SOURCE = Source(name="tiny", folder="/nowhere", gguf=None)


def _round(wall_s: float, texts: tuple[str, ...] = ("a", "b"), **given: object) -> dict:
    return {
        "wall_s": wall_s,
        "other_load": 0.25,
        "first_token_s": None,
        "n_prompt_tokens": 100,
        "n_prefilled_tokens": 60,
        "n_generated_tokens": 10,
        "n_kv_rows_apart": 110,
        "kv_bytes": 440,
        "kv_how": "measured",
        "rss_before_bytes": 1000,
        "rss_peak_bytes": 2000,
        "texts": list(texts),
        "facts": {},
        **given,
    }


@pytest.fixture
def document() -> dict:
    """Two contestants, one workload, three rounds."""
    work = WORKLOADS["fork"].make(True)
    measured = Measured(
        work=work,
        rounds={
            "ours": [_round(1.0), _round(2.0), _round(4.0)],
            "chathf": [_round(3.0), _round(4.0), _round(16.0, ("a", "c"))],
        },
        failed={"llamacpp": "RuntimeError: no"},
    )
    said = {"weights": "float32", "row_bytes": 8, "load_s": 1.0, "packages": {"torch": "2"}}
    loaded = {"ours": said, "chathf": said}
    return {
        "schema": "sidequest.bench/1",
        "date": "2026-01-02",
        "command": "sidequest bench fork",
        "model": "tiny",
        "threads": 2,
        "rounds": 3,
        "is_small": True,
        "machine": {"processor": "P", "cores": 2, "memory_gib": 8, "python": "3.11"},
        "contestants": contestant_figures(loaded),
        "skipped": {"vllm": "not installed"},
        "workloads": {"fork": workload_figures(measured, "a fork", loaded)},
    }


class TestFigures:
    def test_a_spread_keeps_all(self):
        assert spread([3.0, 1.0, 8.0]) == {
            "median": 3.0, "min": 1.0, "max": 8.0, "all": [3.0, 1.0, 8.0],
        }  # fmt: skip

    def test_times_are_medians_and_memory_is_the_most(self):
        rounds = [_round(2.0, kv_bytes=10), _round(1.0, kv_bytes=30), _round(5.0, kv_bytes=20)]
        found = result(rounds, 8)

        assert found["wall_s"]["median"] == 2.0
        assert found["tokens_per_s"] == 5.0
        assert found["kv_bytes"] == 30
        assert found["kv_bytes_apart"] == 880
        assert found["kv_share"] == 30 / 880
        assert found["first_token_s"] is None

    def test_what_is_not_known_stays_unknown(self):
        found = result([_round(1.0, kv_bytes=None, rss_peak_bytes=None)], 0)

        assert found["kv_bytes"] is found["kv_share"] is found["rss_peak_bytes"] is None

    def test_a_ratio_is_of_pairs_not_of_medians(self):
        rounds = {
            "a": [_round(2.0), _round(30.0), _round(8.0)],
            "b": [_round(1.0)] * 2 + [_round(8.0)],
        }
        found = comparison("a", "b", rounds, {"a": "int8", "b": "float32"})

        assert found["wall_ratio"] == 2.0
        assert found["n_same_answers"] == 2
        assert not found["same_weights"]

    def test_who_failed_is_in_the_document(self, document):
        fork = document["workloads"]["fork"]

        assert fork["failed"] == {"llamacpp": "RuntimeError: no"}
        (other,) = fork["comparisons"]
        assert (other["of"], other["to"], other["wall_ratio"]) == ("chathf", "ours", 3.0)
        assert json.loads(json.dumps(document)) == document

    def test_a_fork_that_prefills_more_than_it_must_is_noticed(self):
        work = WORKLOADS["fork"].make(True)
        said = {"ours": {"weights": "int8", "row_bytes": 8}}
        facts = {"n_trunk_tokens": 50, "n_distinct_tokens": 60}
        for n_prefilled, complaints in ((60, 0), (61, 1)):
            rounds = {"ours": [_round(1.0, n_prefilled_tokens=n_prefilled, facts=facts)]}
            found = workload_figures(Measured(work=work, rounds=rounds), "a fork", said)
            assert len(found["complaints"]) == complaints

    def test_distinct_heads(self):
        assert fewest_tokens([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7]]) == (2, 7)
        assert fewest_tokens([[1, 2]]) == (2, 2)

    @pytest.mark.parametrize(("ids", "n"), [([5, 9, 0, 0], 2), ([5, 6], 2), ([9], 1)])
    def test_padding_is_not_generated(self, ids, n):
        assert n_to_the_end(ids, frozenset({9, 0})) == n


class TestWork:
    @pytest.mark.parametrize("name", WORKLOADS)
    @pytest.mark.parametrize("is_small", [True, False])
    def test_it_goes_through_a_pipe(self, name, is_small):
        work = WORKLOADS[name].make(is_small)

        assert work.name == name
        assert Work.from_json(json.loads(json.dumps(work.to_json()))) == work

    def test_an_own_answer_stands_in_the_history(self):
        call = Call(turns=({"role": "assistant", "answer_of": 0},), max_tokens=1)
        answer = Answer(text="yes", n_prompt_tokens=1, n_generated_tokens=1)

        (message,) = asked(call, [answer]).messages
        assert (message["content"], message["answer"]) == ("yes", answer)

    def test_own_answers_come_from_calls_made_before(self):
        calls = WORKLOADS["agent"].make(False).calls
        for n, call in enumerate(calls):
            assert all(turn["answer_of"] < n for turn in call.turns if "answer_of" in turn)

    def test_the_planner_gives_up_only_what_it_asked_for(self):
        steps = WORKLOADS["planner"].make(False).steps
        seen: set[str | None] = set()
        for step in steps:
            seen |= {call.branch for call in step.calls}
            assert set(step.released) <= seen
        assert sum(len(step.released) for step in steps) > 0

    def test_a_branch_is_given_up_after_its_last_descendant(self):
        def call(n: int, thought: str) -> dict:
            said = [{"role": "user", "content": thought}]
            settings = {"max_tokens": 1}
            return {"n_call": n, "n_round": n, "thought": thought, "parent": None,
                    "messages": said, "settings": settings}  # fmt: skip

        calls = {
            "runs": [{"calls": [call(0, "a"), call(1, "a > b"), call(1, "a > b"), call(2, "c")]}]
        }
        thoughts = [{"id": "a", "parent": None}, {"id": "a > b", "parent": "a"}]
        releases = {"releases": [{"thought": "a"}]}
        steps = steps_of(calls, {"runs": [{"thoughts": thoughts, "kv": releases}]})

        assert [step["released"] for step in steps] == [[], ["a"], []]
        assert [len(step["calls"]) for step in steps] == [1, 1, 1]


class TestTables:
    def test_written_and_written_again(self, document, tmp_path):
        path = tmp_path / "doc.md"
        begin, end = marks("figures")
        path.write_text(f"head\n{begin}\nstale text\n{end}\ntail\n", encoding="utf-8")
        tables.write(path, [document])
        once = path.read_text(encoding="utf-8")
        tables.write(path, [document])

        assert path.read_text(encoding="utf-8") == once
        assert once.startswith("head\n")
        assert once.endswith("\ntail\n")
        assert "stale text" not in once
        assert "Made by `sidequest bench fork` on 2026-01-02" in once
        assert "| chathf | 4.0 (3.0–16.0) | 3.00 |" in once
        assert "| 1/3 |" in once
        assert "llamacpp failed: RuntimeError: no." in once
        assert "vllm did not take part: not installed." in once

    def test_a_file_without_a_place_is_left_alone(self, document, tmp_path):
        path = tmp_path / "doc.md"
        path.write_text("text\n", encoding="utf-8")

        with pytest.raises(ConfigError, match="has no place for figures"):
            tables.write(path, [document])
        assert path.read_text(encoding="utf-8") == "text\n"

    def test_the_one_command_makes_them(self, document, tmp_path, capsys):
        run, doc = tmp_path / "run.json", tmp_path / "doc.md"
        run.write_text(json.dumps(document) + "\n", encoding="utf-8")
        doc.write_text("\n".join(marks("figures")), encoding="utf-8")

        assert cli.main(["bench", "--from", str(run), "--write", str(doc)]) == 0
        assert "| ours | 2.0 (1.0–4.0) | 1 |" in doc.read_text(encoding="utf-8")


def _worker(code: str, **given: float) -> Worker:
    return Worker("test", command=[sys.executable, "-c", code], **given)


class TestWorkers:
    def test_one_that_dies_says_its_last_words(self):
        worker = _worker("import sys; input(); sys.exit('out of luck')")

        with pytest.raises(WorkerDied, match="status 1; its last words: out of luck"):
            worker.ask(do="load")
        with pytest.raises(WorkerDied):
            worker.ask(do="run")
        worker.close()

    def test_one_that_is_killed(self):
        worker = _worker("import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)")

        with pytest.raises(WorkerDied, match="signal 9"):
            worker.ask(do="load")
        worker.close()

    def test_one_that_hangs_is_ended(self):
        worker = _worker("import time; input(); time.sleep(600)", patience_s=0.5)

        with pytest.raises(WorkerDied, match="no answer within"):
            worker.ask(do="run")

    def test_one_that_fails_goes_on(self):
        code = "print('{\"error\": \"ValueError: no\"}', flush=True); input(); input(); print('{}')"
        worker = _worker(code)

        with pytest.raises(WorkerError, match="ValueError: no"):
            worker.ask(do="run")
        assert worker.ask(do="run") == {}
        worker.close()

    def test_the_others_go_on(self):
        reply = {**_round(1.0, ("yes",)), "weights": "w", "row_bytes": 1, "packages": {}}
        good = f"import sys\nfor line in sys.stdin: print({json.dumps(reply)!r}, flush=True)"
        bad = f"input(); print({json.dumps(reply)!r}, flush=True); input(); input(); 1 / 0"
        codes = {
            "good": good,
            "bad": bad.replace("input(); input()", "input(); print('{}', flush=True); input()"),
        }
        call = Call(turns=({"role": "user", "content": "?"},), max_tokens=1)
        work = Work(name="one", steps=(Step(calls=(call,)),))
        with Field(list(codes), lambda name: _worker(codes[name]), lambda _: None) as field:
            field.load(SOURCE, 1)
            measured = field.measure(work, 2)

        assert list(measured.rounds) == ["good"]
        assert len(measured.rounds["good"]) == 2
        assert "ZeroDivisionError" in measured.failed["bad"]
        assert "ZeroDivisionError" in field.failed["bad"]
