"""What the README and the page on the managed cache tell to type is what works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from sidequest_langchain import CacheConfig, Guard, Protection, SideQuestChatModel
from sidequest_langchain.policy import policy_names, registry
from tests.support.templates import PLAIN
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MANAGED = (ROOT / "docs" / "managed-cache.md").read_text(encoding="utf-8")
WORDS = " ".join(f"word{i}" for i in range(18))
THOUGHTS = " ".join(f"mull{i}" for i in range(18))
TALK = [HumanMessage("Hi"), AIMessage(f"<think>{THOUGHTS}</think>{WORDS}"), HumanMessage("Go on")]
TIGHT = CacheConfig(
    policy="window",
    budget_tokens=200,
    prefill_chunk=32,
    protection=Protection(n_sink=2, recent_window=16, ends=0.0),
    guard=Guard(max_kl=None),
)


def _tested(text: str) -> dict[str, str]:
    """The examples that a test runs, by the name in the comment above them."""
    return dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", text, flags=re.DOTALL))


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


@pytest.mark.real
@pytest.mark.usefixtures("real_smollm")
def test_the_example_of_a_managed_cache_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(_tested(README)["managed"], "README.md", "exec"), names)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "'compressed_rows': " in lines[0]
    assert "'compressed_rows': 0" not in lines[0]
    n_bytes, n_most = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", lines[1]))
    assert 0 < n_bytes <= n_most == names["cache"].budget_bytes
    # The comment beside the budget.
    engine = names["managed"].engine
    n_rows = n_most // engine._core.tree.bytes_per_token
    assert f"# {n_rows} rows of this model" in _tested(README)["managed"]


@pytest.fixture
def make_managed() -> Iterator[Callable[..., SideQuestChatModel]]:
    chats: list[SideQuestChatModel] = []

    def make(**settings: Any) -> SideQuestChatModel:
        chats.append(
            SideQuestChatModel.from_model(
                tiny_model("llama"),
                byte_tokenizer(PLAIN),
                cache=replace(TIGHT, **settings),
                max_tokens=8,
            )
        )
        return chats[-1]

    yield make
    for chat in chats:
        chat.engine.close()


def _evicted(chat: SideQuestChatModel) -> list[Any]:
    return [r for r in chat.kv.receipts() if getattr(r, "verb", "") == "evict"]


@pytest.mark.parametrize("name", sorted({*_tested(MANAGED)} - {"policy"}))
def test_the_examples_on_the_managed_cache_run(
    name: str,
    make_managed: Callable[..., SideQuestChatModel],
    capsys: pytest.CaptureFixture[str],
) -> None:
    # An exact call needs room for all of its rows.
    model = make_managed(**({"budget_tokens": 340} if name == "exact" else {}))
    names: dict[str, Any] = {"model": model, "messages": TALK}
    exec(compile(_tested(MANAGED)[name], "managed-cache.md", "exec"), names)
    out = capsys.readouterr().out
    if name == "receipts":
        assert "'evicted_rows': " in out
        assert "evict " in out
        assert "RunReceipt(" in out
    if name == "exact":
        assert not _evicted(model)
        model.invoke(TALK)
        assert _evicted(model)
    assert isinstance(names.get("config", CacheConfig()), CacheConfig)


def test_all_examples_on_the_managed_cache_are_run() -> None:
    assert len(_tested(MANAGED)) == MANAGED.count("```python")


def test_the_example_of_a_policy_lets_thoughts_go_first(
    make_managed: Callable[..., SideQuestChatModel],
) -> None:
    names: dict[str, Any] = {}
    example = _tested(MANAGED)["policy"]
    try:
        exec(compile(example, "managed-cache.md", "exec"), names)
        assert "thoughts_first" in policy_names()
        chat = make_managed(policy=names["config"].policy, budget_tokens=260)
        chat.invoke(TALK)
        gone = _evicted(chat)
        assert {r.reason for r in gone} == {"a thought"}
        letters = set("".join(r.text for r in gone))
        assert letters >= set("mul")
        assert not letters & set("word"), "an answer went before all thoughts had gone"
        assert len(example.split("@register_policy")[1].strip().splitlines()) <= 10
    finally:
        registry._POLICIES.pop("thoughts_first", None)


def test_all_policies_are_told() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", MANAGED.split("## Policies")[1], re.M)) == {
        *policy_names()
    }


def test_all_examples_are_python() -> None:
    for example in _blocks("python"):
        compile(example, "README.md", "exec")


def test_make_has_the_targets_that_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^make (\w+)", "\n".join(_blocks("bash")), flags=re.MULTILINE))
    assert named
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


def test_documents_that_are_linked_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
        assert linked or page.name != "README.md"
        assert all((page.parent / link).exists() for link in linked)


def test_sections_that_are_linked_exist() -> None:
    anchors = re.findall(r"\]\(#([\w-]+)\)", README)
    headings = [h.lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", README, re.M)]
    assert anchors
    assert set(anchors) <= set(headings)
