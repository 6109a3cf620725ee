"""Runs on a real engine over random weights: what is freed, what is measured, what is reported."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from sidequest_langchain import SideQuestChatModel, branch
from sidequest_langchain.examples.tree_of_thoughts import graph as graph_module
from sidequest_langchain.examples.tree_of_thoughts.agreement import Agreement, agreement
from sidequest_langchain.examples.tree_of_thoughts.asking import Asker, Question
from sidequest_langchain.examples.tree_of_thoughts.console import Silent
from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.planner import (
    Run,
    run_chain_of_thought,
    run_planner,
)
from sidequest_langchain.examples.tree_of_thoughts.replay import replay_without_release
from sidequest_langchain.examples.tree_of_thoughts.search import MODES, Limits
from sidequest_langchain.examples.tree_of_thoughts.solver import solve
from sidequest_langchain.examples.tree_of_thoughts.thought import ROOT, Thought, thought_id
from tests.examples.scripted import ScriptedModel, tiny_chat

PROBLEM = generate(4, 2)


@pytest.fixture(scope="module")
def model() -> Iterator[SideQuestChatModel]:
    chat = tiny_chat()
    yield chat
    chat.engine.close()


@pytest.fixture(autouse=True)
def babble_names_cities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights name no city: let their babble stand for one."""

    def read(reply: str, options: Sequence[str]) -> str:
        return options[zlib.crc32(reply.encode()) % len(options)]

    monkeypatch.setattr(graph_module, "read_city", read)


class Noting(Silent):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.trees: list[tuple[dict[str, Thought], dict[str, int]]] = []

    def tree(self, nodes, resident) -> None:
        self.trees.append((dict(nodes), dict(resident)))


def run(model: SideQuestChatModel, mode: str, **limits: int) -> tuple[Run, Noting]:
    watcher = Noting()
    made = run_planner(model, PROBLEM, Limits(mode=mode, max_calls=40, **limits), watcher)  # type: ignore[arg-type]
    return made, watcher


@pytest.mark.parametrize("mode", MODES)
def test_a_run_frees_what_it_gives_up_and_leaves_nothing_behind(
    mode: str, model: SideQuestChatModel
) -> None:
    made, watcher = run(model, mode)
    assert made.releases
    assert made.kept is not None
    assert 0 < (made.peak_bytes or 0) < made.kept.peak_bytes
    assert model.kv.usage().n_bytes == 0
    model.kv.check_integrity()
    nodes, resident = watcher.trees[-1]
    for thought in nodes.values():
        if thought.status in ("dead", "pruned"):
            assert resident.get(thought.id, 0) == 0, thought
    assert resident[ROOT] > sum(n for id, n in resident.items() if id != ROOT)
    reasons = {release.reason for release in made.releases}
    assert reasons == ({"prune"} if mode == "beam" else {"prune", "backtrack"})


def test_the_trunk_is_prefilled_once(model: SideQuestChatModel) -> None:
    made, _ = run(model, "beam")
    trunk = next(r for r in made.records if r.kind == "read")
    others = [r for r in made.records if r.kind != "read"]
    assert trunk.n_reused_tokens == 0
    assert all(r.n_reused_tokens >= trunk.n_prompt_tokens for r in others)
    for record in made.records:
        assert record.n_reused_tokens + record.n_prefilled_tokens == record.n_prompt_tokens


def test_a_replay_stores_the_very_tokens_of_the_run(model: SideQuestChatModel) -> None:
    """With nothing pruned and no reply cut, the run and its replay hold the same bytes."""
    asker = Asker(model)
    trunk = [HumanMessage("Plan a trip to Rome, Oslo and Paris.")]
    config = {"configurable": {"thread_id": "t"}}
    for n_round, name in enumerate(["a", "b", "c"]):
        with branch(name):
            question = Question(
                kind="propose",
                thought=name,
                parent=None,
                prompts=[[*trunk, HumanMessage(f"branch {name}")]],
                settings={"max_tokens": 1 if n_round == 2 else 400, "temperature": 0.0},
            )
            asker.ask(question, {**config, "metadata": {"thread_id": "t"}})
    finished = [r for r in asker.records if not r.is_cut or r.settings["max_tokens"] == 1]
    assert len(finished) == len(asker.records), "these prompts end by themselves"
    held = model.kv.usage().n_bytes
    model.kv.clear()
    assert replay_without_release(model, asker.records).final_bytes == held
    assert model.kv.usage().n_bytes == 0


