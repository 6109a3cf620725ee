"""A wrapped saver does what the bare one does, and can do exactly what that can."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.conformance import validate
from langgraph.checkpoint.conformance.initializer import RegisteredCheckpointer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from sidequest_langchain import SideQuestSaver
from sidequest_langchain.errors import ConfigError
from tests.graph.savers import Asynced, FullAsynced, FullSaver, listed_model

BASE = {"put", "put_writes", "get_tuple", "list", "delete_thread"}
ALL = BASE | {"delete_for_runs", "copy_thread", "prune"}


def wrapped(inner: BaseCheckpointSaver[Any], **given: Any) -> SideQuestSaver:
    return SideQuestSaver(inner, listed_model(), **given)


# -- LangGraph's own suite ---------------------------------------------------------------


async def in_memory(folder: Path) -> AsyncIterator[Any]:
    yield wrapped(InMemorySaver())


async def with_a_folder(folder: Path) -> AsyncIterator[Any]:
    yield wrapped(InMemorySaver(), folder=folder / "kv")


async def that_can_do_all(folder: Path) -> AsyncIterator[Any]:
    yield wrapped(FullSaver())


async def that_can_do_all_synchronously(folder: Path) -> AsyncIterator[Any]:
    yield FullAsynced(wrapped(FullSaver()))


async def in_sqlite_asynchronously(folder: Path) -> AsyncIterator[Any]:
    async with AsyncSqliteSaver.from_conn_string(":memory:") as inner:
        yield wrapped(inner)


async def in_sqlite(folder: Path) -> AsyncIterator[Any]:
    with SqliteSaver.from_conn_string(":memory:") as inner:
        yield Asynced(wrapped(inner))


SAVERS: dict[str, tuple[Callable[[Path], AsyncIterator[Any]], set[str]]] = {
    "InMemorySaver": (in_memory, BASE),
    "InMemorySaver and a folder": (with_a_folder, BASE),
    "a saver that can do all": (that_can_do_all, ALL),
    "the same, synchronously": (that_can_do_all_synchronously, ALL),
    "AsyncSqliteSaver": (in_sqlite_asynchronously, BASE),
    "SqliteSaver": (in_sqlite, BASE),
}


@pytest.mark.parametrize("name", SAVERS)
async def test_langgraphs_conformance_suite_passes(name: str, tmp_path: Path) -> None:
    make, expected = SAVERS[name]
    report = await validate(RegisteredCheckpointer(name, lambda: make(tmp_path)))
    results = report.results
    assert {c: r.failures for c, r in results.items() if r.failures} == {}
    assert {c for c, r in results.items() if r.detected and r.passed and r.tests_passed} == expected
    assert sum(r.tests_passed for r in results.values()) >= 40


# -- the same calls on a bare and on a wrapped saver ---------------------------------------

THREADS = st.sampled_from(["a", "b", "../x", ""])
NAMESPACES = st.sampled_from(["", "sub:1"])


class Pair(RuleBasedStateMachine):
    """Whatever is called, both answer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.bare, self.wrapped = FullSaver(), wrapped(FullSaver())
        self.known: list[Any] = []
        self.n = 0

    def both(self, act: Callable[[Any], Any]) -> Any:
        found = [act(saver) for saver in (self.bare, self.wrapped)]
        assert found[0] == found[1]
        return found[0]

    @rule(thread=THREADS, ns=NAMESPACES, run=st.sampled_from(["r1", "r2"]), data=st.data())
    def put(self, thread: str, ns: str, run: str, data: Any) -> None:
        self.n += 1
        place: dict[str, Any] = {"thread_id": thread, "checkpoint_ns": ns}
        parents = [
            c["configurable"]["checkpoint_id"]
            for c in self.known
            if (c["configurable"]["thread_id"], c["configurable"]["checkpoint_ns"]) == (thread, ns)
        ]
        if parents and data.draw(st.booleans()):
            place["checkpoint_id"] = data.draw(st.sampled_from(parents))
        checkpoint = {
            "v": 2,
            "id": str(uuid6(clock_seq=self.n)),
            "ts": "",
            "channel_values": {"x": self.n},
            "channel_versions": {"x": self.n},
            "versions_seen": {},
            "updated_channels": None,
        }
        metadata = {"source": "loop", "step": self.n, "run_id": run}
        config = {"configurable": place}
        put = self.both(lambda s: s.put(config, dict(checkpoint), metadata, {"x": self.n}))
        self.known.append(put)

    @rule(data=st.data(), task=st.sampled_from(["t1", "t2"]))
    def put_writes(self, data: Any, task: str) -> None:
        if self.known:
            config = data.draw(st.sampled_from(self.known))
            self.both(lambda s: s.put_writes(config, [("x", self.n)], task, "path"))

    @rule(thread=THREADS, ns=NAMESPACES)
    def get_tuple(self, thread: str, ns: str) -> None:
        config = {"configurable": {"thread_id": thread, "checkpoint_ns": ns}}
        self.both(lambda s: s.get_tuple(config))
        self.both(lambda s: s.get(config))

    @rule(data=st.data())
    def get_one(self, data: Any) -> None:
        if self.known:
            config = data.draw(st.sampled_from(self.known))
            self.both(lambda s: s.get_tuple(config))
            self.both(lambda s: s.get_delta_channel_history(config=config, channels=["x"]))

    @rule(
        thread=THREADS,
        limit=st.sampled_from([None, 0, 2]),
        run=st.sampled_from([None, "r1"]),
        data=st.data(),
    )
    def list(self, thread: str, limit: int | None, run: str | None, data: Any) -> None:
        config = {"configurable": {"thread_id": thread}}
        before = data.draw(st.sampled_from([None, *self.known]))
        chosen = {"run_id": run} if run else None
        self.both(lambda s: list(s.list(config, filter=chosen, before=before, limit=limit)))
        # In which order threads come is nobody's promise.
        self.both(lambda s: sorted(str(found) for found in s.list(None, filter=chosen)))

    @rule(thread=THREADS)
    def delete_thread(self, thread: str) -> None:
        self.both(lambda s: s.delete_thread(thread))

    @rule(run=st.sampled_from(["r1", "r2", "none"]))
    def delete_for_runs(self, run: str) -> None:
        self.both(lambda s: s.delete_for_runs([run]))

    @rule(threads=st.lists(THREADS, max_size=2, unique=True), is_all=st.booleans())
    def prune(self, threads: Any, is_all: bool) -> None:
        strategy = "delete" if is_all else "keep_latest"
        self.both(lambda s: s.prune(threads, strategy=strategy))

    @rule(threads=st.lists(THREADS, min_size=2, max_size=2, unique=True))
    def copy_thread(self, threads: Any) -> None:
        self.both(lambda s: s.copy_thread(*threads))

    @rule(current=st.sampled_from([None, "00000000000000000000000000000007.0.1"]))
    def get_next_version(self, current: str | None) -> None:
        self.both(lambda s: s.get_next_version(current, None).split(".")[0])

    def teardown(self) -> None:
        everything = self.both(lambda s: sorted(str(found) for found in s.list(None)))
        assert isinstance(everything, type([]))


