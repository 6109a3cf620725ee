"""What LangChain's users expect of any chat model, beyond an answer."""

from __future__ import annotations

import warnings

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel

from sidequest_langchain import CacheConfig, SideQuestChatModel
from sidequest_langchain.errors import ConfigError, RequestError
from tests.support import templates
from tests.support.tiny import tiny_model

ASK = [HumanMessage("Plan")]


@tool
def look_up(city: str, days: int = 1) -> str:
    """Look a city up."""
    return city


# -- the profile -------------------------------------------------------------------------


def test_the_profile_of_a_model_you_loaded_tells_what_it_can(make_chat):
    chat = make_chat(max_tokens=8)
    can = {name for name, value in chat.profile.items() if value is True}
    assert can == {
        "open_weights",
        "text_inputs",
        "text_outputs",
        "temperature",
        "tool_calling",
        "tool_choice",
        "tool_call_streaming",
        "structured_output",
    }
    assert chat.profile["max_input_tokens"] == chat.engine.context_length
    assert chat.profile["max_output_tokens"] == 8
    assert chat.profile["reasoning_output"] is False
    assert make_chat(max_tokens=None).profile["max_output_tokens"] == chat.engine.context_length
    assert make_chat(template=templates.THINK).profile["reasoning_output"] is True
    assert make_chat(chat_template=templates.THINK).profile["reasoning_output"] is True


def test_the_profile_of_a_name_says_what_is_known_without_loading(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path))
    profile = SideQuestChatModel(model="smollm2-135m", max_tokens=None).profile
    assert profile["tool_calling"]
    assert profile["structured_output"]
    assert not {"max_input_tokens", "max_output_tokens", "reasoning_output"} & set(profile)
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 8192}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("plain", encoding="utf-8")
    profile = SideQuestChatModel(model="smollm2-135m", max_tokens=None).profile
    assert (profile["max_input_tokens"], profile["max_output_tokens"]) == (8192, 8192)
    assert profile["reasoning_output"] is False


def test_a_profile_holds_words_that_langchain_knows_and_can_be_replaced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SideQuestChatModel()
        given = {"max_input_tokens": 5}
        assert SideQuestChatModel(profile=given).profile == given


# -- the key of LangChain's cache --------------------------------------------------------

NO_EFFECT = {
    "cache": "where answers are kept",
    "cache_config": "see below: in the key if something is managed",
    "callbacks": "they only listen",
    "custom_get_token_ids": "for counting",
    "disable_streaming": "streamed answers are the whole ones in pieces",
    "engines": "what was made of the other fields; loaded weights are told by their identity",
    "metadata": "for tracing",
    "name": "for tracing",
    "profile": "describes",
    "rate_limiter": "only delays",
    "streaming": "as disable_streaming",
    "tags": "for tracing",
    "verbose": "only prints",
}


def test_each_field_is_in_the_key_or_has_a_reason_not_to_be():
    key = set(SideQuestChatModel(model="a")._identifying_params)
    renamed = {"stop": "model_stop"}
    for name in SideQuestChatModel.model_fields:
        assert (name in NO_EFFECT) != (renamed.get(name, name) in key), name


def test_output_versions_are_told_apart_by_langchains_cache(make_chat):
    cache = InMemoryCache()
    chat = make_chat(cache=cache)
    blocks = chat.model_copy(update={"output_version": "v1"})
    text = chat.invoke(ASK).content
    assert blocks.invoke(ASK).content == [{"type": "text", "text": text}]
    assert chat.invoke(ASK).content == text


LOSSY = CacheConfig(budget_tokens=1000, policy="h2o")


def test_lossy_settings_are_in_the_key_and_exact_ones_are_not():
    def key(**settings):
        return SideQuestChatModel(model="a", **settings)._get_llm_string()

    exact = CacheConfig(budget_tokens=1000, isolation="shared")
    assert key(cache_config=exact) == key()
    assert len({key(), key(cache_config=LOSSY), key(cache_config=LOSSY, exact=True)}) == 3
    other = CacheConfig(budget_tokens=1001, policy="h2o")
    assert key(cache_config=other) != key(cache_config=LOSSY)


def test_what_a_call_sets_is_in_the_key(chat):
    schema = {"type": "json_object"}
    given = [{}, {"stop": ["x"]}, {"temperature": 0.5}, {"exact": True}, {"tools": [look_up]}]
    given += [{"response_format": schema}, {"tool_choice": "any"}]
    assert len({chat._get_llm_string(**one) for one in given}) == len(given)


# -- output versions ---------------------------------------------------------------------


