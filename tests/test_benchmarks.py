"""The benchmarks run, on a small model and little work, and end with one JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine_steps, planner_vs_chathf

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("real_smollm")]


def _last_line(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_engine_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "smollm2-135m",
        "--trunk-tokens",
        "40",
        "--new-tokens",
        "2",
        "--rounds",
        "1",
    ]
    assert engine_steps.main(words) == 0
    document = _last_line(capsys.readouterr().out)
    assert set(document["siblings"]) == {"1", "2", "4", "8", "16"}
    assert document["step_ratio_8_to_1"] > 0
    assert document["parallel"]["speedup"] > 0
    assert document["parallel"]["same_answers"]
    assert document["machine"]["cores"] >= 1


def test_planner_vs_chathf_answers_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk = [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": "Which city is the capital of Spain?"},
    ]
    more = [
        *trunk,
        {"role": "assistant", "content": "Madrid"},
        {"role": "user", "content": "And of Portugal?"},
    ]
    calls = [
        {
            "n_call": i,
            "n_round": i,
            "messages": messages,
            "reply": {"text": ""},
            "settings": {"max_tokens": 6},
        }
        for i, messages in enumerate((trunk, more))
    ]
    record = tmp_path / "calls.json"
    record.write_text(json.dumps({"runs": [{"calls": calls}]}), encoding="utf-8")
    words = ["--model", "smollm2-135m", "--record", str(record)]
    assert planner_vs_chathf.main(words) == 0
    document = _last_line(capsys.readouterr().out)
    assert document["calls"] == 2
    assert document["same_answers"] == 2
    assert document["ratio"] > 0
