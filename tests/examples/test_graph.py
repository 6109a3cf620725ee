"""The graph in both modes, driven by a scripted model: what is asked, and what is given up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from sidequest_langchain.examples.tree_of_thoughts import graph as graph_module
from sidequest_langchain.examples.tree_of_thoughts.asking import Asker
from sidequest_langchain.examples.tree_of_thoughts.checker import check_plan
from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.graph import build_graph
from sidequest_langchain.examples.tree_of_thoughts.problem import TripProblem
from sidequest_langchain.examples.tree_of_thoughts.search import MODES, Limits
from sidequest_langchain.examples.tree_of_thoughts.solver import solve
from sidequest_langchain.examples.tree_of_thoughts.thought import ROOT, lineage
from tests.examples.scripted import Choose, ScriptedModel, first_option, overlap

PROBLEM = generate(5, 1)


def all_options(route: tuple[str, ...], options: Sequence[str]) -> Sequence[str]:
    return options


def following(route_wanted: tuple[str, ...]) -> Choose:
    def choose(route: tuple[str, ...], options: Sequence[str]) -> Sequence[str]:
        wanted = route_wanted[len(route)] if len(route) < len(route_wanted) else None
        return [wanted] if wanted in options else options[:1]

    return choose


def plan(
    model: ScriptedModel, mode: str, problem: TripProblem = PROBLEM, **limits: Any
) -> tuple[dict[str, Any], Asker]:
    asker = Asker(model)
    app = build_graph(asker, Limits(mode=mode, **limits))  # type: ignore[arg-type]
    state = app.invoke({"problem": problem}, {"recursion_limit": 1000})
    return state, asker


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_knows_the_way_is_followed(mode: str) -> None:
    state, asker = plan(ScriptedModel(choose=following(PROBLEM.golden_route)), mode)
    assert state["outcome"] == "solved"
    assert state["nodes"][state["best"]].route == PROBLEM.golden_route
    assert {t.status for t in state["nodes"].values()} == {"live", "done"}
    assert [r.kind for r in asker.records].count("read") == 1


@pytest.mark.parametrize("seed", range(8))
def test_depth_first_finds_a_plan_whatever_the_model_says(seed: int) -> None:
    problem = generate(4, seed)
    model = ScriptedModel(choose=first_option, overlap=lambda days, date: 0.5)
    state, _ = plan(model, "dfs", problem, max_calls=1000)
    assert state["outcome"] == "solved"
    best = state["nodes"][state["best"]]
    assert check_plan(problem, problem.visits(best.route)) == ()


def test_a_wide_beam_with_every_proposal_finds_a_plan() -> None:
    model = ScriptedModel(choose=all_options)
    state, _ = plan(model, "beam", beam_width=30, n_samples=8)
    assert state["outcome"] == "solved"


def test_the_scores_steer() -> None:
    """With a model that judges dates rightly fewer thoughts are opened than with one that
    judges them the other way round."""
    opened = []
    for is_right in (True, False):

        def says(days: Sequence[int], date: Sequence[int], is_right: bool = is_right) -> float:
            return 0.9 if bool(set(days) & set(date)) == is_right else 0.1

        model = ScriptedModel(choose=all_options, overlap=says)
        problem = generate(6, 2)
        state, _ = plan(model, "dfs", problem, n_samples=8, max_calls=2000)
        assert state["outcome"] == "solved"
        opened.append(sum(t.status == "dead" for t in state["nodes"].values()))
    assert opened[0] < opened[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_child_s_prompt_is_its_parent_s_prompt_reply_and_one_turn(mode: str) -> None:
    state, asker = plan(ScriptedModel(choose=all_options), mode, n_samples=8)
    nodes = state["nodes"]
    for thought in nodes.values():
        if thought.parent is None:
            continue
        above = nodes[thought.parent]
        n = len(above.messages)
        assert all(a is b for a, b in zip(above.messages, thought.messages[:n], strict=True))
        turn, reply = thought.messages[n:]
        assert (turn.type, reply.type) == ("human", "ai")
        assert any(record.reply is reply for record in asker.records)
    for record in asker.records:
        if record.kind in ("propose", "evaluate"):
            known = nodes[record.thought].messages
            assert record.messages[:-1] == known
            assert len(str(record.messages[-1].content)) < 200


@pytest.mark.parametrize("mode", MODES)
def test_the_same_model_gives_the_same_tree(mode: str) -> None:
    trees = []
    for _ in range(2):
        state, _ = plan(ScriptedModel(choose=all_options), mode, n_samples=8)
        trees.append({i: (t.status, t.score, t.reason) for i, t in state["nodes"].items()})
    assert trees[0] == trees[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_route_is_one_flight_after_the_other_without_a_city_twice(mode: str) -> None:
    state, _ = plan(ScriptedModel(choose=all_options), mode, n_samples=8)
    for thought in state["nodes"].values():
        assert len(set(thought.route)) == len(thought.route)
        for a, b in pairwise(thought.route):
            assert PROBLEM.has_flight(a, b)


class Calls(list[tuple[Any, ...]]):
    """Notes the lifecycle helpers that the graph calls."""

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Calls:
        for name in ("prune", "keep_only", "backtrack"):
            real = getattr(graph_module, name)

            def noted(*args: Any, name: str = name, real: Any = real, **given: Any) -> Any:
                self.append((name, args, given))
                return real(*args, **given)

            monkeypatch.setattr(graph_module, name, noted)
        return self

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, given) for one, args, given in self if one == name]


def test_a_beam_keeps_the_best_and_gives_up_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls().watch(monkeypatch)
    model = ScriptedModel(choose=all_options)
    state, _ = plan(model, "beam", beam_width=2, n_samples=8)
    nodes = state["nodes"]
    assert calls.of("backtrack") == []
    assert calls.of("prune")[0][0] == ("probes",)
    kept_rounds = calls.of("keep_only")
    assert kept_rounds
    for kept, given in kept_rounds:
        assert 1 <= len(kept) <= 2
        assert {nodes[id].parent for id in kept} == set(given["under"])
    pruned = {id for args, _ in calls.of("prune")[1:] for id in args}
    assert all(nodes[id].status in ("dead", "pruned") for id in pruned)
    assert ROOT not in pruned
    assert {"pruned"} <= {t.status for t in nodes.values()}


def test_depth_first_backtracks_from_dead_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls().watch(monkeypatch)
    misled = ScriptedModel(choose=all_options, overlap=lambda *both: 1 - overlap(*both))
    state, _ = plan(misled, "dfs", generate(6, 2), n_samples=8, max_calls=2000)
    nodes = state["nodes"]
    backtracks = calls.of("backtrack")
    assert backtracks
    assert calls.of("keep_only") == []
    for (back_to,), given in backtracks:
        on_the_way = {t.id for t in lineage(nodes, nodes[back_to])}
        for lost in given["prune"]:
            assert nodes[lost].status == "dead"
            assert back_to in {t.id for t in lineage(nodes, nodes[lost])}
            assert lost not in on_the_way
    given_up = {lost for _, given in backtracks for lost in given["prune"]}
    assert given_up == {t.id for t in nodes.values() if t.status == "dead"}


def test_when_no_reply_names_a_city_the_first_one_is_taken_and_marked() -> None:
    model = ScriptedModel(choose=lambda route, options: ["I cannot say"])
    state, _ = plan(model, "dfs", max_calls=1000)
    chosen = [t for t in state["nodes"].values() if t.route]
    assert all(t.is_fallback and t.n_votes == 0 for t in chosen)
    assert state["outcome"] == "solved"


def test_samples_that_name_one_city_are_one_thought_with_votes() -> None:
    model = ScriptedModel(choose=lambda route, options: [options[0], options[-1], options[0]])
    state, _ = plan(model, "beam", n_samples=3)
    first = [t for t in state["nodes"].values() if len(t.route) == 1]
    assert sorted(t.n_votes for t in first) == [1, 2]


def test_the_search_stops_at_its_call_limit() -> None:
    model = ScriptedModel(choose=first_option, overlap=lambda days, date: 0.5)
    state, asker = plan(model, "dfs", generate(8, 3), max_calls=20)
    assert state["outcome"].startswith("stopped after")
    assert 20 <= asker.n_calls < 40


def test_what_is_asked_of_the_model_is_short() -> None:
    model = ScriptedModel(choose=all_options)
    _, asker = plan(model, "beam")
    assert {r.kind for r in asker.records} == {"read", "calibrate", "propose", "evaluate"}
    assert max(r.settings["max_tokens"] for r in asker.records) <= 12
    assert {r.settings["max_tokens"] for r in asker.records if r.kind == "evaluate"} == {1}


def test_the_solver_agrees_that_the_problem_has_dead_ends() -> None:
    assert solve(PROBLEM).n_dead_ends > 3
