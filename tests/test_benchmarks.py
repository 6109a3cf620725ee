"""The benchmarks run, on a small model and little work, and end with one JSON document."""

from __future__ import annotations

import json

import pytest

from benchmarks import engine_steps, int8_weights, managed_cost, start, step_cost
from benchmarks.command import main

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("real_smollm")]


def _last_line(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_engine_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "smollm2-135m", "--trunk-tokens", "40", "--new-tokens", "2"]
    assert engine_steps.main([*words, "--rounds", "1"]) == 0
    document = _last_line(capsys.readouterr().out)
    assert set(document["siblings"]) == {"1", "2", "4", "8", "16"}
    assert document["step_ratio_8_to_1"] > 0
    assert document["parallel"]["speedup"] > 0
    assert document["parallel"]["same_answers"]
    assert document["machine"]["cores"] >= 1


def test_step_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "smollm2-135m", "--rows", "64", "--idle-nodes", "20", "--new-tokens", "2"]
    assert step_cost.main([*words, "--rounds", "1"]) == 0
    document = _last_line(capsys.readouterr().out)
    assert set(document["rows"]) == {"16", "64", "128", "256"}
    assert document["segments_ratio"] > 0
    assert document["idle_nodes_ratio"] > 0


def test_managed_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "smollm2-135m", "--budget", "200", "--path", "300", "--seen", "300", "500"]
    more = ["--steps", "24", "--new-tokens", "2", "--rounds", "1"]
    assert managed_cost.main([*words, *more]) in {0, 1}  # so few steps say nothing of costs
    document = _last_line(capsys.readouterr().out)
    ways = document["watching"]
    assert set(ways) == {"nothing managed", "watched", "managed"}
    assert all(0 < w["least"] <= w["ratio"] <= w["most"] for w in ways.values())
    assert ways["managed"]["acts"] > 0
    assert set(document["curve"]["managed"]) == set(document["curve"]["plain"]) == {"300", "500"}


def test_int8_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "smollm2-135m", "--tokens", "260", "--rounds", "1"]
    assert int8_weights.main(words) == 0
    document = _last_line(capsys.readouterr().out)
    kl = [document["slices"][n]["kl"] for n in "123"]
    assert 0 < kl[2] < 0.02 < kl[0]
    apart = [document["slices"][n]["apart_max"] for n in "123"]
    assert apart[2] < 0.1 * apart[1]
    assert apart[2] < 30 * document["dense"]["apart_max"]


def test_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--model", "smollm2-135m", "--rounds", "1"]) == 0
    document = _last_line(capsys.readouterr().out)
    assert set(document["first_token_s"]) == {"auto", "none"}
    assert all(found["median"] > 0 for found in document["first_token_s"].values())


def test_a_smoke_run(capsys: pytest.CaptureFixture[str]) -> None:
    contestants = "ours,ours-fp32,generate,chathf"
    assert main(["planner", "agent", "fork", "--quick", "--contestants", contestants]) == 0

    said = capsys.readouterr()
    document = _last_line(said.out)
    assert max(map(len, said.out.splitlines()[:-1])) <= 80
    assert "Traceback" not in said.err
    assert set(document["contestants"]) == set(contestants.split(","))
    for workload in document["workloads"].values():
        assert workload["failed"] == {}
        assert set(workload["results"]) == set(contestants.split(","))
        for other in workload["comparisons"]:
            if other["same_weights"]:
                assert other["n_same_answers"] == workload["n_calls"], other
    fork = document["workloads"]["fork"]["results"]["ours-fp32"]
    assert fork["n_prefilled_tokens"] == fork["facts"]["n_distinct_tokens"]
    planner = document["workloads"]["planner"]["results"]
    assert planner["ours"]["n_prefilled_tokens"] < planner["chathf"]["n_prefilled_tokens"]
