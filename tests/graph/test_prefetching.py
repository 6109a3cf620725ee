"""A branch that is opened again, and one that is gone back to, are foreseen."""

from __future__ import annotations

from typing import Any

import pytest

from sidequest_langchain.graph import abacktrack, attach, backtrack, branch
from sidequest_langchain.labels import PathSelector
from tests.graph.fakes import FakeModel, fake_model
from tests.graph.graphs import chain, on


def foreseen(model: FakeModel) -> list[str | None]:
    assert all(s == PathSelector(path_id=s.path_id, thread_id="t") for s in model.kv.foreseen)
    return [selector.path_id for selector in model.kv.foreseen]


def test_a_branch_and_what_it_continues_are_foreseen_when_it_is_opened() -> None:
    model = fake_model()
    seen: list[list[str | None]] = []

    def node(state: dict[str, Any]) -> dict[str, Any]:
        with branch("a"):
            seen.append(foreseen(model))
            with branch("a1"):
                seen.append(foreseen(model))
        with branch("b", parent="a1"):
            seen.append(foreseen(model))
        return {}

    attach(chain(("node", node)), model, strict=True).invoke({}, on("t"))
    assert seen == [["a"], ["a", "a1", "a"], ["a", "a1", "a", "b", "a1"]]


@pytest.mark.parametrize("go", [backtrack, abacktrack])
async def test_a_branch_that_is_gone_back_to_is_foreseen(go: Any) -> None:
    model = fake_model()

    async def node(state: dict[str, Any]) -> Any:
        with branch("a"), branch("a1"):
            model.kv.foreseen.clear()
            command = go("a")
            return command if go is backtrack else await command

    await attach(chain(("node", node)), model, strict=True).ainvoke({}, on("t"))
    assert foreseen(model) == ["a"]


def test_a_cache_that_is_closed_is_no_matter() -> None:
    model = fake_model()

    def closed(selector: PathSelector) -> Any:
        from sidequest_langchain.errors import EngineClosedError

        raise EngineClosedError

    model.kv.post_prefetch = closed  # type: ignore[method-assign]

    def node(state: dict[str, Any]) -> dict[str, Any]:
        with branch("a"):
            return {}

    attach(chain(("node", node)), model, strict=True).invoke({}, on("t"))
