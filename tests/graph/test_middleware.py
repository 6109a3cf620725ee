"""`SideQuestMiddleware` in agents of LangChain: what is fed, what leaves, what comes back."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    SummarizationMiddleware,
)
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError

from sidequest_langchain import SideQuestChatModel, SideQuestMiddleware
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.policy.receipts import ActReceipt
from tests.graph.agents import PLACES, answers, call, look, saying, told, told_of
from tests.support.oracle import greedy
from tests.support.templates import TOOLS
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

MakeAgent = Callable[..., Any]
BYTES_PER_TOKEN = 512
QUESTION = {"messages": [("user", "Plan a trip.")]}


@pytest.fixture
def make_model() -> Iterator[Callable[..., SideQuestChatModel]]:
    """Chat models over a fresh tiny llama with a template for tools."""
    made: list[SideQuestChatModel] = []

    def make(*, n_context: int = 4096, **given: Any) -> SideQuestChatModel:
        made.append(
            SideQuestChatModel.from_model(
                tiny_model("llama", max_position_embeddings=n_context),
                byte_tokenizer(TOOLS),
                **({"max_tokens": 48} | given),
            )
        )
        return made[-1]

    yield make
    for model in made:
        model.engine.close()
    made.clear()
    gc.collect()


@pytest.fixture
def model(make_model: Callable[..., SideQuestChatModel]) -> SideQuestChatModel:
    return make_model()


def clearing_agent(
    model: Any, *others: Any, keep: int = 1, checkpointer: Any = None, **given: Any
) -> Any:
    """An agent whose tool results are cleared by LangChain's middleware."""
    edits = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=keep)])
    middleware = [edits, *others, SideQuestMiddleware(**given)]
    return create_agent(model, [look], middleware=middleware, checkpointer=checkpointer)


def cleared(messages: list[BaseMessage], keep: int) -> list[BaseMessage]:
    """The messages as LangChain's middleware sends them."""
    found = [message.model_copy() for message in messages]
    ClearToolUsesEdit(trigger=1, keep=keep).apply(found, count_tokens=lambda _: 2)  # type: ignore[arg-type]
    return found


def calls_of(n: int) -> list[str]:
    return [call(place) for place in PLACES[:n]]


def freed(model: SideQuestChatModel) -> int:
    acts = [r for r in model.kv.receipts() if isinstance(r, ActReceipt)]
    return sum(r.freed_bytes for r in acts if r.outcome == "done")


