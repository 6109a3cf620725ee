"""What is shown fits 80 columns, on a terminal and in a pipe, and says what happened."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console

from sidequest_langchain.examples.tree_of_thoughts.console import (
    Lines,
    LiveTree,
    Silent,
    shown,
    tree_of,
    watcher_for,
)
from sidequest_langchain.examples.tree_of_thoughts.generator import generate
from sidequest_langchain.examples.tree_of_thoughts.planner import Release, Run, run_planner
from sidequest_langchain.examples.tree_of_thoughts.replay import Kept
from sidequest_langchain.examples.tree_of_thoughts.search import Limits
from sidequest_langchain.examples.tree_of_thoughts.tables import comparison, summary
from tests.examples.scripted import ScriptedModel, overlap

PROBLEM = generate(8, 3)


def console(*, is_terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=is_terminal, legacy_windows=False)


def printed(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def options_all(route: tuple[str, ...], options: Sequence[str]) -> Sequence[str]:
    return options


def misled() -> ScriptedModel:
    return ScriptedModel(choose=options_all, overlap=lambda *both: 1 - overlap(*both))


@pytest.fixture
def finished() -> Run:
    made = run_planner(misled(), PROBLEM, Limits(mode="dfs", n_samples=8), Silent())
    return Run(
        **{
            name: getattr(made, name)
            for name in ("problem", "method", "outcome", "plan", "violations", "records", "nodes")
        },
        wall_s=12.34,
        releases=tuple(
            Release(thought=" > ".join(PROBLEM.cities), reason="backtrack", n_bytes=n, n_tokens=1)
            for n in range(1_000_000, 1_000_012)
        ),
        peak_bytes=23_500_000,
        kept=Kept(peak_bytes=35_200_000, final_bytes=35_000_000),
        agreement=made.agreement,
    )


def test_lines_for_a_pipe_fit_and_carry_no_control_codes() -> None:
    to = console()
    run_planner(misled(), PROBLEM, Limits(mode="dfs", n_samples=8), Lines(to))
    text = printed(to)
    assert "\x1b" not in text
    assert "\r" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert text.startswith(f"{PROBLEM.name}, dfs: the model reads the problem\n")
    assert any(line.startswith("  dead ") for line in text.splitlines())


def test_every_thought_s_end_is_told_once() -> None:
    to = console()
    made = run_planner(misled(), generate(5, 1), Limits(mode="beam", n_samples=8), Lines(to))
    told = [line.split()[0] for line in printed(to).splitlines() if line.startswith("  ")]
    for status in ("pruned", "dead", "done"):
        expected = sum(thought.status == status for thought in made.nodes.values())
        assert told.count(status) == expected, status


def test_the_tree_has_every_thought_with_status_score_tokens_and_kv(finished: Run) -> None:
    to = console()
    resident = dict.fromkeys(finished.nodes, 2_500_000)
    to.print(tree_of(finished.nodes, {}, resident))
    lines = printed(to).splitlines()
    assert len(lines) == len(finished.nodes)
    assert max(cell_len(line) for line in lines) <= 80
    dead = next(line for line in lines if "dead" in line and "0 tok" in line)
    assert "2.5 MB" in dead


def test_the_live_tree_leaves_the_terminal_as_it_was() -> None:
    to = console(is_terminal=True)
    with shown(LiveTree(to)) as watcher:
        run_planner(misled(), generate(5, 1), Limits(mode="beam"), watcher)
    text = printed(to)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0
    assert "solved" in text


def test_the_cursor_comes_back_after_an_error() -> None:
    to = console(is_terminal=True)

    def fail(*_: object) -> Sequence[str]:
        raise RuntimeError

    with pytest.raises(RuntimeError), shown(LiveTree(to)) as watcher:
        run_planner(ScriptedModel(choose=fail), PROBLEM, Limits(mode="dfs"), watcher)
    assert printed(to).rstrip("\n").endswith("\x1b[?25h")


def test_the_console_decides_how_it_is_shown() -> None:
    assert isinstance(watcher_for(console(), is_quiet=False), Lines)
    assert isinstance(watcher_for(console(is_terminal=True), is_quiet=False), LiveTree)
    assert isinstance(watcher_for(console(is_terminal=True), is_quiet=True), Silent)


def test_the_summary_fits_and_says_all_that_was_measured(finished: Run) -> None:
    to = console()
    to.print(summary(finished))
    to.print(comparison([finished, finished]))
    text = printed(to)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    for part in (
        "solved",
        "model calls",
        "prefilled",
        "reused",
        "23.5 MB",
        "35.2 MB (measured)",
        "freed by backtrack",
        "12.0 MB in 12",
        "and 4 more",
        "12.3 s",
        "2/2",
    ):
        assert part in text, part


def test_a_run_without_a_plan_says_why() -> None:
    model = ScriptedModel(choose=options_all)
    made = run_planner(model, PROBLEM, Limits(mode="dfs", max_depth=1), Silent())
    to = console()
    to.print(summary(made))
    assert "no: every thought was a dead end" in printed(to)
    assert "longest beginning" in printed(to)
