"""The runner: every arm runs every sample once, over an engine that goes afterwards."""

from __future__ import annotations

import gc

import pytest

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.registry import live_engines
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation import runner
from sidequest_langchain.evaluation.agents import AGENTS
from sidequest_langchain.evaluation.arms import POLICIES, Arm, arms_of, settings_of
from sidequest_langchain.evaluation.conversing import Outcome
from sidequest_langchain.evaluation.log import ResultLog
from sidequest_langchain.evaluation.runner import Plan, Runner, scores_of
from sidequest_langchain.evaluation.sample import Task
from sidequest_langchain.evaluation.texts import TEXTS
from sidequest_langchain.policy.registry import policy_names

TASKS = {task.name: task for task in (*TEXTS, *AGENTS)}
FULL, LIKE = Arm(policy="none"), Arm(policy="like", budget=0.5)


def plan_of(*names: str, n_samples: int = 1) -> Plan:
    tasks = tuple(TASKS[name] for name in names)
    return Plan(tasks=tasks, arms=(FULL, LIKE), n_samples=n_samples, n_tokens=200, seed=0)


@pytest.fixture
def budgets(monkeypatch) -> list[int]:
    """The managed arm has another way to the same answers; notes what the full cache held."""
    seen: list[int] = []

    def settings(arm: Arm, full_bytes: int, **_: str) -> CacheConfig:
        if arm.is_full:
            return CacheConfig()
        seen.append(full_bytes)
        return CacheConfig(prefill_chunk=50)

    monkeypatch.setattr(runner, "settings_of", settings)
    return seen


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def runs(folder, said) -> Runner:
    return Runner(str(folder), ResultLog(None, {}), said.append)


def rows_of(runs: Runner) -> dict[str, dict]:
    return {row["key"]: row for row in runs._log}


class TestRunning:
    def test_an_exact_cache_scores_and_diverges_as_the_full_one(self, runs, budgets):
        runs.run(plan_of("keys", "replay"), {})

        rows = rows_of(runs)
        assert list(rows) == [
            "keys 0 none", "keys 0 like at 0.5", "replay 0 none", "replay 0 like at 0.5"
        ]  # fmt: skip
        full, like = rows["keys 0 none"], rows["keys 0 like at 0.5"]
        assert full["error"] is like["error"] is None
        assert full["answers"] == like["answers"]
        assert len(scores_of(full)) == 3
        found = rows["replay 0 like at 0.5"]["divergence"]
        assert found["n_tokens"] > 10
        assert found["kl"] < 1e-5
        assert found["top1"] == 1.0

    def test_the_budget_is_a_share_of_what_the_full_cache_held(self, runs, budgets):
        runs.run(plan_of("keys", "replay"), {})

        rows = rows_of(runs)
        assert budgets == [rows["keys 0 none"]["n_bytes"], rows["replay 0 none"]["n_bytes"]]
        assert min(budgets) > 0

    def test_nothing_is_run_twice(self, runs, budgets, said):
        runs.run(plan_of("keys"), {})
        before = len(said)
        runs.run(plan_of("keys"), {})
        assert len(said) == before

        runs.run(plan_of("keys", n_samples=2), {})
        assert len(said) == before + 2

    def test_a_record_is_made_again_if_a_cut_lost_it(self, folder, budgets, said):
        log = ResultLog(None, {})
        Runner(str(folder), log, said.append).run(plan_of("replay"), {})
        whole = log.get("replay 0 like at 0.5")
        del log._rows["replay 0 like at 0.5"]
        Runner(str(folder), log, said.append).run(plan_of("replay"), {})

        again = log.get("replay 0 like at 0.5")
        assert whole
        assert again
        assert again["divergence"] == whole["divergence"]

    def test_all_arms_run_a_sample_before_the_next(self, runs, budgets, said):
        runs.run(plan_of("needle", "keys", n_samples=2), {})

        numbers = [line.split()[2] for line in said]
        assert numbers == ["0"] * 4 + ["1"] * 4

    def test_engines_go(self, runs, budgets):
        gc.collect()
        before = len(live_engines())
        runs.run(plan_of("keys"), {})
        gc.collect()

        assert len(live_engines()) == before

    def test_an_application_is_run_with_its_seed(self, runs, budgets):
        seen, engines = [], []

        def solve(model, seed):
            seen.append((model.cache_config.prefill_chunk, seed))
            engines.append(model.engine)
            return Outcome(scores=(1.0,), n_bytes=100)

        task = Task(name="app", about="")
        plan = Plan(tasks=(task,), arms=(FULL, LIKE), n_samples=2, n_tokens=200, seed=5)
        runs.run(plan, {"app": solve})

        assert seen == [(None, 5), (50, 5), (None, 6), (50, 6)]
        assert budgets == [100, 100]
        assert all(engine.is_closed for engine in engines)


class TestFailures:
    def test_a_policy_that_fails_scores_nothing_and_the_run_goes_on(self, runs, monkeypatch):
        def settings(arm, full_bytes, **_):
            if not arm.is_full:
                msg = "no such\npolicy"
                raise ConfigError(msg)
            return CacheConfig()

        monkeypatch.setattr(runner, "settings_of", settings)
        runs.run(plan_of("keys", "needle"), {})

        rows = rows_of(runs)
        assert len(rows) == 4
        failed = rows["keys 0 like at 0.5"]
        assert failed["error"] == "ConfigError: no such policy"
        assert scores_of(failed) == [0.0, 0.0, 0.0]

    def test_without_the_full_caches_result_there_is_no_budget(self, runs, monkeypatch):
        def settings(arm, full_bytes, **_):
            msg = "out of luck"
            raise ConfigError(msg)

        monkeypatch.setattr(runner, "settings_of", settings)
        runs.run(plan_of("keys"), {})

        assert "no budget follows" in rows_of(runs)["keys 0 like at 0.5"]["error"]


class TestArms:
    def test_the_full_cache_is_first_and_once(self):
        arms = arms_of(["lru", "none", "lru"], [0.5, 0.2])

        assert arms[0].is_full
        assert [str(arm) for arm in arms] == ["none", "lru at 0.5", "lru at 0.2"]

    def test_the_full_cache_has_no_budget(self):
        assert settings_of(Arm(policy="none"), 10**6) == CacheConfig()

    def test_a_preset_is_an_arm_too(self):
        [_, arm] = arms_of(["aggressive"], [0.5])
        expected = CacheConfig.preset("aggressive", budget_bytes=500)
        assert settings_of(arm, 1000) == expected
        assert expected != CacheConfig(policy="staged", budget_bytes=500)

    def test_a_budget_is_in_bytes(self):
        settings = settings_of(Arm(policy="lru", budget=0.35), 1000)

        assert settings.budget_bytes == 350
        assert settings.policy == "lru"

    def test_the_policies_that_run_by_default_are_there(self):
        assert set(POLICIES) <= set(policy_names())
        assert len(arms_of(POLICIES, [0.5])) == len(POLICIES)