async def test_either_output_version_streams_what_invoke_says(make_chat):
    for version, blocks in (("v0", False), ("v1", True)):
        chat = make_chat(output_version=version)
        whole = chat.invoke(ASK)
        assert isinstance(whole.content, list) is blocks
        assert [block["type"] for block in whole.content_blocks] == ["text"]
        streams = [sum_of(chat.stream(ASK)), sum_of([c async for c in chat.astream(ASK)])]
        for full in streams:
            assert [block["type"] for block in full.content_blocks] == ["text"]
            assert full.text == whole.text
            assert full.response_metadata["finish_reason"] == "length"
        again = chat.prompt_ids([*ASK, whole, HumanMessage("And?")])
        assert again == chat.prompt_ids([*ASK, streams[0], HumanMessage("And?")])


def sum_of(chunks) -> AIMessageChunk:
    full = None
    for chunk in chunks:
        full = chunk if full is None else full + chunk
    return full


def test_the_output_version_may_come_from_the_environment(monkeypatch, make_chat):
    monkeypatch.setenv("LC_OUTPUT_VERSION", "v1")
    assert isinstance(make_chat().invoke(ASK).content, list)


# -- rate limits, streaming, retries -----------------------------------------------------


class Counter(BaseRateLimiter):
    """Lets everything pass and counts."""

    def __init__(self):
        self.n = 0

    def acquire(self, *, blocking=True):
        self.n += 1
        return True

    async def aacquire(self, *, blocking=True):
        return self.acquire()


async def test_each_generation_asks_the_rate_limiter_once(make_chat):
    counter = Counter()
    chat = make_chat(rate_limiter=counter, cache=InMemoryCache(), max_tokens=2)
    told = [counter.n]
    chat.invoke(ASK)
    told.append(counter.n)
    chat.invoke(ASK)  # from LangChain's cache
    told.append(counter.n)
    list(chat.stream(ASK))
    told.append(counter.n)
    await chat.ainvoke("b")
    told.append(counter.n)
    assert [chunk async for chunk in chat.astream(ASK)]
    told.append(counter.n)
    chat.batch(["c", "d"])
    told.append(counter.n)
    chat.generate([[HumanMessage("e")], [HumanMessage("f")], [HumanMessage("g")]])
    told.append(counter.n)
    assert told == [0, 1, 1, 2, 3, 4, 6, 9]


@pytest.mark.parametrize(
    ("settings", "given", "is_whole"),
    [
        ({}, {}, False),
        ({"disable_streaming": True}, {}, True),
        ({"streaming": False}, {}, True),
        ({"disable_streaming": "tool_calling"}, {}, False),
        ({"disable_streaming": "tool_calling"}, {"tools": [look_up]}, True),
    ],
)
async def test_streaming_can_be_switched_off(make_chat, settings, given, is_whole):
    chat = make_chat(template=templates.TOOLS, **settings)
    whole = chat.invoke(ASK, **given).text
    for chunks in ([*chat.stream(ASK, **given)], [c async for c in chat.astream(ASK, **given)]):
        assert (len([chunk for chunk in chunks if chunk.text]) == 1) is is_whole
        assert "".join(chunk.text for chunk in chunks) == whole


def test_streaming_true_streams_inside_of_invoke(make_chat):
    class Tokens(BaseCallbackHandler):
        def __init__(self):
            self.n = 0

        def on_llm_new_token(self, token, **kwargs):
            self.n += 1

    for streaming, is_streamed in ((True, True), (None, False)):
        counter = Tokens()
        make_chat(streaming=streaming).invoke(ASK, config={"callbacks": [counter]})
        assert (counter.n > 2) is is_streamed


def test_a_call_that_failed_is_tried_again(make_chat, monkeypatch):
    chat = make_chat()
    expected = chat.invoke(ASK).content
    failures = iter([MemoryError("no room"), OSError("no file")])
    real = SideQuestChatModel._prepare

    def failing(self, *given, **more):
        if (error := next(failures, None)) is not None:
            raise error
        return real(self, *given, **more)

    monkeypatch.setattr(SideQuestChatModel, "_prepare", failing)
    retrying = chat.with_retry(stop_after_attempt=3, wait_exponential_jitter=False)
    assert retrying.invoke(ASK).content == expected


async def test_another_model_answers_where_one_cannot(make_chat):
    broken, fine = make_chat(), make_chat(model=tiny_model("llama", seed=3))
    expected = fine.invoke(ASK).content
    assert broken.invoke(ASK).content != expected
    broken.engine.close()
    both = broken.with_fallbacks([fine])
    assert both.invoke(ASK).content == (await both.ainvoke(ASK)).content == expected
    assert "".join(chunk.text for chunk in both.stream(ASK)) == expected
    with pytest.raises(RequestError, match="temperature"):
        both.invoke(ASK, temperature=-1)  # wrong for either


def test_alternatives_are_chosen_by_the_config(make_chat):
    first, second = make_chat(), make_chat(model=tiny_model("llama", seed=3))
    either = first.configurable_alternatives(ConfigurableField(id="who"), second=second)
    assert either.invoke(ASK).content == first.invoke(ASK).content
    chosen = either.with_config(configurable={"who": "second"})
    assert chosen.invoke(ASK).content == second.invoke(ASK).content
    assert first.invoke(ASK).content != second.invoke(ASK).content


