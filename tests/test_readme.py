"""The README's commands and first example are what works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.real
@pytest.mark.usefixtures("real_smollm")
def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = _blocks("python")[0]
    assert len(example.strip().splitlines()) <= 12
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert "'cache_read': " in lines[0]
    assert "ReleaseReceipt(" in lines[1]
    assert "freed_bytes=0" not in lines[1]


def test_all_examples_are_python() -> None:
    for example in _blocks("python"):
        compile(example, "README.md", "exec")


def test_make_has_the_targets_that_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^make (\w+)", "\n".join(_blocks("bash")), flags=re.MULTILINE))
    assert named
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


def test_documents_that_are_linked_exist() -> None:
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert linked
    assert all((ROOT / link).exists() for link in linked)
