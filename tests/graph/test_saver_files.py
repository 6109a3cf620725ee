"""The KV of threads in a folder: what a new process finds there, and what it does without."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from sidequest_langchain import SideQuestSaver, attach
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import ConfigError, SavedThreadError
from tests.graph.conftest import Tiny
from tests.graph.graphs import on
from tests.graph.savers import Talk, asay, check_reply, fed, read, say, talk
from tests.support import templates
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

MakeChat = Callable[..., Tiny]
ROOT = Path(__file__).parents[2]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def first_process(model: Tiny, inner: Any, folder: Path, *texts: str) -> list[Any]:
    """A conversation on thread `t`, and the end of the process that held it."""
    saver = SideQuestSaver(inner, model, folder=folder)
    app = talk(model, saver)
    for text in texts:
        said = say(app, text, on("t"))
    saver.flush()
    model.engine.close()
    return said


# -- from one process to the next ----------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_resumed_thread_prefills_only_what_is_new(
    is_async: bool, tiny_chat: MakeChat, tmp_path: Path
) -> None:
    inner, model = InMemorySaver(), tiny_chat()
    said = first_process(tiny_chat(), inner, tmp_path / "kv", "Plan", "then Rome")
    assert len(files(tmp_path / "kv")) == 1
    saver = SideQuestSaver(inner, model, folder=tmp_path / "kv")
    app = talk(model, saver)
    assert (await saver.akv_of(on("t"))).state == "saved"
    if is_async:
        onward = await asay(app, "then Oslo", on("t"))
    else:
        onward = await asyncio.to_thread(say, app, "then Oslo", on("t"))
    assert onward[:4] == said
    check_reply(model, onward)
    n_known = len(model.prompt_ids(onward[:3])) + len(model.answered(onward[3])) - 1
    assert read(onward[-1]) == n_known
    n_new = len(model.prompt_ids(onward[:5])) - n_known
    assert onward[-1].response_metadata["sidequest"]["prefilled_tokens"] == n_new
    assert (await saver.akv_of(on("t"))).paths == (said[1].id, said[3].id, onward[-1].id)


def test_a_fork_in_a_new_process_finds_the_kv_of_its_checkpoint(
    tiny_chat: MakeChat, tmp_path: Path
) -> None:
    inner, model = InMemorySaver(), tiny_chat()
    first_process(tiny_chat(), inner, tmp_path, "Plan", "then Rome")
    saver = SideQuestSaver(inner, model, folder=tmp_path)
    app = talk(model, saver)
    (old,) = [
        s
        for s in app.get_state_history(on("t"))
        if len(s.values.get("messages", ())) == 2 and not s.next
    ]
    forked = say(app, "then Lisbon", old.config)
    check_reply(model, forked)
    assert read(forked[-1]) >= len(fed(model, forked[:2]))


def test_a_paused_run_is_saved_and_resumed(tiny_chat: MakeChat, tmp_path: Path) -> None:
    inner = InMemorySaver()

    def app_of(model: Tiny) -> Any:
        def asks(state: Talk) -> dict[str, Any]:
            reply = model.invoke(state["messages"])
            return {"messages": [reply, HumanMessage(interrupt("Which?"))]}

        builder = StateGraph(Talk)
        builder.add_node("asks", asks)
        builder.add_edge(START, "asks")
        saver = SideQuestSaver(inner, model, folder=tmp_path)
        return saver, attach(builder.compile(checkpointer=saver), model, strict=True)

    first, second = tiny_chat(), tiny_chat()
    saver, app = app_of(first)
    app.invoke({"messages": [HumanMessage("Plan")]}, on("t"))
    saver.flush()
    first.engine.close()
    saver, app = app_of(second)
    said = app.invoke(Command(resume="Rome"), on("t"))["messages"]
    assert read(said[1]) >= len(second.prompt_ids(said[:1])) - 1
    check_reply(second, said[:2])


CHILD = """
import sqlite3, sys
sys.path.insert(0, sys.argv[1])
from langgraph.checkpoint.sqlite import SqliteSaver
from sidequest_langchain import SideQuestSaver
from tests.graph.conftest import Tiny
from tests.graph.graphs import on
from tests.graph.savers import say, talk
from tests.support import templates
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer
model = Tiny.from_model(tiny_model("llama"), byte_tokenizer(), max_tokens=6)
conn = sqlite3.connect(sys.argv[2] + "/db", check_same_thread=False)
app = talk(model, SideQuestSaver(SqliteSaver(conn), model, folder=sys.argv[2] + "/kv"))
for text in ("Plan", "then Rome"):
    said = say(app, text, on("../x"))