async def test_batches_are_in_order_and_events_of_version_2_name_the_model(chat):
    inputs = ["a", "b", "c", "a"]
    alone = [chat.invoke(text).content for text in inputs]
    assert [m.content for m in chat.batch(inputs)] == alone
    assert [m.content for m in await chat.abatch(inputs)] == alone
    done = dict(chat.batch_as_completed(inputs))
    assert [done[i].content for i in range(len(inputs))] == alone
    names = {event["event"] async for event in chat.astream_events("a", version="v2")}
    assert names == {"on_chat_model_start", "on_chat_model_stream", "on_chat_model_end"}


def test_a_model_is_a_link_in_a_chain(chat):
    prompt = ChatPromptTemplate.from_messages([("system", "S"), ("human", "{what}")])
    chain = prompt | chat.bind(stop=["\0"]) | StrOutputParser()
    expected = chat.invoke([SystemMessage("S"), HumanMessage("Plan")]).text
    assert chain.invoke({"what": "Plan"}) == expected
    assert "".join(chain.stream({"what": "Plan"})) == expected


# -- tracing -----------------------------------------------------------------------------


class Starts(BaseCallbackHandler):
    """Keeps what a tracer is told when a model starts."""

    def __init__(self):
        self.told = []

    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.told.append(kwargs)


def test_tracers_are_told_who_is_asked_for_what(chat):
    starts = Starts()
    bound = chat.bind(temperature=0.5, max_tokens=3)
    bound.invoke(ASK, config={"callbacks": [starts]}, stop=["x"])
    list(bound.stream(ASK, config={"callbacks": [starts]}, stop=["x"]))
    for told in starts.told:
        metadata = told["metadata"]
        assert metadata["ls_provider"] == "sidequest"
        assert metadata["ls_model_name"] == chat.model
        assert metadata["ls_model_type"] == "chat"
        assert (metadata["ls_temperature"], metadata["ls_max_tokens"]) == (0.5, 3)
        assert metadata["ls_stop"] == ["x"]
        assert metadata["lc_versions"].keys() >= {"langchain-core", "sidequest-langchain"}
        params = told["invocation_params"]
        assert (params["_type"], params["temperature"]) == ("sidequest-chat", 0.5)
        assert params["stop"] == ["x"]
    assert len(starts.told) == 2


def test_usage_is_summed_by_langchains_own_callback(chat):
    with get_usage_metadata_callback() as usage:
        messages = [chat.invoke(ASK), *chat.batch(["a", "b"])]
    total = usage.usage_metadata[chat.model]
    assert total["total_tokens"] == sum(m.usage_metadata["total_tokens"] for m in messages)
    assert total["input_token_details"]["cache_read"] == sum(
        m.usage_metadata["input_token_details"]["cache_read"] for m in messages
    )


# -- counting without the Hub ------------------------------------------------------------


class Trip(BaseModel):
    """A trip."""

    city: str


def test_tokens_are_counted_with_tools_and_without_a_network(make_chat, socket_disabled):
    chat = make_chat(template=templates.TOOLS, max_tokens=1)
    messages = [SystemMessage("S"), HumanMessage("The plan")]
    plain = chat.get_num_tokens_from_messages(messages)
    for tools in ([look_up], [Trip], [Trip, look_up]):
        n = chat.get_num_tokens_from_messages(messages, tools=tools)
        asked = chat.bind_tools(tools).invoke(messages)
        assert n == asked.usage_metadata["input_tokens"] > plain
    assert plain == chat.invoke(messages).usage_metadata["input_tokens"]


def test_your_own_way_to_count_is_used(make_chat):
    chat = make_chat(custom_get_token_ids=lambda text: [ord(letter) for letter in text])
    assert chat.get_token_ids("ab") == [97, 98]
    assert chat.get_num_tokens("abc") == 3


# -- settings that cannot be changed -----------------------------------------------------


def test_the_cache_of_a_model_you_loaded_cannot_be_changed_by_the_config(chat):
    flexible = chat.configurable_fields(cache_config=ConfigurableField(id="kv"))
    with pytest.raises(ConfigError, match="from_model again"):
        flexible.invoke(ASK, {"configurable": {"kv": CacheConfig(budget_tokens=100)}})


def test_the_same_tool_in_two_forms_is_one_tool(make_chat):
    chat = make_chat(template=templates.TOOLS)
    once = chat.prompt_ids(ASK, tools=[Trip])
    bound = chat.bind_tools([Trip, Trip.model_json_schema(), look_up, look_up])
    assert [one["function"]["name"] for one in bound.kwargs["tools"]] == ["Trip", "look_up"]
    assert chat.bind_tools([Trip, Trip]).invoke(ASK).usage_metadata["input_tokens"] == len(once)
    other = {"title": "Trip", "type": "object", "properties": {"days": {"type": "integer"}}}
    with pytest.raises(RequestError, match="'Trip' and take different arguments"):
        chat.bind_tools([Trip, other])
