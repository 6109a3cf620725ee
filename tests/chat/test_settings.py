"""Names and ranges of settings: what is wrong is named, with what to write instead."""

from __future__ import annotations

import pydantic
import pytest
from langchain_core.messages import HumanMessage

from sidequest_langchain import CacheConfig, SideQuestChatModel
from sidequest_langchain.errors import ConfigError, RequestError

ASK = [HumanMessage("Plan")]

WRONG = [
    ({"temperature": -0.1}, "temperature must be .* at least 0.*-0.1"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_new_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n must be at least 1"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
]

OF_THE_WRONG_KIND = [
    ({"temperature": "hot"}, "temperature must be a number.*'hot'"),
    ({"max_tokens": 2.5}, "max_tokens must be a whole number.*2.5"),
    ({"max_tokens": True}, "max_tokens must be a whole number.*True"),
    ({"seed": "x"}, "seed must be a whole number"),
    ({"logprobs": 1}, "logprobs must be True or False"),
    ({"stop": 5}, "stop must be a string or a list"),
    ({"stop": [5]}, "stop must be strings"),
]

MISSPELT = [
    ("temprature", "temperature"),
    ("max_length", "max_tokens"),
    ("max_token", "max_tokens"),
    ("stop_sequences", "stop"),
    ("num_return_sequences", "n"),
    ("topp", "top_p"),
]


@pytest.mark.parametrize(("given", "words"), WRONG + OF_THE_WRONG_KIND)
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_call_out_of_range_is_refused_before_anything_is_computed(chat, way, given, words):
    before = chat.kv.usage()
    with pytest.raises(RequestError, match=words):
        list(chat.stream(ASK, **given)) if way == "stream" else chat.invoke(ASK, **given)
    assert chat.kv.usage() == before


@pytest.mark.parametrize(("given", "words"), WRONG)
async def test_an_async_call_out_of_range_is_refused(chat, given, words):
    with pytest.raises(RequestError, match=words):
        await chat.ainvoke(ASK, **given)


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_a_model_out_of_range_is_refused_when_it_is_made(given, words):
    with pytest.raises(ConfigError, match=words):
        SideQuestChatModel(**given)


def test_a_model_with_a_setting_of_the_wrong_kind_is_refused_as_by_any_langchain_model():
    with pytest.raises(pydantic.ValidationError, match="temperature"):
        SideQuestChatModel(temperature="hot")


@pytest.mark.parametrize(("name", "meant"), MISSPELT)
def test_an_unknown_argument_of_a_call_is_named_with_what_was_meant(chat, name, meant):
    with pytest.raises(RequestError, match=f"'{name}'.*'{meant}'"):
        chat.invoke(ASK, **{name: 1})


def test_an_unknown_argument_like_nothing_we_know_gets_the_list(chat):
    with pytest.raises(RequestError, match=r"'frobnicate'.*known are.*temperature"):
        chat.invoke(ASK, frobnicate=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_length", "max_tokens"),
        ("model_id", "model"),
        ("model_name", "model"),
        ("max_token", "max_tokens"),
        ("cache_conf", "cache_config"),
        ("chat_templates", "chat_template"),
    ],
)
def test_a_misspelt_setting_is_named_with_what_was_meant(name, meant):
    with pytest.raises(ConfigError, match=f"'{name}'.*'{meant}'"):
        SideQuestChatModel(**{name: 1})


def test_settings_of_other_packages_are_ignored_as_everywhere_in_langchain():
    SideQuestChatModel(timeout=3, max_retries=2, api_key="x", base_url="y", verbose=False)


def test_max_new_tokens_is_max_tokens(chat):
    assert SideQuestChatModel(max_new_tokens=3).max_tokens == 3
    assert chat.invoke(ASK, max_new_tokens=3) is not None
    assert chat.invoke(ASK, max_new_tokens=3).content == chat.invoke(ASK, max_tokens=3).content
    for give in (SideQuestChatModel, lambda **k: chat.invoke(ASK, **k)):
        with pytest.raises((ConfigError, RequestError), match="same setting"):
            give(max_new_tokens=3, max_tokens=4)


def test_none_says_that_a_call_sets_nothing(chat):
    names = ("temperature", "top_p", "n", "logprobs", "stop", "tools", "model", "response_format")
    given = dict.fromkeys(names)
    assert chat.invoke(ASK, **given).content == chat.invoke(ASK).content


def test_one_object_serves_one_model(chat):
    with pytest.raises(RequestError, match=f"'other'.*'{chat.model}'.*another SideQuestChatModel"):
        chat.invoke(ASK, model="other")
    chat.invoke(ASK, model=chat.model)


def test_a_loaded_model_belongs_into_from_model():
    with pytest.raises(ConfigError, match="from_model"):
        SideQuestChatModel(model=object())


def test_the_cache_argument_takes_the_settings_of_the_kv_cache_or_langchains_cache():
    config = CacheConfig(budget_tokens=100)
    model = SideQuestChatModel(cache=config)
    assert (model.cache_config, model.cache) == (config, None)
    assert SideQuestChatModel(cache_config=config).cache_config == config
    assert SideQuestChatModel(cache=False).cache is False
    assert SideQuestChatModel(cache=False).cache_config == CacheConfig()
    with pytest.raises(ConfigError, match="budget_tokens"):
        CacheConfig(budget_tokens=0)


def test_tracing_gets_the_settings_of_the_call(chat):
    given = chat._get_ls_params(stop=["x"], temperature=0.5, max_tokens=3, model="m")
    assert given == {
        "ls_provider": "sidequest",
        "ls_model_type": "chat",
        "ls_model_name": "m",
        "ls_temperature": 0.5,
        "ls_max_tokens": 3,
        "ls_stop": ["x"],
    }
    assert chat._get_ls_params()["ls_model_name"] == chat.model
    assert chat._llm_type == "sidequest-chat"