class TestReuse:
    def test_nothing_is_computed_again_and_exact_bytes_go(self, model: SideQuestChatModel) -> None:
        agent = clearing_agent(model, on_edit="reuse")
        with saying(model, *calls_of(4), "The answer."):
            messages = agent.invoke(QUESTION)["messages"]
        replies = answers(messages)
        results = [m for m in messages if isinstance(m, ToolMessage)]
        assert [m.content for m in results] == [told_of(place) for place in PLACES[:4]]
        for before, reply in itertools.pairwise(replies):
            # Everything up to the last reply was there, cleared or not.
            assert before.usage_metadata is not None
            n_before = told(before)["reused_tokens"] + told(before)["prefilled_tokens"]
            n_said = before.usage_metadata["output_tokens"]
            assert told(reply)["reused_tokens"] == n_before + n_said - 1
        ids = [m.tool_call_id for m in results]
        assert [told(r).get("clearing", {}).get("cleared") for r in replies] == [
            None, None, ids[:1], ids[:2], ids[:3],
        ]  # fmt: skip
        sizes = [len(model.engine.tokenizer.encode(str(m.content))) for m in results[:3]]
        n_rows = sum(told(r)["clearing"]["evicted_rows"] for r in replies[2:])
        assert n_rows * BYTES_PER_TOKEN == freed(model)
        # A token that reaches over the end of a result is structure, and stays.
        assert sum(sizes) - 2 * len(sizes) <= n_rows <= sum(sizes)
        usage = model.kv.usage()
        assert usage.n_bytes == usage.n_tokens * BYTES_PER_TOKEN
        n_fed = told(replies[-1])["reused_tokens"] + told(replies[-1])["prefilled_tokens"]
        assert (
            usage.n_tokens
            == n_fed + len(replies[-1].text and model.get_token_ids(replies[-1].text)) - n_rows
        )
        model.kv.check_integrity()

    async def test_asynchronous_agents_do_the_same(self, model: SideQuestChatModel) -> None:
        said = []
        for is_async in (False, True):
            agent = clearing_agent(model, on_edit="reuse")
            with saying(model, *calls_of(3), "The answer."):
                done = await agent.ainvoke(QUESTION) if is_async else agent.invoke(QUESTION)
            said.append(
                [
                    (
                        m.text,
                        told(m)["prefilled_tokens"],
                        told(m).get("clearing", {}).get("on_edit"),
                    )
                    for m in answers(done["messages"])
                ]
            )
            model.kv.clear()
        assert said[0] == said[1]
        assert said[0][-1][2] == "reuse"

    async def test_streams_do_the_same(self, model: SideQuestChatModel) -> None:
        agent = clearing_agent(model, on_edit="reuse")
        with saying(model, *calls_of(3), "The answer."):
            chunks = [c async for c in agent.astream(QUESTION, stream_mode="messages")]
        reports = [
            chunk.response_metadata["sidequest"].get("clearing")
            for chunk, _ in chunks
            if chunk.response_metadata.get("sidequest")
        ]
        assert [r and r["on_edit"] for r in reports] == [None, None, "reuse", "reuse"]

    def test_a_thread_goes_on(self, model: SideQuestChatModel) -> None:
        """Every later run repeats the edit; the state is as it was."""
        agent = clearing_agent(model, on_edit="reuse", checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}}
        with saying(model, *calls_of(2), "One.", call("Lisbon"), "Two."):
            agent.invoke(QUESTION, config)
            done = agent.invoke({"messages": [("user", "And then?")]}, config)
        last = told(answers(done["messages"])[-1])
        assert last["clearing"]["on_edit"] == "reuse"
        assert len(last["clearing"]["cleared"]) == 2
        assert last["prefilled_tokens"] < 130
        state = agent.get_state(config).values["messages"]
        assert [m.content for m in state if isinstance(m, ToolMessage)] == [
            told_of(place) for place in ("Oslo", "Rome", "Lisbon")
        ]

    def test_going_back_to_a_checkpoint_is_exact(self, model: SideQuestChatModel) -> None:
        """From before the clearing: the result is whole there, and is computed again."""
        agent = clearing_agent(model, on_edit="reuse", checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}}
        with saying(model, *calls_of(3), "The answer."):
            agent.invoke(QUESTION, config)
        states = list(agent.get_state_history(config))
        then = next(
            s for s in states if s.next == ("model",)
            and sum(isinstance(m, ToolMessage) for m in s.values["messages"]) == 1
        )  # fmt: skip
        with saying(model):  # the model's own words
            last = agent.invoke(None, then.config)["messages"][-1]
        ids = model.prompt_ids(then.values["messages"], tools=[look])
        right = greedy(tiny_model("llama", max_position_embeddings=4096), ids, 48)
        reply = model.engine.replies.get(last.id)
        assert reply is not None
        assert list(reply.token_ids) == right
        assert "clearing" not in told(last)

    def test_what_is_not_in_the_cache_is_replaced_in_the_text(
        self, model: SideQuestChatModel
    ) -> None:
        agent = clearing_agent(model, on_edit="reuse", checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}}
        with saying(model, *calls_of(3), "One."):
            agent.invoke(QUESTION, config)
        model.kv.clear()
        with saying(model):
            messages = agent.invoke({"messages": [("user", "And?")]}, config)["messages"]
        report = told(messages[-1])["clearing"]
        assert report["on_edit"] == "recompute"
        assert "not in the cache" in report["why"]
        ids = model.prompt_ids(cleared(messages[:-1], keep=1), tools=[look])
        right = greedy(tiny_model("llama", max_position_embeddings=4096), ids, 48)
        reply = model.engine.replies.get(messages[-1].id)
        assert reply is not None
        assert list(reply.token_ids) == right
        # From then on it stays so, and is reused as it was computed.
        with saying(model, call("Lisbon"), "Two."):
            messages = agent.invoke({"messages": [("user", "More.")]}, config)["messages"]
        report = told(messages[-1])["clearing"]
        assert report["on_edit"] == "reuse"
        assert len(report["cleared"]) == 1
        assert told(messages[-1])["prefilled_tokens"] < 130

    def test_texts_that_leave_no_room_are_replaced(
        self, make_model: Callable[..., SideQuestChatModel]
    ) -> None:
        model = make_model(n_context=900)
        agent = clearing_agent(model, on_edit="reuse")
        with saying(model, *calls_of(6), "The answer."):
            replies = answers(agent.invoke(QUESTION)["messages"])
        modes = [told(r).get("clearing", {}).get("on_edit") for r in replies]
        assert modes[:4] == [None, None, "reuse", "reuse"]
        at = modes.index("recompute")
        assert "too little of the context window" in told(replies[at])["clearing"]["why"]
        assert replies[-1].text == "The answer."


