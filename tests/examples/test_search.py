"""What a round decides, on trees made by hand."""

from __future__ import annotations

from dataclasses import replace

from sidequest_langchain.examples.tree_of_thoughts.problem import DateWindow, TripProblem
from sidequest_langchain.examples.tree_of_thoughts.search import (
    Limits,
    decide,
    judged,
    options_of,
    ranked,
)
from sidequest_langchain.examples.tree_of_thoughts.thought import ROOT, Thought, thought_id

CITIES = ("Graz", "Oslo", "Porto", "Riga")
# Every pair is connected; Oslo must be seen on days 1 or 2, so it has to come first.
PROBLEM = TripProblem(
    name="four",
    durations=dict.fromkeys(CITIES, 3),
    flights=frozenset((a, b) for a in CITIES for b in CITIES if a != b),
    windows=(
        DateWindow(
            city="Oslo", first_day=1, last_day=2, attendance="any", occasion="meet a friend"
        ),
    ),
)
BEAM, DFS = Limits(mode="beam", beam_width=2), Limits(mode="dfs")


def thought(*route: str, score: float | None = 0.5, **more: object) -> Thought:
    parent = thought_id(route[:-1]) if route else None
    day = PROBLEM.visits(route)[-1].last_day if route else 1
    made = Thought(
        id=thought_id(route), parent=parent, route=route, day=day, status="live", score=score
    )
    return replace(made, **more)  # type: ignore[arg-type]


def tree(*thoughts: Thought) -> dict[str, Thought]:
    return {t.id: t for t in (thought(score=None), *thoughts)}


def test_the_best_score_comes_first_then_the_most_votes() -> None:
    a, b, c = (
        thought("Graz", score=0.4, n_votes=3),
        thought("Oslo", score=0.4, n_votes=5),
        thought("Riga", score=0.9),
    )
    assert ranked([a, b, c]) == [c, b, a]


def test_options_are_reachable_unvisited_and_untried() -> None:
    nodes = tree(thought("Oslo"), thought("Oslo", "Graz"))
    assert options_of(PROBLEM, nodes, nodes["Oslo"]) == ["Porto", "Riga"]
    assert options_of(PROBLEM, nodes, nodes[ROOT]) == ["Graz", "Porto", "Riga"]


def test_the_rules_look_at_a_thought() -> None:
    assert judged(PROBLEM, thought("Oslo")).status == "live"
    assert judged(PROBLEM, thought("Graz")).status == "dead"
    whole = thought("Oslo", "Graz", "Porto", "Riga")
    assert judged(PROBLEM, whole).status == "done"
    late = judged(PROBLEM, thought("Graz", "Oslo", "Porto", "Riga"))
    assert late.status == "dead"
    assert "misses days 1-2" in late.reason


class TestBeam:
    def test_the_losers_and_their_barren_parents_are_given_up(self) -> None:
        nodes = tree(
            thought("Oslo"),
            thought("Oslo", "Graz", score=0.9),
            thought("Oslo", "Porto", score=0.8),
            thought("Oslo", "Riga", score=0.1),
        )
        decision = decide(PROBLEM, nodes, ["Oslo"], BEAM)
        assert decision.frontier == ["Oslo > Graz", "Oslo > Porto"]
        assert decision.given_up == ["Oslo > Riga"]
        assert decision.changed["Oslo > Riga"].status == "pruned"
        assert decision.back_to is None

    def test_a_dead_end_does_not_take_a_place(self) -> None:
        nodes = tree(thought("Graz", score=0.9), thought("Oslo", score=0.2))
        decision = decide(PROBLEM, nodes, [ROOT], BEAM)
        assert decision.frontier == ["Oslo"]
        assert decision.changed["Graz"].status == "dead"
        assert decision.given_up == ["Graz"]

    def test_a_parent_without_a_kept_child_goes(self) -> None:
        nodes = tree(
            thought("Oslo"),
            thought("Porto"),
            thought("Oslo", "Graz", score=0.9),
            thought("Porto", "Oslo", score=0.95),
        )
        decision = decide(PROBLEM, nodes, ["Oslo", "Porto"], replace(BEAM, beam_width=1))
        assert decision.frontier == ["Oslo > Graz"]
        assert set(decision.given_up) == {"Porto", "Porto > Oslo"}
        assert decision.changed["Porto"].status == "dead"

    def test_a_valid_plan_ends_the_search(self) -> None:
        route = ("Oslo", "Graz", "Porto")
        way = [thought(*route[:n]) for n in (1, 2, 3)]
        nodes = tree(*way, thought(*route, "Riga", score=None, status="new"))
        decision = decide(PROBLEM, nodes, [thought_id(route)], BEAM)
        assert (decision.outcome, decision.frontier) == ("solved", [])
        assert decision.best == "Oslo > Graz > Porto > Riga"

    def test_a_beam_that_died_out_says_so_and_names_the_longest_route(self) -> None:
        decision = decide(PROBLEM, tree(thought("Graz"), thought("Riga", score=0.9)), [ROOT], BEAM)
        assert decision.outcome == "every thought was a dead end"
        assert decision.best == "Riga"


class TestDepthFirst:
    def test_it_goes_down_the_best_child_and_keeps_the_others_open(self) -> None:
        nodes = tree(
            thought("Oslo"),
            thought("Oslo", "Graz", score=0.3),
            thought("Oslo", "Porto", score=0.8),
        )
        decision = decide(PROBLEM, nodes, ["Oslo"], DFS)
        assert decision.frontier == ["Oslo > Porto"]
        assert (decision.given_up, decision.back_to) == ([], None)

    def test_from_a_dead_end_it_goes_back_to_the_next_best(self) -> None:
        nodes = tree(thought("Graz", score=0.9), thought("Oslo", score=0.2))
        decision = decide(PROBLEM, nodes, [ROOT], DFS)
        assert decision.frontier == ["Oslo"]
        assert (decision.given_up, decision.back_to) == (["Graz"], ROOT)

    def test_where_all_proposals_failed_it_asks_again_for_the_others(self) -> None:
        decision = decide(PROBLEM, tree(thought("Graz")), [ROOT], DFS)
        assert decision.frontier == [ROOT]
        assert decision.back_to == ROOT

    def test_an_exhausted_thought_is_dead_and_the_search_goes_above_it(self) -> None:
        stuck = replace(PROBLEM, flights=PROBLEM.flights - {("Porto", "Graz"), ("Porto", "Oslo")})
        nodes = tree(
            thought("Oslo", score=0.9),
            thought("Oslo", "Porto", score=0.9),
            thought("Oslo", "Graz", score=0.1),
            thought("Oslo", "Porto", "Riga", score=0.9, status="dead"),
        )
        decision = decide(stuck, nodes, ["Oslo > Porto"], DFS)
        assert decision.frontier == ["Oslo > Graz"]
        assert decision.given_up == ["Oslo > Porto"]
        assert decision.back_to == "Oslo"

    def test_nothing_left_ends_the_search(self) -> None:
        dead = [thought(city, status="dead") for city in CITIES]
        decision = decide(PROBLEM, tree(*dead), [ROOT], DFS)
        assert (decision.outcome, decision.frontier) == ("every thought was a dead end", [])


def test_a_route_of_the_greatest_depth_is_not_continued() -> None:
    nodes = tree(thought("Oslo"))
    for limits in (replace(BEAM, max_depth=1), replace(DFS, max_depth=1)):
        decision = decide(PROBLEM, nodes, [ROOT], limits)
        assert "Oslo" not in decision.frontier
