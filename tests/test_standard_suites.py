"""The benchmark that runs LangChain's suites over us and our peers: processes and counts."""

from __future__ import annotations

import json

import pytest

from benchmarks import standard_suites
from benchmarks.contestant import Source
from benchmarks.standard_suites import CASES, CONTESTANTS, Outcomes, SuiteError, events_of, run

CASES_OF_EVERY_KIND = """
import os, time, pytest

class TestUnit:
    def test_a_passes(self): pass
    def test_b_fails(self): assert 1 == 2
    def test_c_is_skipped(self): pytest.skip("no sound")
    def test_d_kills_its_process(self): os.kill(os.getpid(), 9)
    def test_e_comes_after(self): assert os.environ["SUITE_CONTESTANT"] == "x"

class TestIntegration:
    @pytest.fixture
    def broken(self): raise OSError("no weights")
    @pytest.fixture
    def leaves(self):
        yield
        assert not "a mess"
    async def test_f_is_async(self): pass
    def test_g_has_no_fixture(self, broken): pass
    def test_h_leaves_a_mess(self, leaves): pass
    def test_i_hangs(self): time.sleep(60)
    def test_j_is_last(self): pass
"""


def test_every_test_is_counted_once_whatever_happens_to_its_process(tmp_path):
    cases = tmp_path / "suite_cases.py"
    cases.write_text(CASES_OF_EVERY_KIND, encoding="utf-8")
    outcomes = run({"SUITE_CONTESTANT": "x"}, cases=cases, patience_s=3.0)
    found = {
        test.rsplit("_", 1)[0].split("::")[-1][5]: what for test, what in outcomes.by_test.items()
    }
    assert found == {
        "a": "passed",
        "b": "failed",
        "c": "skipped",
        "d": "crashed",
        "e": "passed",
        "f": "passed",
        "g": "failed",
        "h": "failed",
        "i": "crashed",
        "j": "passed",
    }
    assert outcomes.counts() == {"passed": 4, "failed": 3, "skipped": 1, "crashed": 2}
    assert outcomes.counts("unit") == {"passed": 2, "failed": 1, "skipped": 1, "crashed": 1}
    why = {test.split("::")[-1][5]: said for test, said in outcomes.why.items()}
    assert why["b"] == "assert 1 == 2"
    assert "no sound" in why["c"]
    assert "no weights" in why["g"]


def test_a_file_that_cannot_be_read_is_an_error_with_its_words(tmp_path):
    cases = tmp_path / "suite_cases.py"
    cases.write_text("import no_such_module", encoding="utf-8")
    with pytest.raises(SuiteError, match="no test was found"):
        run({}, cases=cases)


def test_a_log_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    log = tmp_path / "log"
    log.write_text('{"event": "found", "tests": ["t"]}\n{"event": "beg', encoding="utf-8")
    assert events_of(log) == [{"event": "found", "tests": ["t"]}]
    assert events_of(tmp_path / "none") == []


def test_the_table_and_the_document_hold_the_counts(monkeypatch, capsys):
    ours = Outcomes(by_test={"f::TestUnit::a": "passed", "f::TestIntegration::b": "skipped"})
    peer = Outcomes(
        by_test={"f::TestUnit::a": "failed", "f::TestIntegration::b": "crashed"},
        why={"f::TestUnit::a": "no", "f::TestIntegration::b": "died"},
    )
    made = {"ours": ours, "chathf": peer}
    monkeypatch.setattr(
        standard_suites, "source_of", lambda _: Source(name="m", folder="/", gguf=None)
    )
    absent = {"llamacpp": "no file"}
    monkeypatch.setattr(standard_suites, "why_absent", lambda name, _: absent.get(name))
    monkeypatch.setattr(standard_suites, "run", lambda told, **_: made[told["SUITE_CONTESTANT"]])
    assert standard_suites.main(["--failures"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| SideQuestChatModel | both | 1 | 0 | 1 | 0 |" in lines
    assert "| ChatHuggingFace | unit | 0 | 1 | 0 | 0 |" in lines
    assert "chathf crashed TestIntegration::b: died" in lines
    found = json.loads(lines[-1])
    assert found["contestants"]["chathf"]["counts"]["both"] == {
        "passed": 0,
        "failed": 1,
        "skipped": 0,
        "crashed": 1,
    }
    assert found["contestants"]["chathf"]["not_passed"]["TestUnit::a"]["why"] == "no"
    assert found["absent"] == absent
    made["ours"] = peer
    assert standard_suites.main([]) == 1


def test_the_suites_of_ours_are_found_whole(monkeypatch):
    """The very tests of LangChain, none left out: a test of theirs sees to it."""
    source = json.dumps({"name": "smollm2-135m", "folder": "/", "gguf": None})
    told = {"SUITE_CONTESTANT": "ours", "SUITE_SOURCE": source}
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k no_overrides")
    outcomes = run(told, cases=CASES)
    assert set(outcomes.by_test.values()) == {"passed"}
    assert outcomes.counts("unit")["passed"] == outcomes.counts("integration")["passed"] == 1
    assert list(CONTESTANTS) == ["ours", "chathf", "llamacpp"]


def test_a_page_is_made_from_earlier_runs(tmp_path, capsys):
    ours = Outcomes(by_test={"f::TestUnit::a": "passed", "f::TestIntegration::b": "skipped"})
    peer = Outcomes(by_test={"f::TestUnit::a": "failed"})
    runs = [
        standard_suites.document("m", {"ours": peer}, {}),
        standard_suites.document("m", {"llamacpp": peer}, {}),
        standard_suites.document("m", {"ours": ours}, {}),
    ]
    log, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    log.write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    page.write_text("a\n<!-- suites: begin -->\nold\n<!-- suites: end -->\nz\n", encoding="utf-8")

    assert standard_suites.main(["--from", str(log), "--docs", str(page)]) == 0

    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("z\n")
    # The newest run of each; ours first.
    assert "| SideQuestChatModel | unit | 1 | 0 | 0 | 0 |" in text
    assert "| ChatLlamaCpp | both | 0 | 1 | 0 | 0 |" in text
    assert text.index("SideQuestChatModel") < text.index("ChatLlamaCpp")
    assert text.count("SideQuestChatModel | unit") == 1
    assert "| SideQuestChatModel | both | 1 | 0 | 1 | 0 |" in capsys.readouterr().out
