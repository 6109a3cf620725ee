"""`sidequest trace` and `sidequest fit-importance`: from a tiny model to weights that are used."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sidequest_langchain import CacheConfig, SideQuestChatModel, cli
from sidequest_langchain.evaluation.learning import held_out_of
from sidequest_langchain.policy.importance import FEATURES, MLP
from sidequest_langchain.policy.traces import Cycle, Trace


def run(capsys, *words):
    status = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(scope="module")
def recorded(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "t.safetensors"
    words = [
        "--model",
        str(folder),
        "--tokens",
        "200",
        "--samples",
        "2",
        "--tasks",
        "needle,replay",
    ]
    assert cli.main(["trace", *words, "--out", str(path)]) == 0
    return words, path


class TestTrace:
    def test_it_holds_every_sample(self, recorded):
        trace = Trace.load(recorded[1])
        assert trace.samples == ("needle 0 0", "replay 0 0", "needle 0 1", "replay 0 1")
        assert trace.settings["tokens"] == 200
        assert sum(len(cycle.future) for cycle in trace.cycles) > 1000
        assert all(c.future.min() >= 0 and c.future.max() <= 1 for c in trace.cycles)

    def test_no_protected_row_is_in_it(self, recorded):
        kinds = np.concatenate([c.features for c in Trace.load(recorded[1]).cycles])
        for name in ("system", "question", "delimiter"):
            assert not kinds[:, FEATURES.index(f"token_{name}")].any()
        assert kinds[:, FEATURES.index("token_tool_result")].any()

    def test_samples_that_are_there_are_not_run_again(self, capsys, recorded, tmp_path):
        words, path = recorded
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        status, out, err = run(capsys, "trace", *words, "--out", copy)
        assert status == 0
        assert "needle 0 0 of" not in err
        assert copy.read_bytes() == path.read_bytes()
        assert "holds 4 samples" in out

    def test_other_settings_are_refused(self, capsys, recorded):
        words, path = recorded
        status, _, err = run(capsys, "trace", *words, "--out", path, "--horizon", 9)
        assert status == 2
        assert "other settings" in err


class TestFit:
    def test_it_ends_with_figures_and_writes_weights_that_run(
        self, capsys, recorded, folder, tmp_path
    ):
        out = tmp_path / "w.safetensors"
        status, said, _ = run(capsys, "fit-importance", recorded[1], "--out", out)
        assert status == 0
        assert "recall of future attention, 2 samples held out" in said
        document = json.loads(said.splitlines()[-1])
        assert document["schema"] == "sidequest.importance/1"
        assert set(document["gain"]) == {"average", "window"}
        assert not set(document["held_out"]) & set(document["learned_from"])
        for found in document["recall"].values():
            assert {"predicted", "average", "last", "window", "accumulated", "best"} <= set(found)
            assert max(found.values()) == found["best"] <= 1
        assert out.stat().st_size < 8000
        config = CacheConfig(policy="staged", budget_tokens=300, predictor=out)
        model = SideQuestChatModel(model=str(folder), cache_config=config)
        assert model.invoke("hello " * 40, max_tokens=8).text is not None
        model.engine.close()

    def test_the_same_seed_gives_the_same_weights(self, capsys, recorded, tmp_path):
        for name in ("a", "b"):
            run(capsys, "fit-importance", recorded[1], "--out", tmp_path / name, "--seed", 3)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert MLP.load(tmp_path / "a").n_bytes < 6000

    def test_another_trace_can_be_the_judge(self, capsys, recorded, folder, tmp_path):
        other = tmp_path / "other"
        words = ["--tokens", 200, "--samples", 1, "--tasks", "keys", "--out", other]
        run(capsys, "trace", "--model", folder, *words)
        status, said, _ = run(capsys, "fit-importance", recorded[1], "--judge", other)
        document = json.loads(said.splitlines()[-1])
        assert (status, document["held_out"]) == (0, ["keys 0 0"])
        assert len(document["learned_from"]) == 4
        assert document["is_better"] is False  # one sample shows nothing

    def test_what_it_learned_from_may_not_judge(self, capsys, recorded):
        status, _, err = run(capsys, "fit-importance", recorded[1], "--judge", recorded[1])
        assert status == 2
        assert "is in both" in err

    def test_traces_of_two_models_are_refused(self, capsys, recorded, tmp_path):
        Trace(settings={"model": "other"}).save(tmp_path / "other")
        status, _, err = run(capsys, "fit-importance", recorded[1], tmp_path / "other")
        assert status == 2
        assert "fit one at a time" in err

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["nothing"], "cannot be read"),
            (["empty"], "0 samples cannot be split"),
            (["rowless"], "hold no rows"),
            (["empty", "--held-out", "2"], "--held-out is a share between 0 and 1"),
        ],
    )
    def test_a_mistake_is_one_line(self, capsys, tmp_path, words, said):
        Trace(settings={}).save(tmp_path / "empty")
        none = np.zeros((0, len(FEATURES)), np.float32), np.zeros(0, np.float32)
        rowless = tuple(Cycle(f"needle 0 {i}", *none) for i in range(3))
        Trace(settings={}, cycles=rowless).save(tmp_path / "rowless")
        status, out, err = run(capsys, "fit-importance", tmp_path / words[0], *words[1:])
        assert (status, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "nope"], "no task is called 'nope'"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--horizon", "1"], "--horizon must be at least 2"),
    ],
)
def test_a_mistake_of_trace_is_one_line(capsys, words, said):
    status, out, err = run(capsys, "trace", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("trace", "sidequest fit-importance trace.safetensors"),
        ("fit-importance", "sidequest trace --samples 6"),
    ],
)
def test_help_teaches_and_fits(capsys, command, example):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert example in out
    assert max(map(len, out.splitlines())) <= 100


def test_samples_are_held_out_as_a_whole_and_of_every_task():
    names = [f"{task} 0 {i}" for task in ("needle", "keys") for i in range(6)]
    held_out = held_out_of(names, 0.34, seed=0)
    assert sorted(name.split()[0] for name in held_out) == ["keys"] * 2 + ["needle"] * 2
    assert held_out_of(names, 0.34, seed=0) == held_out != held_out_of(names, 0.34, seed=1)
    assert held_out_of(["needle 0 0"], 0.34, seed=0) == []
