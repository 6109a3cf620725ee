"""The log of results: rows survive a cut, other settings are refused."""

from __future__ import annotations

import json

import pytest

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation.log import ResultLog

SETTINGS = {"schema": "s", "model": "m"}


def test_rows_are_there_again(tmp_path):
    first = ResultLog(tmp_path / "log", SETTINGS)
    first.add("a", {"score": 1})
    first.add("b", {"score": 0})

    again = ResultLog(tmp_path / "log", SETTINGS)
    assert again.get("a") == {"key": "a", "score": 1}
    assert [row["key"] for row in again] == ["a", "b"]
    assert again.get("c") is None


def test_a_line_cut_short_is_measured_again(tmp_path):
    path = tmp_path / "log"
    log = ResultLog(path, SETTINGS)
    log.add("a", {})
    log.add("b", {})
    path.write_text(path.read_text(encoding="utf-8")[:-5], encoding="utf-8")

    again = ResultLog(path, SETTINGS)
    assert again.get("b") is None
    again.add("b", {})
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [SETTINGS, {"key": "a"}, {"key": "b"}]


def test_other_settings_are_refused(tmp_path):
    ResultLog(tmp_path / "log", SETTINGS).add("a", {})

    with pytest.raises(ConfigError, match="other settings"):
        ResultLog(tmp_path / "log", {**SETTINGS, "model": "n"})


@pytest.mark.parametrize(
    "text", ["hello\n", '{"key": "a"}\n{"key": "b"}\n', '{}\n[]\n{"key": "a"}\n']
)
def test_another_file_is_refused_and_kept(tmp_path, text):
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="no log of `sidequest eval`"):
        ResultLog(path, SETTINGS)
    assert path.read_text(encoding="utf-8") == text


def test_without_a_file_rows_are_kept_in_memory():
    log = ResultLog(None, SETTINGS)
    log.add("a", {"score": 1})

    assert log.get("a") == {"key": "a", "score": 1}