class TestRecompute:
    def test_it_is_what_langchain_alone_gives(self, model: SideQuestChatModel) -> None:
        said: list[list[tuple[str, int]]] = []
        for ours in ([], [SideQuestMiddleware()]):
            edits = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
            agent = create_agent(model, [look], middleware=[edits, *ours])
            with saying(model, *calls_of(4)):
                messages = agent.invoke(QUESTION)["messages"]
            ids = model.prompt_ids(cleared(messages[:-1], keep=1), tools=[look])
            assert "clearing" not in told(messages[-1])
            right = greedy(tiny_model("llama", max_position_embeddings=4096), ids, 48)
            reply = model.engine.replies.get(messages[-1].id)
            assert reply is not None
            assert list(reply.token_ids) == right
            said.append([(m.text, told(m)["prefilled_tokens"]) for m in answers(messages)])
            # What was computed with the results' own texts is gone.
            assert model.kv.usage().n_tokens == len(ids) + len(right) - (len(right) == 48)
            model.kv.clear()
        assert said[0] == said[1]


class TestOurRule:
    def run(self, model: SideQuestChatModel, n_calls: int = 4, **given: Any) -> list[list[str]]:
        """The results that each call's report says are cleared, by place."""
        agent = create_agent(
            model, [look], middleware=[SideQuestMiddleware(on_edit="reuse", **given)]
        )
        with saying(model, *calls_of(n_calls), "The answer."):
            messages = agent.invoke(QUESTION)["messages"]
        names = {c["id"]: c["args"]["place"] for m in answers(messages) for c in m.tool_calls}
        reports = [told(m).get("clearing", {}).get("cleared", []) for m in answers(messages)]
        return [[names[call_id] for call_id in found] for found in reports]

    def test_by_age(self, model: SideQuestChatModel) -> None:
        found = self.run(model, trigger_tokens=500, keep=1)
        assert found == [[], [], [], ["Oslo", "Rome"], ["Oslo", "Rome", "Paris"]]

    def test_by_size(self, model: SideQuestChatModel) -> None:
        found = self.run(model, max_result_tokens=70)
        assert found == [[], [], [], [], ["Paris"]]  # once an answer follows it

    def test_of_some_tools(self, model: SideQuestChatModel) -> None:
        assert self.run(model, trigger_tokens=1, keep=1, exclude_tools=["look"]) == [[]] * 5

    def test_not_at_all(self, model: SideQuestChatModel) -> None:
        assert self.run(model) == [[]] * 5

    async def test_it_counts_off_the_loop(self, model: SideQuestChatModel) -> None:
        agent = create_agent(
            model, [look], middleware=[SideQuestMiddleware(trigger_tokens=1, keep=0)]
        )
        with saying(model, *calls_of(2), "The answer."):
            messages = (await agent.ainvoke(QUESTION))["messages"]
        assert messages[-1].text == "The answer."
        assert told(messages[-1])["prefilled_tokens"] > 100

    def test_what_others_cleared_may_be_left_to_the_text(self, model: SideQuestChatModel) -> None:
        agent = clearing_agent(model, on_edit="reuse", clear_cleared_by_others=False)
        with saying(model, *calls_of(3), "The answer."):
            replies = answers(agent.invoke(QUESTION)["messages"])
        assert not any("clearing" in told(reply) for reply in replies)
        assert freed(model) == 0


class TestSummaries:
    def agent(self, model: SideQuestChatModel, **given: Any) -> Any:
        summaries = SummarizationMiddleware(
            model, trigger=("messages", 7), keep=("messages", 2), token_counter=len
        )
        return create_agent(
            model,
            [look],
            middleware=[summaries, SideQuestMiddleware(**given)],
            checkpointer=InMemorySaver(),
        )

    def test_what_was_replaced_is_given_back(self, model: SideQuestChatModel) -> None:
        agent = self.agent(model)
        config = {"configurable": {"thread_id": "t"}}
        with saying(model, *calls_of(2), "One."):
            before = agent.invoke(QUESTION, config)["messages"]
        with saying(model, "A summary.", "Two."):
            after = agent.invoke({"messages": [("user", "And?")]}, config)["messages"]
        assert after[0].additional_kwargs["lc_source"] == "summarization"
        reasons = [r.reason for r in model.kv.receipts() if not isinstance(r, ActReceipt)]
        kept = {m.id for m in after}
        n_replaced = sum(m.id not in kept for m in answers(before))
        assert n_replaced
        assert reasons.count("replaced in the conversation") == n_replaced
        left = {label.call_id for s in model.kv.segments("t") for label in s.labels}
        assert left.isdisjoint(m.id for m in answers(before) if m.id not in kept)
        assert after[-1].id in left
        # The next turn goes on from what the last one computed.
        with saying(model, "Three."):
            last = agent.invoke({"messages": [("user", "More.")]}, config)["messages"][-1]
        assert told(last)["prefilled_tokens"] < 40
        model.kv.check_integrity()

    def test_a_branch_from_an_old_checkpoint_stays(self, model: SideQuestChatModel) -> None:
        agent = self.agent(model)
        config = {"configurable": {"thread_id": "t"}}
        with saying(model, *calls_of(2), "One."):
            trunk = agent.invoke(QUESTION, config)["messages"]
        head = agent.get_state(config).config
        states = [s for s in agent.get_state_history(config) if s.next == ("model",)]
        with saying(model, "Elsewhere."):  # after the first result
            branch = agent.invoke(None, states[1].config)["messages"][-1]
        # Going there released nothing of what was left behind.
        assert not [r for r in model.kv.receipts() if not isinstance(r, ActReceipt)]
        with saying(model, "A summary.", "Two."):
            agent.invoke({"messages": [("user", "And?")]}, head)
        left = {label.call_id for s in model.kv.segments("t") for label in s.labels}
        assert branch.id in left
        assert answers(trunk)[0].id not in left
        with saying(model, "Elsewhere."):
            again = agent.invoke(None, states[1].config)["messages"][-1]
        assert told(again)["prefilled_tokens"] == 0  # nothing but the last token, once more
        model.kv.check_integrity()


