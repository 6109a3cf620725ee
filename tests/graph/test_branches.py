"""`branch`, `keep_only`, `backtrack` and cascades: who is given up with whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt

from sidequest_langchain.chat.step import BRANCH
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.graph import (
    abacktrack,
    akeep_only,
    attach,
    backtrack,
    branch,
    keep_only,
    prune,
)
from sidequest_langchain.graph.branches import BranchLedger
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import Log, State, chain, check_events, fan_out, on

FAMILY = {"a": None, "b": None, "a1": "a", "a2": "a", "a1x": "a1", "b1": "b"}
"""Branch -> parent."""


def family(model: FakeModel) -> Any:
    """A node that opens a family of branches, with one call in each."""

    def node(state: dict[str, Any]) -> dict[str, Any]:
        for name, parent in FAMILY.items():
            with branch(name, parent=parent):
                model.invoke("hi")
        return {}

    return node


def run_then(model: FakeModel, act: Any, log: Log | None = None, thread_id: str = "t") -> Any:
    """Open the family, then do `act` in the next node."""
    graph = chain(("open", family(model)), ("act", lambda state: act() and {}))
    return attach(graph, model, on_event=log, strict=True).invoke({}, on(thread_id))


# -- naming ------------------------------------------------------------------------------


def test_calls_are_labelled_with_the_innermost_branch_and_its_parent() -> None:
    model = fake_model()

    def node(state: dict[str, Any]) -> dict[str, Any]:
        model.invoke("hi")
        with branch("out") as name:
            assert name == "out"
            model.invoke("hi")
            with branch("in"):
                model.invoke("hi")
                with branch("elsewhere", parent="other"):
                    model.invoke("hi")
            model.invoke("hi")
        return {}

    attach(chain(("node", node)), model).invoke({}, on("t"))
    assert [(lb.branch, lb.parent_branch) for lb in model.kv.labels()] == [
        (None, None),
        ("out", None),
        ("in", "out"),
        ("elsewhere", "other"),
        ("out", None),
    ]
    assert BRANCH.get() is None


def test_a_branch_ends_with_its_block_even_by_an_exception() -> None:
    with pytest.raises(ValueError, match="no"), branch("a"):
        raise ValueError("no")  # noqa: EM101
    assert BRANCH.get() is None


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_branch_needs_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="not empty"), branch(name):
        pass


def test_a_branch_is_not_its_own_parent() -> None:
    with pytest.raises(ConfigError, match="cannot continue itself"), branch("a", parent="a"):
        pass


def test_parallel_branches_do_not_mix() -> None:
    model = fake_model()
    model.delay_s = 0.01

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        with branch(f"b{state['i']}", parent=f"p{state['i']}"):
            model.invoke("hi")
            model.invoke("hi")
        return {}

    attach(fan_out(8, expand), model).invoke({}, on("t"))
    found = [(lb.branch, lb.parent_branch) for lb in model.kv.labels()]
    assert sorted(found) == sorted([(f"b{i}", f"p{i}") for i in range(8)] * 2)


# -- prune -------------------------------------------------------------------------------


def test_a_prune_takes_everything_declared_below_with_it() -> None:
    model, log = fake_model(), Log()
    run_then(model, lambda: prune("a"), log)
    assert model.kv.branches() == ["b", "b1"]
    (event,) = log.named("prune")
    assert (event["paths"], event["descendants"]) == (["a"], ["a1", "a2", "a1x"])
    assert [d["path"] for d in log.named("release")] == ["a1x", "a2", "a1", "a"]
    check_events(log.events)


def test_a_receipt_names_what_goes() -> None:
    model, receipts = fake_model(), []
    run_then(model, lambda: receipts.append(prune("a1", "b", "a1")) or True)
    (receipt,) = receipts
    assert (receipt.status, receipt.paths) == ("staged", ("a1", "b", "a1x", "b1"))


def test_names_that_begin_alike_are_not_confused() -> None:
    model = fake_model()

    def node(state: dict[str, Any]) -> dict[str, Any]:
        for name in ("a", "ab", "a:b", "a|b"):
            with branch(name):
                model.invoke("hi")
        return {}

    graph = chain(("a", node), ("ab", node), ("act", lambda state: prune("a") and {}))
    attach(graph, model).invoke({}, on("t"))
    assert model.kv.branches() == ["a:b", "a:b", "ab", "ab", "a|b", "a|b"]


def test_a_prune_reaches_its_own_thread_only() -> None:
    model = fake_model()
    run_then(model, lambda: True, thread_id="other")
    run_then(model, lambda: prune("a", "b"))
    assert model.kv.branches("t") == []
    assert model.kv.branches("other") == sorted(FAMILY)


def test_without_a_thread_a_prune_reaches_its_own_run_only() -> None:
    model = fake_model(retain="thread")

    def once(act: Any) -> None:
        graph = chain(("open", family(model)), ("act", lambda state: act() and {}))
        attach(graph, model, strict=True).invoke({})

    once(lambda: True)
    once(lambda: prune("a", "b"))
    assert model.kv.branches() == sorted(FAMILY)
    assert max(model.kv.paths) == len(FAMILY) - 1


def test_messages_and_task_ids_name_paths_too() -> None:
    model, said = fake_model(), []

    def node(state: dict[str, Any]) -> dict[str, Any]:
        said.extend(model.invoke("hi") for _ in range(4))
        prune(said[0], said[1].id)
        return {}

    attach(chain(("node", node)), model, strict=True).invoke({}, on("t"))
    assert [label.call_id for label in model.kv.labels()] == ["sq-2", "sq-3"]
    task_id = model.kv.labels()[0].task_id
    attach(chain(("act", lambda s: prune(task_id) and {})), model).invoke({}, on("t"))
    assert model.kv.labels() == []


@pytest.mark.parametrize("bad", [None, "", 7, AIMessage("no id"), HumanMessage("no id")])
def test_what_is_no_name_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="named by strings"):
        prune(bad)


def test_an_empty_prune_is_ignored() -> None:
    assert prune().status == "ignored"
    assert keep_only().status == "ignored"


# -- keep_only ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "under", "left"),
    [
        (("a1",), None, ["a", "a1", "a1x", "b", "b1"]),
        (("a",), None, ["a", "a1", "a1x", "a2"]),
        (("a1", "b1"), None, ["a", "a1", "a1x", "b", "b1"]),
        (("a1x",), None, sorted(FAMILY)),
        ((), "a", ["a", "b", "b1"]),
        ((), ("a", "b"), ["a", "b"]),
        (("a1",), ("a", "b"), ["a", "a1", "a1x", "b"]),
        (("new",), None, []),
    ],
)
def test_keep_only_gives_up_the_rivals(kept: Any, under: Any, left: list[str]) -> None:
    model = fake_model()
    run_then(model, lambda: keep_only(*kept, under=under))
    assert model.kv.branches() == left


async def test_the_asynchronous_twins_do_the_same() -> None:
    model, log = fake_model(), Log()

    async def select(state: dict[str, Any]) -> dict[str, Any]:
        receipt = await akeep_only("a1", immediate=True)
        assert (receipt.paths, receipt.freed_bytes) == (("a2",), 100)
        return {}

    async def back(state: dict[str, Any]) -> Command[Any]:
        return await abacktrack(to="b", prune="b1", goto="end")

    builder = StateGraph(State)
    builder.add_node("open", family(model))
    builder.add_node("select", select)
    builder.add_node("back", back)
    builder.add_node("end", lambda state: {"said": ["end"]})
    builder.add_edge(START, "open")
    builder.add_edge("open", "select")
    builder.add_edge("select", "back")
    app = attach(builder.compile(), model, on_event=log, strict=True)
    assert (await app.ainvoke({}, on("t")))["said"] == ["end"]
    assert model.kv.branches() == ["a", "a1", "a1x", "b"]
    check_events(log.events)


def test_rivals_are_remembered_over_an_interrupt() -> None:
    model = fake_model()

    def act(state: dict[str, Any]) -> dict[str, Any]:
        interrupt("which?")
        keep_only("a1")
        return {}

    graph = chain(("open", family(model)), ("act", act), checkpointer=InMemorySaver())
    app = attach(graph, model)
    app.invoke({}, on("t"))
    app.invoke(Command(resume="a1"), on("t"))
    assert model.kv.branches() == ["a", "a1", "a1x", "b", "b1"]


def test_a_beam_search_keeps_its_beam_through_the_levels() -> None:
    model = fake_model()

    def expand(state: dict[str, Any]) -> dict[str, Any]:
        parent = state["said"][0]
        for child in "01":
            with branch(parent + child, parent=parent or None):
                model.invoke("hi")
        return {"said": [parent + child for child in "01"]}

    def select(state: dict[str, Any]) -> Command[Any]:
        level = max(map(len, state["said"]))
        beam = sorted(s for s in state["said"] if len(s) == level)[-2:]
        keep_only(*beam, under=sorted({name[:-1] for name in state["said"] if len(name) == level}))
        sends = [Send("expand", {"said": [name]}) for name in beam]
        return Command(goto=sends if level < 4 else [])

    builder = StateGraph(State)
    builder.add_node("expand", expand)
    builder.add_node("select", select, destinations=("expand",))
    builder.add_conditional_edges(START, lambda _: Send("expand", {"said": [""]}), ["expand"])
    builder.add_edge("expand", "select")
    attach(builder.compile(), model, strict=True).invoke({}, on("t"))
    # `under=""` names no parent: the top level has parent None, so both of it stay.
    assert model.kv.branches() == ["0", "1", "10", "11", "110", "111", "1110", "1111"]


# -- backtrack ---------------------------------------------------------------------------


def test_backtrack_is_a_command_that_prunes() -> None:
    model, log = fake_model(), Log()

    def dead_end(state: dict[str, Any]) -> Command[Any]:
        with branch("a1x", parent="a1"):
            return backtrack(to="a", update={"said": ["back"]}, goto="end")

    builder = StateGraph(State)
    builder.add_node("open", family(model))
    builder.add_node("dead_end", dead_end, destinations=("end",))
    builder.add_node("end", lambda state: {"said": ["end"]})
    builder.add_edge(START, "open")
    builder.add_edge("open", "dead_end")
    result = attach(builder.compile(), model, on_event=log, strict=True).invoke({}, on("t"))
    assert result["said"] == ["back", "end"]
    assert model.kv.branches() == ["a", "a2", "b", "b1"]
    (event,) = log.named("prune")
    assert (event["paths"], event["back_to"]) == (["a1"], "a")
    assert set(log.reasons()) == {"backtracked"}


def test_backtrack_hands_everything_on_to_the_command() -> None:
    command = backtrack(update={"x": 1}, goto=["a", "b"], graph=Command.PARENT)
    assert command == Command(update={"x": 1}, goto=["a", "b"], graph=Command.PARENT)


@pytest.mark.parametrize("lost", ["a", "a1"])
def test_backtrack_refuses_to_give_up_where_it_goes(lost: str) -> None:
    model = fake_model()
    with pytest.raises(ConfigError, match="cannot go back to 'a1'"):
        run_then(model, lambda: backtrack(to="a1", prune=lost))
    assert model.kv.branches() == sorted(FAMILY)


def test_backtrack_from_elsewhere_gives_up_only_what_it_is_told() -> None:
    model = fake_model()

    def act() -> Any:
        with branch("b1", parent="b"):
            return backtrack(to="a")

    run_then(model, act)
    assert model.kv.branches() == sorted(FAMILY)


# -- the books ---------------------------------------------------------------------------


def test_a_cycle_of_parents_ends() -> None:
    ledger = BranchLedger()
    for name, parent in (("a", "c"), ("b", "a"), ("c", "b")):
        ledger.open(name, parent)
    assert ledger.lineage("a") == ("a", "c", "b")
    assert set(ledger.descendants(["a"])) == {"b", "c"}


def test_a_declared_parent_stays_until_another_is_declared() -> None:
    ledger = BranchLedger()
    ledger.open("a", "p")
    ledger.open("a", None)
    assert ledger.parent_of("a") == "p"
    ledger.open("a", "q")
    assert ledger.parent_of("a") == "q"


@given(st.dictionaries(st.integers(0, 12), st.integers(0, 12) | st.none()), st.integers(0, 12))
def test_descendants_are_those_whose_lineage_passes_through(
    parents: dict[int, int | None], root: int
) -> None:
    ledger = BranchLedger()
    for name, parent in parents.items():
        if parent != name:
            ledger.open(str(name), None if parent is None else str(parent))

    def above(name: str) -> set[str]:
        found: set[str] = set()
        at = ledger.parent_of(name)
        while at is not None and at not in found:
            found.add(at)
            at = ledger.parent_of(at)
        return found

    known = {str(name) for name, parent in parents.items() if parent != name}
    expected = {name for name in known if str(root) in above(name) and name != str(root)}
    assert set(ledger.descendants([str(root)])) == expected