def test_any_chat_model_will_do_and_then_nothing_is_measured() -> None:
    scripted = ScriptedModel(choose=lambda route, options: list(options))
    made = run_planner(scripted, PROBLEM, Limits(mode="dfs"), Silent())
    assert made.is_solved
    assert (made.peak_bytes, made.kept, made.releases) == (None, None, ())


def test_the_baseline_is_judged_by_the_same_checker() -> None:
    right = ScriptedModel(plan=f"Hm.\nPlan: {', '.join(PROBLEM.golden_route)}")
    made = run_chain_of_thought(right, PROBLEM, Silent())
    assert (made.is_solved, made.n_calls, made.method) == (True, 1, "cot")
    wrong = run_chain_of_thought(ScriptedModel(plan="Plan: none"), PROBLEM, Silent())
    assert not wrong.is_solved
    assert {v.fault for v in wrong.violations} == {"missing_city"}


def test_an_error_of_the_model_leaves_the_cache_clean(
    model: SideQuestChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        msg = "the weather"
        raise RuntimeError(msg)

    monkeypatch.setattr(graph_module, "score_of", fail)
    with pytest.raises(RuntimeError, match="the weather"):
        run(model, "beam")
    assert model.kv.usage().n_bytes == 0


def test_agreement_counts_choices_against_the_solver() -> None:
    problem = generate(5, 1)
    solution = solve(problem)
    good = solution.routes[0][0]
    bad = next(c for c in problem.cities if not solution.completes((c,)))

    def opening(city: str, score: float, **more: object) -> Thought:
        given = {"options": problem.cities, "score": score, "status": "live", **more}
        return Thought(id=city, parent=ROOT, route=(city,), day=1, **given)  # type: ignore[arg-type]

    found = agreement([opening(good, 0.9, n_votes=2), opening(bad, 0.1)], solution)
    n_good = sum(solution.completes((c,)) for c in problem.cities)
    assert found == Agreement(
        n_proposals=3,
        n_right=2,
        n_right_by_chance=pytest.approx(3 * n_good / 5),
        n_pairs=1,
        n_pairs_right=1.0,
    )
    wrong_way = agreement([opening(good, 0.1), opening(bad, 0.9)], solution)
    assert (wrong_way.n_pairs, wrong_way.n_pairs_right) == (1, 0)
    assert agreement([opening(bad, 0.5, is_fallback=True)], solution) == Agreement(n_fallbacks=1)
    assert thought_id((good,)) == good


@pytest.mark.real
@pytest.mark.slow
def test_a_real_model_plans_and_gives_memory_back(real_smollm) -> None:
    chat = SideQuestChatModel.from_model(real_smollm.model, real_smollm.tokenizer)
    try:
        limits = Limits(mode="dfs", n_samples=2, max_calls=40)
        made = run_planner(chat, generate(3, 0), limits, Silent())
        assert made.outcome in ("solved", "every thought was a dead end") or made.n_calls >= 40
        assert made.releases
        assert made.kept is not None
        assert (made.peak_bytes or 0) <= made.kept.peak_bytes
        assert made.n_tokens("reused") > 5 * made.n_tokens("prefilled")
        assert all(isinstance(r.reply, AIMessage) for r in made.records)
        chat.kv.check_integrity()
        assert chat.kv.usage().n_bytes == 0
    finally:
        chat.engine.close()