class TestEnds:
    def test_released_on_request(self, model: SideQuestChatModel) -> None:
        agent = create_agent(model, [look], middleware=[SideQuestMiddleware(release_on_end=True)])
        with saying(model, *calls_of(2), "The answer."):
            agent.invoke(QUESTION)
        assert model.kv.usage().n_bytes == 0

    def test_as_the_cache_is_set_to(self, make_model: Callable[..., SideQuestChatModel]) -> None:
        model = make_model(cache=CacheConfig(retain="run"))
        agent = create_agent(model, [look], middleware=[SideQuestMiddleware()])
        with saying(model, call("Oslo"), "The answer."):
            agent.invoke(QUESTION)
        assert model.kv.usage().n_bytes == 0
        agent = create_agent(model, [look], middleware=[SideQuestMiddleware(release_on_end=False)])
        with saying(model, call("Oslo"), "The answer."):
            agent.invoke(QUESTION)
        assert model.kv.usage().n_bytes > 0

    def test_a_recursion_limit(self, model: SideQuestChatModel) -> None:
        """B34: the error is LangGraph's, and the thread goes on as if computed anew."""
        agent = clearing_agent(model, on_edit="reuse", checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}, "recursion_limit": 6}
        with saying(model, *[call("Oslo")] * 6), pytest.raises(GraphRecursionError):
            agent.invoke(QUESTION, config)
        n_tokens = model.kv.usage().n_tokens
        history = agent.get_state(config).values["messages"]
        assert model.kv.usage().n_bytes == n_tokens * BYTES_PER_TOKEN
        assert n_tokens <= len(model.prompt_ids([*history, HumanMessage("")], tools=[look]))
        plain = create_agent(model, [look], middleware=[SideQuestMiddleware()])
        with saying(model):
            last = plain.invoke({"messages": [*history, ("user", "Stop.")]})["messages"][-1]
        ids = model.prompt_ids([*history, HumanMessage("Stop.")], tools=[look])
        reply = model.engine.replies.get(last.id)
        assert reply is not None
        assert list(reply.token_ids) == greedy(
            tiny_model("llama", max_position_embeddings=4096), ids, 48
        )
        model.kv.clear("t")
        model.kv.clear()
        assert model.kv.usage().n_bytes == 0


class TestOtherModels:
    def test_are_left_alone(self) -> None:
        other = GenericFakeChatModel(messages=iter([AIMessage("Done.")]))
        agent = create_agent(
            other, [], middleware=[SideQuestMiddleware(on_edit="reuse", trigger_tokens=1)]
        )
        assert agent.invoke(QUESTION)["messages"][-1].text == "Done."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_edit": "forget"}, "on_edit must be 'recompute' or 'reuse', found 'forget'"),
        ({"keep": -1}, "keep must be a whole number of at least 0, found -1"),
        ({"keep": None}, "keep must be a whole number of at least 0, found None"),
        ({"trigger_tokens": 0}, "trigger_tokens must be a whole number of at least 1, found 0"),
        ({"max_result_tokens": 1.5}, "max_result_tokens must be a whole number"),
        ({"exclude_tools": "look"}, "exclude_tools must be a list of names"),
        ({"model": "gpt"}, "a SideQuestChatModel .* was expected, found str"),
    ],
)
def test_mistakes(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SideQuestMiddleware(**given)
