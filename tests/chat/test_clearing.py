"""Cleared results of tools at the chat model: which prompt is made, and what an answer tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.chat.clearing import (
    FedResults,
    is_cleared,
    n_most_prompt_tokens,
    replies_after_cleared,
)
from sidequest_langchain.config import CacheConfig, Protection
from sidequest_langchain.errors import ConfigError, RequestError
from tests.engine.clearing import Cleared, differs
from tests.support.oracle import greedy
from tests.support.templates import PLAIN, THINK, TOOLS
from tests.support.tiny import tiny_model

MakeChat = Callable[..., SideQuestChatModel]
RESULT = "Paris 3 days then Rome and Oslo 7 days"
MARK = {"context_editing": {"cleared": True, "strategy": "clear_tool_uses"}}


def talk(text: Any = RESULT, call: str = "c1", **given: Any) -> list[BaseMessage]:
    return [
        HumanMessage("Plan"),
        AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": call}]),
        ToolMessage(text, tool_call_id=call, **given),
    ]


def cleared(messages: list[BaseMessage], at: int = 2) -> list[BaseMessage]:
    """The messages with one of them cleared, as LangChain does it."""
    update = {"content": "[cleared]", "response_metadata": MARK}
    return [m.model_copy(update=update) if i == at else m for i, m in enumerate(messages)]


def clearing(message: BaseMessage) -> Any:
    return message.response_metadata["sidequest"].get("clearing")


def answered(chat: SideQuestChatModel, message: BaseMessage) -> list[int]:
    reply = chat.engine.replies.get(str(message.id))
    assert reply is not None
    return list(reply.token_ids)


def in_plain_words(chat: SideQuestChatModel, messages: list[BaseMessage]) -> list[int]:
    return greedy(tiny_model("llama"), chat.prompt_ids(messages), chat.max_tokens or 8)


@pytest.mark.parametrize("template", [TOOLS, PLAIN], ids=["tools", "plain"])
def test_the_prompt_keeps_the_text_and_the_rows_go(make_chat: MakeChat, template: str) -> None:
    chat = make_chat(template=template, on_edit="reuse")
    first = chat.invoke(talk())
    messages = [*talk(), first, HumanMessage("And then")]
    n_bytes = chat.kv.usage().n_bytes
    second = chat.invoke(cleared(messages))
    report = clearing(second)
    assert (report["on_edit"], report["cleared"], report["kept"]) == ("reuse", ["c1"], {})
    n_rows = report["evicted_rows"]
    n_result = len(chat.get_token_ids(RESULT))
    assert n_result - 2 <= n_rows <= n_result
    assert report["freed_bytes"] == n_rows * 512
    # The prompt is that of the whole conversation, and so are its positions.
    assert second.usage_metadata is not None
    n_prompt = len(chat.prompt_ids(messages))
    assert second.usage_metadata["input_tokens"] == n_prompt
    n_new = n_prompt - second.usage_metadata["input_token_details"]["cache_read"]
    n_said = len(answered(chat, second))
    n_stored = n_new + n_said - (n_said == chat.max_tokens)
    assert chat.kv.usage().n_bytes == n_bytes + (n_stored - n_rows) * 512


def test_a_model_that_thinks(make_chat: MakeChat) -> None:
    """B47: in the live loop all is reused; a new question drops the thoughts, and with them it."""
    chat = make_chat(template=THINK, on_edit="reuse")
    first = chat.invoke(talk())
    loop = [*talk(), *talk("Lisbon", "c2")[1:]]
    second = chat.invoke(cleared(loop))
    assert clearing(second)["on_edit"] == "reuse"
    assert (
        second.response_metadata["sidequest"]["reused_tokens"] >= len(chat.prompt_ids(talk())) - 5
    )
    messages = cleared([*talk(), first, HumanMessage("And then")])
    third = chat.invoke(messages)
    assert clearing(third)["on_edit"] == "recompute"
    assert answered(chat, third) == in_plain_words(chat, messages)


def test_what_is_said_is_what_masked_rows_leave(make_chat: MakeChat) -> None:
    chat = make_chat(template=TOOLS, on_edit="reuse", logprobs=True, top_logprobs=5)
    told: list[Any] = []
    submit = chat.engine.submit

    def noted(request: Any, sink: Any) -> Any:
        def listen(event: Any) -> None:
            told.append((request, event))
            sink(event)

        return submit(request, listen)

    first = chat.invoke(talk())
    chat.engine.submit = noted  # type: ignore[method-assign]
    chat.invoke(cleared([*talk(), first, HumanMessage("And then")]))
    request, event = told[-1]
    [run] = request.clearing.runs
    gone = [Cleared(run.first, run.last, event.result.n_reused_tokens)]
    assert differs("llama", request, event.result, gone) < 1e-4


def test_by_default_it_is_the_text_alone(make_chat: MakeChat) -> None:
    chat = make_chat(template=TOOLS)
    first = chat.invoke(talk())
    messages = cleared([*talk(), first, HumanMessage("And then")])
    second = chat.invoke(messages)
    assert clearing(second) is None
    assert answered(chat, second) == in_plain_words(chat, messages)
    # The rows of the text that was replaced are gone: no path needs them.
    n_said = len(answered(chat, second))
    n_stored = len(chat.prompt_ids(messages)) + n_said - (n_said == chat.max_tokens)
    assert chat.kv.usage().n_tokens == n_stored


def test_one_call_may_say_so(make_chat: MakeChat) -> None:
    chat = make_chat(template=TOOLS)
    first = chat.invoke(talk(), on_edit="reuse")
    messages = cleared([*talk(), first, HumanMessage("And then")])
    assert clearing(chat.invoke(messages, on_edit="reuse"))["on_edit"] == "reuse"
    assert clearing(chat.invoke(messages)) is None


def test_a_text_that_was_never_fed_is_replaced(make_chat: MakeChat) -> None:
    chat = make_chat(template=TOOLS, on_edit="reuse")
    messages = [*cleared(talk()), AIMessage("Fine"), HumanMessage("And then")]
    reply = chat.invoke(messages)
    assert clearing(reply)["on_edit"] == "recompute"
    assert "not fed to this model" in clearing(reply)["why"]
    assert answered(chat, reply) == in_plain_words(chat, messages)


def test_a_result_that_was_never_fed_does_not_cost_the_others(make_chat: MakeChat) -> None:
    """Two calls at once: the first result was cleared before anybody read it."""
    chat = make_chat(template=TOOLS, on_edit="reuse")
    first = chat.invoke(talk())
    head = [*talk(), first, *talk("Lisbon 9 days", "c2")[1:]]
    second = chat.invoke(cleared(cleared(head), 5))
    assert clearing(second)["cleared"] == ["c1"]
    third = chat.invoke(cleared(cleared([*head, second, HumanMessage("And then")]), 5))
    assert clearing(third)["cleared"] == ["c1"]
    assert third.response_metadata["sidequest"]["prefilled_tokens"] < 20


@pytest.mark.parametrize("how", ["exact", "for it alone"])
def test_who_wants_it_exact_gets_the_text(make_chat: MakeChat, how: str) -> None:
    chat = make_chat(template=TOOLS, on_edit="reuse")
    first = chat.invoke(talk())
    messages = cleared([*talk(), first, HumanMessage("And then")])
    if how == "for it alone":
        messages[2].response_metadata = {**MARK, "sidequest": {"on_edit": "recompute"}}
    reply = chat.invoke(messages, exact=how == "exact")
    assert clearing(reply) is None
    assert answered(chat, reply) == in_plain_words(chat, messages)


def test_protected_text_stays(make_chat: MakeChat) -> None:
    cache = CacheConfig(protection=Protection(protect_text=("Rome",)))
    chat = make_chat(template=TOOLS, on_edit="reuse", cache=cache)
    first = chat.invoke(talk())
    second = chat.invoke(cleared([*talk(), first, HumanMessage("And then")]))
    [receipt] = [r for r in chat.kv.receipts() if getattr(r, "policy", "") == "clearing"]
    assert len(receipt.runs) == 2
    assert "Rome" not in receipt.text
    assert clearing(second)["cleared"] == ["c1"]
    n_result = len(chat.get_token_ids(RESULT))
    assert receipt.n_rows < n_result


def test_samples_of_one_prompt(make_chat: MakeChat) -> None:
    chat = make_chat(template=TOOLS, on_edit="reuse", temperature=0.7, seed=1)
    first = chat.invoke(talk())
    messages = cleared([*talk(), first, HumanMessage("And then")])
    result = chat.generate([messages], n=3)
    reports = [clearing(g.message) for g in result.generations[0]]  # type: ignore[attr-defined]
    assert all(report["on_edit"] == "reuse" for report in reports)
    assert sorted(report["evicted_rows"] > 0 for report in reports) == [False, False, True]


def test_it_is_part_of_what_identifies_an_answer(make_chat: MakeChat) -> None:
    given = [make_chat(on_edit=on)._identifying_params for on in ("recompute", "reuse")]  # type: ignore[arg-type]
    assert [params["on_edit"] for params in given] == ["recompute", "reuse"]


def test_mistakes(make_chat: MakeChat) -> None:
    with pytest.raises((ConfigError, ValueError), match="on_edit"):
        make_chat(on_edit="forget")
    with pytest.raises(RequestError, match="on_edit must be 'recompute' or 'reuse'"):
        make_chat().invoke("Plan", on_edit="forget")


class TestFedResults:
    def whole(self, fed: FedResults, messages: list[BaseMessage], scope: str = "s") -> list[Any]:
        found, _ = fed._whole(scope, messages)
        return [m.content for m in found if isinstance(m, ToolMessage)]

    def test_texts_are_told_apart(self) -> None:
        fed = FedResults()
        fed.note("s", [*talk("one", id="m1"), *talk("two", "c2"), *talk("three", id="m3")])
        for message, text in (
            ({"call": "c1", "id": "m1"}, "one"),
            ({"call": "c2"}, "two"),
            ({"call": "c1", "id": "m3"}, "three"),
            ({"call": "c1"}, "[cleared]"),
            ({"call": "c3"}, "[cleared]"),
        ):
            assert self.whole(fed, cleared(talk("", **message))) == [text]
            assert self.whole(fed, cleared(talk("", **message)), "other") == ["[cleared]"]

    def test_blocks_come_back_as_they_were(self) -> None:
        fed = FedResults()
        blocks = [{"type": "text", "text": "one"}]
        fed.note("s", talk(blocks))
        assert self.whole(fed, cleared(talk(""))) == [blocks]

    def test_the_oldest_go_when_there_are_too_many(self) -> None:
        fed = FedResults(n_most_chars=25)
        for i in range(3):
            fed.note("s", talk("x" * 10, f"c{i}"))
        assert [self.whole(fed, cleared(talk("", f"c{i}")))[0] for i in range(3)] == [
            "[cleared]", "x" * 10, "x" * 10,
        ]  # fmt: skip
        fed.note("s", talk("y" * 30, "c9"))
        assert self.whole(fed, cleared(talk("", "c2"))) == ["[cleared]"]
        assert fed._n_chars == 0

    def test_what_fell_back_stays_so_until_it_is_fed_again(self) -> None:
        fed = FedResults()
        fed.note("s", talk())
        _, keys = fed._whole("s", cleared(talk("")))
        fed.forget(keys)
        assert self.whole(fed, cleared(talk(""))) == ["[cleared]"]
        fed.note("s", cleared(talk("")))
        assert self.whole(fed, cleared(talk(""))) == ["[cleared]"]
        fed.note("s", talk())
        assert self.whole(fed, cleared(talk(""))) == [RESULT]


@pytest.mark.parametrize(
    ("context", "max_tokens", "n_instead", "expected"),
    [
        (1000, 100, 500, 900),
        (1000, 100, 950, 950),
        (1000, None, 100, 488),
        (1000, None, 900, 900),
        (1000, 1, 999, 999),
        (1000, 5, 1200, 999),
    ],
)
def test_room_for_an_answer(
    context: int, max_tokens: int | None, n_instead: int, expected: int
) -> None:
    assert n_most_prompt_tokens(context, max_tokens, n_instead) == expected


def test_what_counts_as_cleared() -> None:
    assert is_cleared(ToolMessage("x", tool_call_id="c", response_metadata=MARK))
    for other in (
        ToolMessage("[cleared]", tool_call_id="c"),
        ToolMessage("x", tool_call_id="c", response_metadata={"context_editing": None}),
        ToolMessage("x", tool_call_id="c", response_metadata={"context_editing": {}}),
        AIMessage("x", response_metadata=MARK),
    ):
        assert not is_cleared(other)
    messages = [AIMessage("a", id="a"), *cleared(talk()), AIMessage("b", id="b")]
    assert replies_after_cleared(messages) == ("b",)
    assert replies_after_cleared(talk()) == ()
