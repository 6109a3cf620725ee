"""Which calls led to a checkpoint, and which a run from it would go on from: on paper."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint

from sidequest_langchain.graph.lineage import MAX_DEPTH, Lineage
from sidequest_langchain.labels import StepLabel


def point(
    name: str,
    parent: str | None = None,
    *tasks: str,
    source: str = "loop",
    ns: str = "",
    values: Any = None,
) -> CheckpointTuple:
    """A checkpoint from which `tasks` ran."""
    place = {"thread_id": "t", "checkpoint_ns": ns}
    above = None if parent is None else {"configurable": {**place, "checkpoint_id": parent}}
    return CheckpointTuple(
        config={"configurable": {**place, "checkpoint_id": name}},
        checkpoint={**empty_checkpoint(), "id": name, "channel_values": values or {}},
        metadata={"source": source},
        parent_config=above,
        pending_writes=[(task, "x", None) for task in tasks],
    )


def call(place: str, call_id: str | None = None) -> StepLabel:
    """A call made in a namespace, known by its innermost task."""
    return StepLabel(
        call_id=call_id or place.rsplit(":", 1)[-1], thread_id="t", checkpoint_ns=place
    )


def calls(found: Any) -> list[str]:
    return [label.call_id for label in found]


LABELS = [
    call("say:1"),
    call("say:2"),
    call("check:3"),
    call("say:4"),
    call("say:9"),
    call("sub:5|say:6"),
]
#   a -1-> b -2,3-> c -5-> d        and a fork of b: f -4-> g
#   task 9 ran from nothing that is known
POINTS = [
    point("a", None, "1", source="input"),
    point("b", "a", "2", "3"),
    point("c", "b", "5"),
    point("d", "c"),
    point("f", "b", "4", source="fork"),
    point("g", "f"),
]
LED_TO = {
    "a": [],
    "b": ["1"],
    "c": ["1", "2", "3"],
    "d": ["1", "2", "3", "6"],
    "f": ["1"],
    "g": ["1", "4"],
    "x": [],
}


@pytest.mark.parametrize("name", LED_TO)
def test_what_led_to_a_checkpoint(name: str) -> None:
    assert calls(Lineage(POINTS).paths_at(("", name), LABELS)) == LED_TO[name]
    assert calls(Lineage(reversed(POINTS)).paths_at(("", name), LABELS)) == LED_TO[name]


def test_what_waits_in_a_checkpoint_leads_to_it() -> None:
    """A step that was interrupted wrote, and made no checkpoint."""
    lineage = Lineage([point("a", None, "1"), point("b", "a", "2")])
    assert calls(lineage.paths_at(("", "b"), LABELS)) == ["1", "2"]
    assert calls(lineage.paths_at(("", "a"), LABELS)) == []


WANTED = {
    ("d",): {"2", "3", "6"},
    ("g",): {"4"},
    ("d", "g"): {"2", "3", "4", "6"},
    ("a", "b"): {"1"},
    ("x",): set(),
    (): set(),
}


@pytest.mark.parametrize("living", WANTED)
def test_what_a_run_would_go_on_from(living: tuple[str, ...]) -> None:
    lineage = Lineage(POINTS)
    assert lineage.wanted([("", name) for name in living], LABELS) == WANTED[living]
    assert lineage.unplaced(LABELS) == {"9"}


def test_a_step_that_was_not_saved_is_known_by_its_messages() -> None:
    held = {"messages": [AIMessage("x", id="9"), AIMessage("y"), "text"]}
    lineage = Lineage([point("a"), point("b", "a", values=held)])
    assert calls(lineage.paths_at(("", "b"), LABELS)) == ["9"]
    assert lineage.wanted([("", "b")], LABELS) == {"9"}
    assert lineage.wanted([("", "a")], LABELS) == set()


def test_messages_are_found_in_whatever_holds_them() -> None:
    message: Any = AIMessage("x", id="9")
    for value in (message, [message], {"a": (message,)}, {"a": [{"b": message}]}):
        assert calls(Lineage([point("a", values={"v": value})]).paths_at(("", "a"), LABELS)) == [
            "9"
        ]
    deep: Any = message
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    lineage = Lineage([point("a", values={"v": deep, "w": endless})])
    assert lineage.paths_at(("", "a"), LABELS) == []


def test_subgraphs_belong_to_the_step_around_them() -> None:
    """Their own checkpoints live on; what is wanted is decided by the graph around."""
    nested = [point("s", None, "6", ns="sub:5"), point("t", "s", ns="sub:5")]
    lineage = Lineage([*POINTS, *nested])
    assert calls(lineage.paths_at(("sub:5", "t"), LABELS)) == ["6"]
    assert lineage.wanted([("sub:5", "t")], LABELS) == set()
    assert "6" in lineage.wanted([("", "d"), ("sub:5", "t")], LABELS)
    # A subgraph that keeps its own history has a namespace without a task.
    own = [point("s", None, "6", ns="sub"), point("t", "s", ns="sub")]
    assert Lineage(own).wanted([("sub", "t")], LABELS) == {"6"}


def test_namespaces_are_compared_task_by_task() -> None:
    labels = [call("plan:1"), call("planner:11"), call("a:1x"), StepLabel(call_id="none")]
    lineage = Lineage([point("a", None, "1"), point("b", "a")])
    assert calls(lineage.paths_at(("", "b"), labels)) == ["1"]
    assert lineage.unplaced(labels) == {"11", "1x", "none"}


def test_a_lineage_that_bites_its_tail_ends() -> None:
    lineage = Lineage([point("a", "b", "1"), point("b", "a", "2")])
    assert calls(lineage.paths_at(("", "a"), LABELS)) == ["1", "2"]
    assert lineage.keys == {("", "a"), ("", "b")}
