"""The page on threads: its program runs as it is printed, on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sidequest_langchain
from sidequest_langchain import SideQuestSaver
from tests.graph.conftest import Tiny

PAGE = (Path(__file__).parents[2] / "docs" / "threads.md").read_text(encoding="utf-8")


def test_the_program_of_the_page_runs(
    tiny_chat: Callable[..., Tiny],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"<!-- test: threads -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for delete in (False, True):  # first a process that leaves the thread, then the next one
        model = tiny_chat(max_tokens=16)
        monkeypatch.setattr(sidequest_langchain, "SideQuestChatModel", lambda made=model, **_: made)
        text = program if delete else program.replace('saver.delete_thread("trip")', "")
        names: dict[str, Any] = {}
        exec(compile(text, "docs/threads.md", "exec"), names)
        names["database"].close()
        held, taken, n_bytes = capsys.readouterr().out.splitlines()
        assert "state='resident'" in held
        assert int(re.findall(r"'cache_read': (\d+)", taken)[0]) > 0
        assert (int(n_bytes) == 0) == delete
        assert len(list((tmp_path / "talk-kv").iterdir())) == (0 if delete else 1)
        model.engine.close()


def test_what_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(?:saver\.)?([a-z_]+_thread|flush|kv_of|akv_of)\b", PAGE))
    assert named >= {"kv_of", "akv_of", "save_thread", "load_thread", "asave_thread", "flush"}
    for name in named:
        assert hasattr(SideQuestSaver, name)
