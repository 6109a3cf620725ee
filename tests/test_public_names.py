"""The public face: its names are there, in order, and cost nothing until they are used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sidequest_langchain
from sidequest_langchain import policy

DESIGNED = {
    "SideQuestChatModel",
    "SideQuestCallbackHandler",
    "attach",
    "session",
    "branch",
    "prune",
    "keep_only",
    "backtrack",
    "aprune",
    "akeep_only",
    "abacktrack",
    "current_step",
    "SideQuestSaver",
    "SideQuestMiddleware",
    "CacheConfig",
    "Protection",
    "Schedule",
    "Tiers",
    "Guard",
}
FOR_POLICIES = {
    "Draft",
    "register_policy",
    "policy_names",
    "CacheFacts",
    "SegmentFacts",
    "TokenKind",
    "Need",
    "Evict",
    "EvictByHead",
    "Compress",
    "Archive",
    "Release",
}
HEAVY = ("torch", "transformers", "langchain_core", "langgraph", "rich")


def test_all_is_sorted_and_holds_the_designed_names() -> None:
    names = sidequest_langchain.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert set(names) >= DESIGNED


@pytest.mark.parametrize("name", sidequest_langchain.__all__)
def test_each_name_can_be_had(name: str) -> None:
    assert getattr(sidequest_langchain, name) is not None
    assert getattr(sidequest_langchain, name) is getattr(sidequest_langchain, name)
    assert name in dir(sidequest_langchain)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(sidequest_langchain.__file__).read_text(encoding="utf-8"))
    for_types = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert for_types | {"__version__"} == set(sidequest_langchain.__all__)


def test_what_policies_are_written_with_is_in_one_place_and_needs_no_torch() -> None:
    assert set(policy.__all__) >= FOR_POLICIES
    assert policy.__all__ == sorted(policy.__all__)
    assert all(getattr(policy, name) is not None for name in policy.__all__)
    assert loaded_after("from sidequest_langchain.policy import Draft, register_policy") == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        sidequest_langchain.no_such_name  # noqa: B018


def loaded_after(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after `statement`."""
    code = f"import sys; {statement}; print(*[n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(sidequest_langchain.__file__).parents[1])},
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import sidequest_langchain") == set()
    assert loaded_after("from sidequest_langchain import CacheConfig") == set()
    assert loaded_after("import sidequest_langchain.errors, sidequest_langchain.labels") == set()


def test_the_check_would_notice_torch() -> None:
    assert "torch" in loaded_after("import sidequest_langchain.kv.tree")


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(sidequest_langchain.__file__).parent / "py.typed").is_file()
