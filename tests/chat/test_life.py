"""A chat model as an object: lazy, copied freely, pickled by name, loaded once."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.runnables import ConfigurableField

from sidequest_langchain import CacheConfig, SideQuestChatModel
from sidequest_langchain.chat import serving
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.errors import ConfigError, TemplateError
from tests.support import templates
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

ASK = [HumanMessage("Plan")]


@pytest.fixture
def loads(monkeypatch):
    """Names are served by tiny models; the list tells what was loaded."""
    loaded: list[tuple[str, dict]] = []
    engines: list[Engine] = []

    def engine_for(reference, **given):
        loaded.append((reference, given))
        engines.append(
            Engine(
                tiny_model("llama", seed=len(reference)),
                byte_tokenizer(),
                name=reference,
                config=given["config"],
            )
        )
        return engines[-1]

    monkeypatch.setattr(serving, "engine_for", engine_for)
    yield loaded
    for engine in engines:
        engine.close()


def test_making_a_model_loads_nothing_and_the_first_call_everything(loads):
    config = CacheConfig(budget_tokens=1000)
    model = SideQuestChatModel(model="a", dtype="float32", device="cpu", cache=config)
    repr(model), model._identifying_params, model._get_ls_params(), model.profile
    assert loads == []
    model.invoke(ASK, max_tokens=2)
    assert loads == [
        (
            "a",
            {
                "revision": None,
                "dtype": "float32",
                "device": "cpu",
                "device_map": None,
                "quantization": "auto",
                "config": config,
            },
        )
    ]
    model.invoke(ASK, max_tokens=2)
    assert model.kv is model.engine.kv
    assert len(loads) == 1


def test_copies_share_the_engine(loads):
    model = SideQuestChatModel(model="a", max_tokens=2)
    before = copy.deepcopy(model)  # also one that was copied before anything was loaded
    copies = [copy.deepcopy(model), copy.copy(model), model.model_copy(update={"temperature": 1.0})]
    wrapped = [model.bind(stop=["x"]), model.with_retry(), model.with_config(tags=["t"])]
    for one in (model, before, *copies, *wrapped):
        one.invoke(ASK)
    assert len(loads) == 1
    assert {one.engine for one in (before, *copies)} == {model.engine}


def test_configurable_fields_change_the_call_and_load_nothing_again(loads):
    model = SideQuestChatModel(model="a", temperature=0.0)
    flexible = model.configurable_fields(
        max_tokens=ConfigurableField(id="n_out"), model=ConfigurableField(id="model")
    )
    for n in (2, 3):
        message = flexible.invoke(ASK, {"configurable": {"n_out": n}})
        assert message.usage_metadata["output_tokens"] == n
        chunks = list(flexible.stream(ASK, {"configurable": {"n_out": n}}))
        assert len(chunks) > 2  # still streamed
    assert [name for name, _ in loads] == ["a"]
    for _ in range(2):
        flexible.invoke(ASK, {"configurable": {"model": "other", "n_out": 2}})
    assert [name for name, _ in loads] == ["a", "other"]


async def test_a_single_call_may_name_another_model(loads):
    model = SideQuestChatModel(model="a", max_tokens=2)
    ours, other = model.invoke(ASK), SideQuestChatModel(model="other", max_tokens=2).invoke(ASK)
    assert ours.content != other.content
    found = [model.invoke(ASK, model="other"), await model.bind(model="other").ainvoke(ASK)]
    found += [message_of(model.stream(ASK, model="other"))]
    found += [message_of([chunk async for chunk in model.astream(ASK, model="other")])]
    found += [model.bind_tools([], model="other").invoke(ASK)]
    for message in found:
        assert message.content == other.content
        assert message.response_metadata["model_name"] == "other"
    assert model.invoke(ASK).response_metadata["model_name"] == "a"
    assert [name for name, _ in loads] == ["a", "other", "other"]
    assert len(model.engines.live()) == 2


def message_of(chunks):
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first


def test_a_model_of_a_name_is_pickled_without_its_weights(loads):
    model = SideQuestChatModel(model="a", max_tokens=2, cache=CacheConfig(budget_tokens=1000))
    text = model.invoke(ASK).content
    data = pickle.dumps(model)
    assert len(data) < 20_000
    back = pickle.loads(data)
    assert back.invoke(ASK).content == text
    assert back.cache_config == model.cache_config
    assert len(loads) == 2  # here a stub; the real registry shares the weights


def test_a_model_you_loaded_cannot_be_pickled_or_turned_into_another(chat):
    with pytest.raises(ConfigError, match="cannot be pickled"):
        pickle.dumps(chat)
    flexible = chat.configurable_fields(model=ConfigurableField(id="model"))
    with pytest.raises(ConfigError, match="from_model again"):
        flexible.invoke(ASK, {"configurable": {"model": "other"}})
    assert copy.deepcopy(chat).invoke(ASK).content == chat.invoke(ASK).content


def test_the_engine_of_loaded_objects_is_shared_and_gets_its_settings():
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    config = CacheConfig(budget_tokens=1000)
    first = SideQuestChatModel.from_model(model, tokenizer, name="mine", cache=config)
    second = SideQuestChatModel.from_model(model, tokenizer, name="mine", cache=config)
    assert first.engine is second.engine
    assert (first.model, first.engine.config) == ("mine", config)
    assert first.profile["max_input_tokens"] == first.engine.context_length
    first.engine.close()


def test_importing_the_package_and_its_errors_loads_no_torch():
    code = (
        "import sys, sidequest_langchain as s; s.CacheConfig; s.__version__; dir(s);"
        "sys.exit('torch' in sys.modules)"
    )
    path = {"PYTHONPATH": "src"}
    assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0


# -- templates ---------------------------------------------------------------------------


def test_a_base_model_needs_a_template_and_nothing_is_cached_by_the_failed_call(make_chat):
    base = make_chat(template=None, max_tokens=2)
    with pytest.raises(TemplateError, match=rf"'{base.model}'.*chat_template="):
        base.invoke(ASK)
    assert base.kv.usage().n_bytes == 0
    assert base.get_num_tokens_from_messages(ASK) == len(base.get_token_ids("Plan"))
    given = SideQuestChatModel(**vars(base) | {"chat_template": templates.PLAIN})
    assert given.engine is base.engine
    assert given.invoke(ASK).usage_metadata["output_tokens"] == 2


def test_models_with_different_templates_share_one_engine(make_chat):
    plain = make_chat()
    trimmed = plain.model_copy(update={"chat_template": templates.TRIM})
    assert plain.prompt_ids("a ") != trimmed.prompt_ids("a ") == trimmed.prompt_ids("a")
    assert plain.engine is trimmed.engine


def test_the_tool_template_is_used_when_tools_are_bound_and_only_then(make_chat):
    named = {"default": templates.PLAIN, "tool_use": templates.TOOLS}
    chat = make_chat(chat_template=named)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    n_plain, n_tools = len(chat.prompt_ids(ASK)), len(chat.prompt_ids(ASK, tools=[tool]))
    assert chat.invoke(ASK).usage_metadata["input_tokens"] == n_plain
    assert chat.bind(tools=[tool]).invoke(ASK).usage_metadata["input_tokens"] == n_tools > n_plain
    assert chat.invoke(ASK, tools=[]).usage_metadata["input_tokens"] == n_plain


def test_a_system_message_that_the_template_refuses_is_answered(make_chat):
    chat = make_chat(template=templates.NOSYS)
    messages = [SystemMessage("The rule"), HumanMessage("Plan")]
    first = chat.invoke(messages)
    again = chat.invoke([*messages, first, HumanMessage("And?")])
    cached = again.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= first.usage_metadata["input_tokens"]


# -- counting ----------------------------------------------------------------------------


def test_tokens_are_counted_by_the_models_own_tokenizer(chat):
    messages = [SystemMessage("S"), HumanMessage("The plan\n城市"), AIMessage("a"), *ASK]
    n = chat.get_num_tokens_from_messages(messages)
    assert (
        n == len(chat.prompt_ids(messages)) == chat.invoke(messages).usage_metadata["input_tokens"]
    )
    assert chat.get_num_tokens("The plan") == len(byte_tokenizer().encode("The plan"))
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    told = chat.prompt_ids(messages, tools=[tool])  # this template has no place of its own for it
    assert chat.get_num_tokens_from_messages(messages, tools=[tool]) == len(told) > n


@pytest.mark.parametrize("strategy", ["first", "last"])
def test_a_conversation_is_trimmed_by_our_count(make_chat, strategy):
    chat = make_chat(template=templates.ALT)
    call = {"name": "f", "args": {}, "id": "c1", "type": "tool_call"}
    messages = [SystemMessage("S")]
    for i in range(4):
        messages += [HumanMessage(f"question {i}"), AIMessage("", tool_calls=[call])]
        messages += [ToolMessage("42", tool_call_id="c1"), AIMessage(f"answer {i}")]
    kept = trim_messages(messages, max_tokens=120, token_counter=chat, strategy=strategy)
    assert 0 < len(kept) < len(messages)
    assert chat.get_num_tokens_from_messages([]) == 0


# -- LangChain's cache of answers --------------------------------------------------------


def test_an_answer_from_langchains_cache_is_not_generated_again(make_chat):
    chat = make_chat(cache=InMemoryCache())
    first, n_steps = chat.invoke(ASK), chat.kv.usage().n_steps
    again = chat.invoke(ASK)
    assert (again.content, chat.kv.usage().n_steps) == (first.content, n_steps)
    follow = [*ASK, again, HumanMessage("And?")]
    assert chat.prompt_ids(follow) == chat.prompt_ids([*ASK, first, HumanMessage("And?")])


def test_whatever_changes_an_answer_is_in_the_key_of_that_cache(chat):
    base = SideQuestChatModel(model="a")
    changed = {
        "model": "b",
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 1,
        "max_tokens": 7,
        "n": 2,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "revision": "r",
        "dtype": "float16",
        "device": "cpu",
        "device_map": "auto",
        "chat_template": "x",
        "control_tokens": "parse",
    }
    keys = {base._get_llm_string()}
    needs = {"top_logprobs": {"logprobs": True}}
    keys |= {
        SideQuestChatModel(**{"model": "a", k: v, **needs.get(k, {})})._get_llm_string()
        for k, v in changed.items()
    }
    keys |= {base._get_llm_string(stop=["y"]), base._get_llm_string(temperature=0.25)}
    assert len(keys) == len(changed) + 3
    # weights that the caller loaded are told apart though their names are alike
    weights = tiny_model("llama", seed=1)
    other = SideQuestChatModel.from_model(weights, byte_tokenizer(), max_tokens=8)
    assert other.model == chat.model
    assert other._get_llm_string() != chat._get_llm_string()
    assert copy.deepcopy(chat)._get_llm_string() == chat._get_llm_string()
    other.engine.close()
