"""Bars on a terminal, lines elsewhere, and nothing before there is something to say."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from sidequest_langchain.models.progress import Stage, on_console, shown, silent


def _terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", console.file.getvalue())


def test_bars_on_a_terminal():
    console = _terminal()
    with on_console(console) as progress:
        progress(Stage(text="downloading", done_bytes=0, total_bytes=2_000_000))
        progress(Stage(text="downloading", done_bytes=1_000_000, total_bytes=2_000_000))
        progress(Stage(text="converting"))

    last = _text(console).splitlines()[-2:]
    assert last[0].startswith("✓ downloading")
    assert "MB" in last[0]
    assert last[1].startswith("✓ converting")


def test_bars_fit_the_terminal():
    console = _terminal(60)
    with on_console(console) as progress:
        progress(Stage(text="converting qwen2.5-coder-0.5b, once (about 1 min)"))

    assert 50 < max(map(len, _text(console).splitlines())) <= 60


def test_a_stage_that_failed_is_not_ticked():
    console = _terminal()

    def fail() -> None:
        with on_console(console) as progress:
            progress(Stage(text="converting"))
            int("x")

    with pytest.raises(ValueError, match="invalid literal"):
        fail()

    assert "converting" in _text(console)
    assert "✓" not in _text(console)


def test_nothing_is_drawn_where_nothing_is_said():
    console = _terminal()
    with on_console(console):
        pass

    assert _text(console) == ""


def test_a_line_per_stage_elsewhere():
    console = Console(file=io.StringIO(), force_terminal=False)
    with on_console(console) as progress:
        for n_done in range(3):
            progress(Stage(text="downloading [1/2]", done_bytes=n_done, total_bytes=3))
        progress(Stage(text="converting"))

    assert _text(console) == "downloading [1/2]\nconverting\n"


def test_log_lines_where_nobody_looks(caplog, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with caplog.at_level(logging.INFO, logger="sidequest_langchain"), shown(None) as progress:
        progress(Stage(text="downloading"))
        progress(Stage(text="converting"))

    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "downloading"),
        ("INFO", "converting"),
    ]


def test_the_report_that_is_given_is_used():
    with shown(silent) as progress:
        assert progress is silent
