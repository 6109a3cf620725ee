"""Which results a rule clears, and what a conversation lost since the last call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from sidequest_langchain import SideQuestMiddleware
from sidequest_langchain.chat.clearing import is_cleared
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.graph.conversations import (
    MOST_BRANCHES,
    MOST_CONVERSATIONS,
    Conversations,
    Place,
)
from sidequest_langchain.graph.middleware_edits import ClearingRule, as_text_only
from sidequest_langchain.labels import PathSelector

HERE = Place("t", ("model",))


def human(name: str, **given: Any) -> HumanMessage:
    return HumanMessage(name, id=name, **given)


def said(name: str, *calls: str, tool: str = "look") -> AIMessage:
    return AIMessage(
        name, id=name, tool_calls=[{"name": tool, "args": {}, "id": call} for call in calls]
    )


def result(call: str, n: int = 10, **given: Any) -> ToolMessage:
    return ToolMessage("x" * n, tool_call_id=call, id=f"result {call}", **given)


def talk(n: int) -> list[BaseMessage]:
    """A conversation with `n` results, each of them read."""
    found: list[BaseMessage] = [human("u")]
    for i in range(n):
        found += [said(f"a{i}", f"c{i}"), result(f"c{i}", 10 + i)]
    return [*found, said("end")]


def gone(messages: Sequence[BaseMessage], **given: Any) -> list[str]:
    """The calls whose results a rule clears; a token is a character here."""
    defaults = {
        "keep": 1,
        "trigger_tokens": None,
        "max_result_tokens": None,
        "exclude_tools": frozenset(),
    }
    before = [message.model_copy(deep=True) for message in messages]
    found = ClearingRule(**(defaults | given)).apply(
        messages,
        n_tokens=lambda found: sum(len(m.text) for m in found),
        n_tokens_of=lambda message: len(message.text),
    )
    assert list(messages) == before, "the conversation was changed"
    assert len(found) == len(before)
    for old, new in zip(before, found, strict=True):
        assert (new.id, new.type) == (old.id, old.type)
        if new != old:
            assert is_cleared(new)
            assert new.content == "[cleared]"
            assert new.artifact is None  # type: ignore[attr-defined]
    return [
        m.tool_call_id
        for m in found
        if isinstance(m, ToolMessage) and is_cleared(m) and m not in before
    ]


class TestRule:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, []),
            ({"trigger_tokens": 1000}, []),
            ({"trigger_tokens": 10}, ["c0", "c1", "c2"]),
            ({"trigger_tokens": 10, "keep": 0}, ["c0", "c1", "c2", "c3"]),
            ({"trigger_tokens": 10, "keep": 9}, []),
            ({"max_result_tokens": 11}, ["c2", "c3"]),
            ({"trigger_tokens": 10, "keep": 3, "max_result_tokens": 12}, ["c0", "c3"]),
            ({"trigger_tokens": 10, "exclude_tools": frozenset({"look"})}, []),
        ],
    )
    def test_by_age_and_size(self, given: dict[str, Any], expected: list[str]) -> None:
        assert gone(talk(4), **given) == expected

    def test_the_trigger_is_passed_not_met(self) -> None:
        n = sum(len(m.text) for m in talk(2))
        assert gone(talk(2), trigger_tokens=n) == []
        assert gone(talk(2), trigger_tokens=n - 1) == ["c0"]

    def test_what_was_not_read_stays(self) -> None:
        messages = [human("u"), said("a", "c0", "c1"), result("c0", 50), result("c1", 50)]
        assert gone(messages, trigger_tokens=1, keep=0, max_result_tokens=1) == []
        messages.append(said("b"))
        assert gone(messages, trigger_tokens=1, keep=0) == ["c0", "c1"]

    def test_a_message_may_name_its_tool_itself(self) -> None:
        messages = [human("u"), said("a", "c0"), result("c0", name="search"), said("b")]
        assert gone(messages, max_result_tokens=1, exclude_tools=frozenset({"look"})) == ["c0"]
        assert gone(messages, max_result_tokens=1, exclude_tools=frozenset({"search"})) == []

    def test_what_is_cleared_stays_so(self) -> None:
        other = result(
            "c0", response_metadata={"context_editing": {"cleared": True, "strategy": "theirs"}}
        )
        messages = [human("u"), said("a", "c0"), other, said("b")]
        assert gone(messages, max_result_tokens=1) == []

    def test_left_to_the_text(self) -> None:
        mark = {"context_editing": {"cleared": True}, "other": 1}
        messages = [human("u"), result("c0", response_metadata=mark), result("c1")]
        found = as_text_only(messages)
        assert found[1].response_metadata == {**mark, "sidequest": {"on_edit": "recompute"}}
        assert found[0::2] == messages[0::2]
        assert messages[1].response_metadata == mark


def names(*ids: str) -> list[BaseMessage]:
    """Messages by their ids: what begins with `a` is a reply, with `S` a summary."""
    return [
        said(name)
        if name.startswith("a")
        else human(name, additional_kwargs={"lc_source": "summarization"} if name[0] == "S" else {})
        for name in ids
    ]


class TestConversations:
    @pytest.mark.parametrize(
        ("before", "now", "expected"),
        [
            ("u1 a1 u2 a2", "u1 a1 u2 a2 u3", ""),  # it goes on
            ("u1 a1 u2 a2", "S1 u3", "a1 a2"),  # summarised
            ("u1 a1 u2 a2", "S1 a2 u3", "a1"),  # with a tail
            ("u1 a1 u2 a2", "u2 a2 u3", "a1"),  # trimmed in the state
            ("u1 a1 u2 a2 u3 a3", "u1 u3 a3 u4", "a1 a2"),  # out of the middle
            ("u1 a1 u2 a2", "u1 a1 u9", ""),  # back to a checkpoint
            ("u1 a1 u2 a2", "u7 a7", ""),  # something else altogether
            ("u1 a1", "", ""),
            ("", "u1", ""),
        ],
    )
    def test_what_was_replaced(self, before: str, now: str, expected: str) -> None:
        book = Conversations()
        if before:
            book.hold(HERE, names(*before.split()))
        assert book.replaced(HERE, names(*now.split())) == tuple(expected.split())

    def test_back_to_before_a_summary(self) -> None:
        book = Conversations()
        for held in ("u1 a1 u2 a2", "S1 a2 u3 a3"):
            book.hold(HERE, names(*held.split()))
        assert book.replaced(HERE, names("u1", "a1", "u2", "a2", "u9")) == ()

    def test_back_to_a_branch_that_was_forgotten(self) -> None:
        book = Conversations()
        book.hold(HERE, names("u1", "a1", "u2", "a2"))
        for i in range(MOST_BRANCHES):
            book.hold(HERE, names("S1", "a2", f"v{i}", f"a-{i}"))
        assert book.replaced(HERE, names("u1", "a1", "u2", "a2", "u9")) == ()

    def test_a_summary_of_one_of_two_branches(self) -> None:
        book = Conversations()
        for held in ("u1 a1 u2 a2", "u1 a1 u9 a9"):
            book.hold(HERE, names(*held.split()))
        assert book.replaced(HERE, names("S1", "a2", "u3")) == ("a1",)
        assert book.replaced(HERE, names("S1", "a9", "u3")) == ("a1",)
        assert book.replaced(HERE, names("S1", "u3")) == ()  # of which, nobody can tell

    def test_asking_changes_nothing(self) -> None:
        book = Conversations()
        book.hold(HERE, names("u1", "a1", "u2", "a2"))
        now = names("S1", "u3")
        assert book.replaced(HERE, now) == book.replaced(HERE, now) == ("a1", "a2")
        book.hold(HERE, [*now, *names("a3")])
        assert book.replaced(HERE, [*now, *names("a3", "u4")]) == ()

    def test_threads_and_nodes_are_apart(self) -> None:
        book = Conversations()
        book.hold(HERE, names("u1", "a1"))
        for other in (Place("other", ("model",)), Place("t", ("agent", "model"))):
            assert book.replaced(other, names("S1", "u2")) == ()

    def test_without_a_thread_messages_tell_conversations_apart(self) -> None:
        book, here = Conversations(), Place(None, ("model",))
        book.hold(here, names("u1", "a1", "u2", "a2"))
        book.hold(here, names("v1", "a8", "v2", "a9"))
        assert book.replaced(here, names("S1", "a2", "u3")) == ("a1",)
        assert book.replaced(here, names("S2", "a9", "v3")) == ("a8",)
        assert book.replaced(here, names("S3", "w3")) == ()

    def test_the_least_recently_used_are_forgotten(self) -> None:
        book = Conversations()
        book.hold(HERE, names("u1", "a1"))
        for i in range(MOST_CONVERSATIONS):
            book.hold(Place(f"t{i}", ()), names(f"u{i}"))
        assert book.replaced(HERE, names("S1", "u2")) == ()

    def test_a_reply_with_another_message_id(self) -> None:
        """Streamed events of version 3 put an id of their own in its place."""
        book = Conversations()
        message = AIMessage("a", id="run-1", response_metadata={"sidequest": {"call_id": "sq-1"}})
        book.hold(HERE, [human("u1"), message])
        assert book.replaced(HERE, names("S1", "u2")) == ("sq-1",)


class Served:
    """What the middleware needs of a chat model, and what it asked to release."""

    def __init__(self) -> None:
        self.released: list[tuple[str | None, str]] = []
        self.engines = self
        self.cache_config = CacheConfig()
        self.kv = self

    def live(self) -> tuple[Served, ...]:
        return (self,)

    def post_release(self, selector: PathSelector, *, reason: str, name: str) -> None:
        assert selector.path_id == name
        self.released.append((name, reason))


def called(
    middleware: SideQuestMiddleware,
    model: Any,
    messages: list[BaseMessage],
    answer: AIMessage | Exception,
) -> ModelRequest[Any]:
    """One call by way of the middleware; the request as the model got it."""
    got: list[ModelRequest[Any]] = []

    def handler(request: ModelRequest[Any]) -> ModelResponse[Any]:
        got.append(request)
        if isinstance(answer, Exception):
            raise answer
        return ModelResponse(result=[answer])

    request = ModelRequest(model=model, messages=messages, state={"messages": messages})
    middleware.wrap_model_call(request, handler)
    return got[0]


class TestCalls:
    def test_a_call_that_fails_gives_nothing_back_yet(self) -> None:
        served, middleware = Served(), SideQuestMiddleware()
        called(middleware, served, names("u1"), said("a1"))
        called(middleware, served, names("u1", "a1", "u2"), said("a2"))
        now = names("S1", "a2", "u3")
        with pytest.raises(RuntimeError, match="broke"):
            called(middleware, served, now, RuntimeError("broke"))
        assert served.released == []
        called(middleware, served, now, said("a3"))
        assert served.released == [("a1", "replaced in the conversation")]
        called(middleware, served, [*now, *names("a3", "u4")], said("a4"))
        assert len(served.released) == 1

    @pytest.mark.parametrize(
        ("given", "calls", "expected"),
        [(True, (), ["a1", "a2"]), (True, ("c1",), []), (None, (), []), (False, (), [])],
    )
    def test_the_end_of_an_agent(
        self, given: bool | None, calls: tuple[str, ...], expected: list[str]
    ) -> None:
        served = Served()
        middleware = SideQuestMiddleware(release_on_end=given)
        called(middleware, served, names("u1", "a1", "u2"), said("a2", *calls))
        assert [name for name, _ in served.released] == expected

    @pytest.mark.parametrize("on_edit", ["recompute", "reuse"])
    def test_what_the_model_is_told(self, on_edit: Any) -> None:
        middleware = SideQuestMiddleware(on_edit=on_edit)
        request = called(middleware, Served(), names("u1"), said("a1"))
        assert request.model_settings == {"on_edit": on_edit}
        other = called(middleware, object(), names("u1"), said("a1"))
        assert other.model_settings == {}

    def test_the_cache_may_be_another_models(self) -> None:
        """Of a model behind a router, say: what is called is not known to have a cache."""
        served = Served()
        middleware = SideQuestMiddleware(release_on_end=True)
        middleware._served = served
        request = called(middleware, object(), names("u1", "a1"), said("a2"))
        assert request.model_settings == {}
        assert [name for name, _ in served.released] == ["a1", "a2"]