"""


def test_another_process_saves_and_this_one_resumes(tiny_chat: MakeChat, tmp_path: Path) -> None:
    """The child does not wait for its saves: they are done before it ends."""
    subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT), str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["kv"]
    model = tiny_chat()
    with closing(sqlite3.connect(tmp_path / "db", check_same_thread=False)) as conn:
        saver = SideQuestSaver(SqliteSaver(conn), model, folder=tmp_path / "kv")
        app = talk(model, saver)
        onward = say(app, "then Oslo", on("../x"))
        check_reply(model, onward)
        assert read(onward[-1]) >= len(model.prompt_ids(onward[:3]))
        saver.flush()
        saver.delete_thread("../x")
        assert files(tmp_path / "kv") == []
        assert model.n_bytes == 0


@pytest.mark.real
def test_a_real_model_resumes_what_was_saved(real_smollm: Any, tmp_path: Path) -> None:
    inner = InMemorySaver()

    def a_model() -> Tiny:
        return Tiny.from_model(real_smollm.model, real_smollm.tokenizer, max_tokens=12)

    model = a_model()
    first_process(model, inner, tmp_path, "Name a city.", "Name another.")
    second = a_model()
    assert second.engine is not model.engine
    saver = SideQuestSaver(inner, second, folder=tmp_path)
    said = say(talk(second, saver), "And a third?", on("t"))
    n_prompt = len(second.prompt_ids(said[:5]))
    n_known = len(second.prompt_ids(said[:3])) + len(second.answered(said[3])) - 1
    assert read(said[-1]) >= n_known
    assert said[-1].response_metadata["sidequest"]["prefilled_tokens"] == n_prompt - read(said[-1])
    want = greedy(real_smollm.model, second.prompt_ids(said[:5]), 12)
    assert second.answered(said[-1]) == want
    second.engine.close()


def test_a_thread_is_loaded_once(tiny_chat: MakeChat, tmp_path: Path) -> None:
    inner, model = InMemorySaver(), tiny_chat()
    first_process(tiny_chat(), inner, tmp_path, "Plan")
    saver = SideQuestSaver(inner, model, folder=tmp_path)
    saver.get_tuple(on("t"))
    assert model.n_bytes > 0
    assert saver.kv_of(on("t")).state == "resident"
    model.kv.clear("t")
    saver.get_tuple(on("t"))
    assert saver.kv_of(on("t")).state == "saved"
    receipt = saver.load_thread("t")
    assert receipt.n_tokens == saver.kv_of(on("t")).n_tokens > 0


# -- when it is saved ----------------------------------------------------------------------


def test_a_thread_is_saved_when_no_run_is_on_it(tiny_chat: MakeChat, tmp_path: Path) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    began, may_end = threading.Event(), threading.Event()

    def waits(state: Talk) -> dict[str, Any]:
        reply = model.invoke(state["messages"])
        began.set()
        assert may_end.wait(30)
        return {"messages": [reply]}

    builder = StateGraph(Talk)
    builder.add_node("waits", waits)
    builder.add_edge(START, "waits")
    slow = attach(builder.compile(checkpointer=saver), model, strict=True)
    run = threading.Thread(target=say, args=(slow, "Plan", on("slow")))
    run.start()
    try:
        assert began.wait(30)
        say(talk(model, saver), "Plan", on("quick"))
        saver.flush()
        assert len(files(tmp_path)) == 1
    finally:  # a thread that is left waiting fails in somebody else's test
        may_end.set()
        run.join(30)
    saver.flush()
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_the_last_checkpoint_of_a_run_is_there_when_it_is_saved(
    durability: Any, tiny_chat: MakeChat, tmp_path: Path
) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    app = talk(model, saver)
    for text in ("Plan", "then Rome"):
        said = say(app, text, on("t"), durability=durability)
    saver.flush()
    assert list(saver._files._unsaved) == []
    model.kv.clear()
    assert saver.load_thread("t").n_tokens == len(fed(model, said))
    assert saver.kv_of(on("t")).paths == (said[1].id, said[3].id)


def test_what_is_not_attached_is_saved_when_it_is_asked_for(
    tiny_chat: MakeChat, tmp_path: Path
) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    builder = StateGraph(Talk)
    builder.add_node("say", lambda s: {"messages": [model.invoke(s["messages"])]})
    builder.add_edge(START, "say")
    said = say(builder.compile(checkpointer=saver), "Plan", on("t"))
    saver.flush()
    assert files(tmp_path) == []
    receipt = saver.save_thread("t")
    assert files(tmp_path) == [receipt.file]
    assert receipt.n_tokens == len(fed(model, said))
    assert saver.save_thread("unknown").file is None


async def test_the_same_asynchronously(tiny_chat: MakeChat, tmp_path: Path) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    await asay(talk(model, saver), "Plan", on("t"))
    receipt = await saver.asave_thread("t")
    assert files(tmp_path) == [receipt.file]
    model.kv.clear()
    assert (await saver.aload_thread("t")).n_tokens == receipt.n_tokens
    with pytest.raises(SavedThreadError):
        await saver.aload_thread("unknown")
    await saver.adelete_thread("t")
    assert files(tmp_path) == []


def test_a_run_that_calls_no_model_loads_none(tmp_path: Path) -> None:
    from sidequest_langchain import SideQuestChatModel

    model = SideQuestChatModel(model="no-such-model")
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    builder = StateGraph(Talk)
    builder.add_node("say", lambda s: {"messages": ["nothing"]})
    builder.add_edge(START, "say")
    say(attach(builder.compile(checkpointer=saver), model, strict=True), "Plan", on("t"))
    saver.flush()
    assert files(tmp_path) == []


def test_deleting_a_thread_removes_what_is_still_being_saved(
    tiny_chat: MakeChat, tmp_path: Path
) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    app = talk(model, saver)
    for n in range(3):
        say(app, "Plan", on(f"t{n}"))
    for n in range(3):
        saver.delete_thread(f"t{n}")
        saver.delete_thread(f"t{n}")
    saver.flush()
    assert files(tmp_path) == []
    assert model.n_bytes == 0
    check_reply(model, say(app, "Plan", on("t0")))
    saver.flush()
    assert len(files(tmp_path)) == 1


def test_a_thread_deleted_while_it_is_loaded_is_gone(
    tiny_chat: MakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, model = InMemorySaver(), tiny_chat()
    first_process(tiny_chat(), inner, tmp_path, "Plan")
    saver = SideQuestSaver(inner, model, folder=tmp_path)
    began, may_load = threading.Event(), threading.Event()
    load = type(model.kv).load

    def slow(*given: Any) -> Any:
        began.set()
        assert may_load.wait(30)
        return load(*given)

    monkeypatch.setattr(type(model.kv), "load", slow)
    use = threading.Thread(target=saver.get_tuple, args=(on("t"),))
    use.start()
    assert began.wait(30)
    deletion = threading.Thread(target=saver.delete_thread, args=("t",))
    deletion.start()
    time.sleep(0.05)
    may_load.set()
    use.join(30)
    deletion.join(30)
    assert model.n_bytes == 0
    assert files(tmp_path) == []


# -- what cannot be saved or loaded -----------------------------------------------------------


def other_weights() -> Tiny:
    return Tiny.from_model(tiny_model("llama", seed=1), byte_tokenizer(), max_tokens=6)


def other_template() -> Tiny:
    tokenizer = byte_tokenizer(templates.THINK)
    return Tiny.from_model(tiny_model("llama"), tokenizer, max_tokens=6)


def no_room() -> Tiny:
    cache = CacheConfig(budget_bytes=1)
    return Tiny.from_model(tiny_model("llama"), byte_tokenizer(), max_tokens=6, cache=cache)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, cut, empty])
def test_a_damaged_file_costs_time_and_nothing_else(
    damage: Any, tiny_chat: MakeChat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner, model = InMemorySaver(), tiny_chat()
    said = first_process(tiny_chat(), inner, tmp_path, "Plan")
    damage(files(tmp_path)[0])
    saver = SideQuestSaver(inner, model, folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        onward = say(talk(model, saver), "then Rome", on("t"))
    assert onward[:2] == said
    check_reply(model, onward)
    assert read(onward[-1]) == 0
    assert ["was not loaded" in record.message for record in caplog.records] == [True]
    saver.flush()  # the file is a good one again
    model.kv.clear()
    assert saver.load_thread("t").n_tokens > 0


@pytest.mark.parametrize(
    ("make", "why"),
    [(other_weights, "weights"), (other_template, "template"), (no_room, "BudgetExceeded")],
)
def test_what_cannot_be_loaded_is_computed_again(
    make: Any, why: str, tiny_chat: MakeChat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner, model = InMemorySaver(), make()
    first_process(tiny_chat(), inner, tmp_path, "Plan")
    saver = SideQuestSaver(inner, model, folder=tmp_path)
    app = talk(model, saver)
    with caplog.at_level(logging.WARNING):
        onward = say(app, "then Rome", on("t"))
    assert model.answered(onward[-1]) == greedy(
        model.engine._core.adapter.model, model.prompt_ids(onward[:-1]), 6
    )
    assert read(onward[-1]) == 0
    assert why in caplog.text
    model.engine.close()


def test_a_file_that_is_not_there_is_named(tiny_chat: MakeChat, tmp_path: Path) -> None:
    saver = SideQuestSaver(InMemorySaver(), tiny_chat(), folder=tmp_path)
    with pytest.raises(SavedThreadError, match="cannot be opened"):
        saver.load_thread("none")


def test_where_nothing_can_be_written_the_graph_runs_on(
    tiny_chat: MakeChat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("a file")
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path / "kv")
    app = talk(model, saver)
    with caplog.at_level(logging.WARNING):
        for text in ("Plan", "then Rome"):
            check_reply(model, say(app, text, on("t")))
        saver.flush()
    assert "was not saved" in caplog.text
    with pytest.raises(OSError, match="kv"):
        saver.save_thread("t")


# -- nothing waits, nothing is kept ------------------------------------------------------------


async def test_loading_never_holds_up_the_event_loop(tiny_chat: MakeChat, tmp_path: Path) -> None:
    inner, model = InMemorySaver(), tiny_chat()
    await asyncio.to_thread(first_process, tiny_chat(), inner, tmp_path, "Plan")
    saver = SideQuestSaver(inner, model, folder=tmp_path)
    may_load = threading.Event()
    saver._files._worker.submit(may_load.wait, 30)  # something else is saved just now
    first, second = (asyncio.create_task(saver.aget_tuple(on("t"))) for _ in range(2))
    for _ in range(10):
        await asyncio.sleep(0.005)
    assert not first.done()
    assert not second.done()
    first.cancel()  # the other one still waits for the same loading
    await asyncio.wait([first])
    may_load.set()
    assert (await second) is not None
    assert first.cancelled()
    assert model.n_bytes > 0


def test_a_saver_is_forgotten_with_its_last_user(tiny_chat: MakeChat, tmp_path: Path) -> None:
    model = tiny_chat()
    saver = SideQuestSaver(InMemorySaver(), model, folder=tmp_path)
    app = talk(model, saver)
    say(app, "Plan", on("t"))
    saver.flush()
    seen = weakref.ref(saver), weakref.ref(saver._files)
    (worker,) = saver._files._worker._threads
    del app, saver
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in seen) and time.monotonic() < deadline:
        gc.collect()
    assert [ref() for ref in seen] == [None, None]
    worker.join(10)
    assert not worker.is_alive()


def test_what_is_known_of_threads_is_bounded(
    tiny_chat: MakeChat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidequest_langchain.graph.saver_files.MAX_THREADS", 3)
    saver = SideQuestSaver(InMemorySaver(), tiny_chat(), folder=tmp_path)
    for n in range(9):
        saver.get_tuple(on(f"t{n}"))
        saver._files.note(f"t{n}")
    assert list(saver._files._met) == list(saver._files._unsaved) == ["t6", "t7", "t8"]


def test_a_saver_without_a_folder_says_so(tiny_chat: MakeChat) -> None:
    saver = SideQuestSaver(InMemorySaver(), tiny_chat())
    saver.flush()
    for act in (saver.save_thread, saver.load_thread):
        with pytest.raises(ConfigError, match="folder="):
            act("t")
