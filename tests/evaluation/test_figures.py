"""Means, shares and tables, from rows made by hand."""

from __future__ import annotations

import pytest
from rich.console import Console

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation.arms import arms_of
from sidequest_langchain.evaluation.figures import results
from sidequest_langchain.evaluation.pages import marks
from sidequest_langchain.evaluation.sample import Task
from sidequest_langchain.evaluation.tables import blocks, show, write

TASKS = (
    Task(name="one", about=""),
    Task(name="two", about="", is_agent=True),
    Task(name="forced", about="", is_agent=True, is_forced=True),
)
ARMS = arms_of(["lru"], [0.5])

BEGIN, END = marks("evaluation")


def row(task: str, policy: str, *scores: float, n_bytes: int = 100, **given: object) -> dict:
    return {
        "task": task,
        "number": 0,
        "policy": policy,
        "budget": None if policy == "none" else 0.5,
        "error": None,
        "scores": list(scores),
        "peak_bytes": 2 * n_bytes,
        "n_rows": n_bytes // 10,
        "n_bytes": n_bytes,
        "seconds": 1.5,
        "divergence": None,
        **given,
    }


DIVERGENCE = {"kl_max": 2.0, "top1": 0.5, "nll": 1.5, "nll_full": 1.0}
ROWS = [
    row("one", "none", 1.0, 1.0),
    row("two", "none", 0.5),
    row("forced", "none"),
    row("one", "lru", 1.0, 0.0, n_bytes=50),
    row("two", "lru", error="Bad: luck", n_asked=2),
    row("forced", "lru", n_bytes=40, divergence={**DIVERGENCE, "kl": 0.2, "n_tokens": 30}),
    row("forced", "lru", n_bytes=40, divergence={**DIVERGENCE, "kl": 0.6, "n_tokens": 10}),
    row("other", "lru", 1.0),
]


@pytest.fixture
def document() -> dict:
    return {
        "date": "2000-01-01",
        "command": "sidequest eval",
        "model": "m",
        "tokens": 1500,
        "samples": 1,
        "threads": 1,
        "machine": {"system": "s", "python": "3"},
        "versions": {"torch": "2"},
        "tasks": {
            t.name: {"about": "", "is_agent": t.is_agent, "is_forced": t.is_forced} for t in TASKS
        },
        "results": results(ROWS, ARMS, TASKS),
    }


class TestResults:
    def test_of_the_full_cache(self):
        full = results(ROWS, ARMS, TASKS)[0]

        assert full["scores"] == {"one": 1.0, "two": 0.5}
        assert (full["mean"], full["agent_mean"], full["of_full"]) == (0.75, 0.5, 1.0)
        assert (full["peak_share"], full["rows_share"]) == (1.0, 1.0)
        assert full["kl"] is None

    def test_of_a_policy(self):
        found = results(ROWS, ARMS, TASKS)[1]

        assert found["scores"] == {"one": 0.5, "two": 0.0}
        assert found["of_full"] == pytest.approx(0.25 / 0.75)
        assert found["errors"] == {"Bad": {"n": 1, "example": "luck"}}
        assert found["n_runs"] == 4

    def test_divergences_are_means_over_tokens(self):
        found = results(ROWS, ARMS, TASKS)[1]

        assert found["kl"] == pytest.approx((0.2 * 30 + 0.6 * 10) / 40)
        assert found["kl_max"] == 2.0
        assert found["nll_delta"] == pytest.approx(0.5)

    def test_shares_are_of_the_samples_that_both_finished(self):
        found = results(ROWS, ARMS, TASKS)[1]

        assert found["bytes_share"] == pytest.approx((50 + 40 + 40) / 300)

    def test_a_sample_that_the_full_cache_failed_has_no_share(self):
        failed = row("one", "none", error="Bad: luck", n_asked=1) | {"number": 1, "n_bytes": 9}
        found = results([*ROWS, failed, row("one", "lru", 1.0) | {"number": 1}], ARMS, TASKS)[1]

        assert found["bytes_share"] == pytest.approx((50 + 40 + 40) / 300)

    def test_of_nothing(self):
        found = results([], ARMS, TASKS)

        assert found[0]["mean"] is found[1]["of_full"] is found[1]["peak_share"] is None


class TestTables:
    def test_a_block_for_each_budget_begins_with_the_full_cache(self, document):
        ((title, rows),) = blocks(document)

        assert title.startswith("Budget 50 %")
        assert rows[0][:4] == ["policy", "one", "two", "mean"]
        assert rows[1][:4] == ["full cache", "100", "50", "75.0"]
        assert rows[2][:4] == ["lru", "50", "0", "25.0"]
        assert len({len(row) for row in rows}) == 1

    def test_written_between_the_marks(self, document, tmp_path):
        page = tmp_path / "page.md"
        page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
        write(page, document)
        write(page, document)

        text = page.read_text(encoding="utf-8")
        assert text.startswith("before\n")
        assert text.endswith(f"{END}\nafter\n")
        assert "old" not in text
        assert text.count("| full cache | 100 | 50 | 75.0 |") == 1
        assert "1 of 4 runs failed and score nothing, for example: Bad: luck" in text

    def test_a_page_without_marks_is_refused(self, document, tmp_path):
        (tmp_path / "page.md").write_text("nothing", encoding="utf-8")

        with pytest.raises(ConfigError, match="no place for figures"):
            write(tmp_path / "page.md", document)

    def test_eighty_columns(self, document):
        console = Console(width=80)
        with console.capture() as shown:
            show(document, console)

        assert "25.0" in shown.get()
        assert max(map(len, shown.get().splitlines())) <= 80