Pair.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
test_a_wrapped_saver_answers_as_the_bare_one = Pair.TestCase


# -- what is honest about it ----------------------------------------------------------------


def test_it_overrides_what_the_inner_saver_overrides() -> None:
    def can(saver: BaseCheckpointSaver[Any], name: str) -> bool:
        return getattr(type(saver), name) is not getattr(BaseCheckpointSaver, name)

    for inner in (InMemorySaver(), FullSaver()):
        for stem in ALL:
            for name in (stem, f"a{stem}"):
                assert can(wrapped(inner), name) == can(inner, name), name
    with pytest.raises(NotImplementedError):
        wrapped(InMemorySaver()).prune(["t"])
    assert type(wrapped(InMemorySaver())) is type(wrapped(InMemorySaver()))
    assert isinstance(wrapped(InMemorySaver()), SideQuestSaver)
    assert repr(wrapped(InMemorySaver())).startswith("SideQuestSaver(<")


def test_what_it_lacks_is_the_inner_savers() -> None:
    with closing(sqlite3.connect(":memory:")) as conn:
        inner = SqliteSaver(conn)
        saver = wrapped(inner)
        assert saver.conn is conn
        saver.setup()
        assert inner.is_setup
        with pytest.raises(AttributeError, match="no_such_name"):
            saver.no_such_name  # noqa: B018
        assert saver.config_specs == inner.config_specs


def test_the_serializer_is_the_inner_savers() -> None:
    inner = InMemorySaver()
    saver = wrapped(inner)
    assert saver.serde is inner.serde
    saver.serde = other = JsonPlusSerializer()
    assert inner.serde is other


def test_a_clone_that_may_read_more_types_shares_everything_else() -> None:
    allowed = ("tests.graph.savers", "FullSaver")
    inner = InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=None))
    saver = wrapped(inner)
    clone = saver.with_allowlist([allowed])
    assert isinstance(clone, SideQuestSaver)
    assert clone.inner is not inner
    assert clone.inner.storage is inner.storage
    assert clone.serde is not inner.serde
    assert clone._kv is saver._kv
    assert clone.with_allowlist([allowed]) is clone
    assert copy.copy(saver).inner is inner


def test_a_saver_that_knows_no_task_paths_gets_none() -> None:
    class Old(InMemorySaver):
        def put_writes(self, config: Any, writes: Any, task_id: str) -> None:  # type: ignore[override]
            super().put_writes(config, writes, task_id)

        async def aput_writes(self, config: Any, writes: Any, task_id: str) -> None:  # type: ignore[override]
            super().put_writes(config, writes, task_id)

    inner = Old()
    saver = wrapped(inner)
    place = {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": "c"}
    saver.put_writes({"configurable": place}, [("x", 1)], "task", "path")
    assert [write[0] for write in inner.writes["t", "", "c"].values()] == ["task"]


async def test_the_same_asynchronously() -> None:
    class Old(FullSaver):
        async def aput_writes(self, config: Any, writes: Any, task_id: str) -> None:  # type: ignore[override]
            super().put_writes(config, writes, task_id)

    inner = Old()
    place = {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": "c"}
    await wrapped(inner).aput_writes({"configurable": place}, [("x", 1)], "task", "path")
    assert [write[0] for write in inner.writes["t", "", "c"].values()] == ["task"]


@pytest.mark.parametrize(
    ("inner", "model", "found"),
    [
        (InMemorySaver, None, "found the class InMemorySaver; give one"),
        ({}, None, "found dict"),
        (InMemorySaver(), "gpt", "found str"),
    ],
)
def test_what_is_no_saver_or_no_model_of_ours_is_refused(
    inner: Any, model: Any, found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        SideQuestSaver(inner, model or listed_model())


def test_a_folder_needs_kv_that_outlives_its_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="retain='thread'"):
        SideQuestSaver(InMemorySaver(), listed_model(retain="run"), folder=tmp_path)
    with pytest.raises(ConfigError, match="folder="):
        wrapped(InMemorySaver()).save_thread("t")
