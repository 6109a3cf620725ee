"""The managed cache from a chat model: exact calls, kept texts, and what an answer tells of it."""

from __future__ import annotations

import asyncio
import functools
import operator

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from sidequest_langchain import CacheConfig, Guard, Protection, SideQuestChatModel
from sidequest_langchain.errors import ConfigError, RequestError
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.policy.receipts import ActReceipt
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

H, S, A = HumanMessage, SystemMessage, AIMessage
SECRET = "the key is 4711"
STORY = " ".join(f"word{i}" for i in range(18))
TALK = [S("Keep to the plan"), H("Hi"), A(f"{STORY} {SECRET} {STORY}"), H("Go on")]
NOTHING = Protection(n_sink=2, recent_window=16, ends=0.0)


def managed(budget: int | None = 300, **settings) -> CacheConfig:
    return CacheConfig(
        **{
            "policy": "window",
            "budget_tokens": budget,
            "prefill_chunk": 32,
            "protection": NOTHING,
            "guard": Guard(max_kl=None, canary_tokens=2),
        }
        | settings
    )


def right(chat, messages, n=8) -> str:
    ids = greedy(tiny_model("llama"), chat.prompt_ids(messages), n)
    return byte_tokenizer().decode(ids, skip_special_tokens=True)


def acts(chat) -> list[ActReceipt]:
    return [r for r in chat.kv.receipts() if isinstance(r, ActReceipt) and r.outcome == "done"]


# -- exact calls ------------------------------------------------------------------------


def test_a_call_a_bound_model_and_a_field_can_ask_to_be_exact(make_chat, monkeypatch):
    seen = []
    chat = make_chat()
    submit = chat.engine.submit

    def recorded(request, sink):
        seen.append(request)
        return submit(request, sink)

    monkeypatch.setattr(chat.engine, "submit", recorded)
    chat.invoke("a")
    chat.invoke("a", exact=True)
    chat.bind(exact=True).invoke("a")
    list(chat.bind(exact=True).stream("a"))
    of_field = chat.model_copy(update={"exact": True})
    of_field.invoke("a")
    of_field.invoke("a", exact=False)
    of_field.invoke("a", exact=None)
    assert [request.exact for request in seen] == [False, True, True, True, True, False, True]


@pytest.mark.parametrize("value", [1, "yes"])
def test_exact_is_true_or_false(chat, value):
    with pytest.raises(RequestError, match="exact must be True or False"):
        chat.invoke("a", exact=value)


def test_an_exact_call_gets_the_answer_of_the_full_cache_among_evicted_ones(make_chat):
    chat = make_chat(cache=managed(500, trigger=0.3, target=0.2))
    lossy = chat.invoke(TALK)
    assert lossy.text != right(chat, TALK), "nothing to tell apart"
    n_before = len(acts(chat))
    exact = chat.invoke(TALK, exact=True)
    assert exact.text == right(chat, TALK)
    assert exact.usage_metadata["input_token_details"]["cache_read"] == 0
    scopes = {s.segment_id: s.scope for s in chat.kv.segments()}
    changed = {r.segment_id for r in acts(chat)[n_before:] if r.verb != "release"}
    assert not any(scopes.get(at, "").endswith("exact") for at in changed)
    again = chat.invoke([*TALK, exact, H("And")], exact=True)
    assert again.usage_metadata["input_token_details"]["cache_read"] > 250
    assert again.text == right(chat, [*TALK, exact, H("And")])


def test_langchains_cache_of_answers_tells_exact_and_lossy_ones_apart(make_chat):
    chat = make_chat(cache=InMemoryCache(), cache_config=managed(500, trigger=0.3, target=0.2))
    lossy = chat.invoke(TALK)
    exact = chat.invoke(TALK, exact=True)
    assert lossy.text != exact.text
    plain = SideQuestChatModel()
    keys = [
        str(model._get_llm_string())
        for model in (
            plain,
            SideQuestChatModel(cache=CacheConfig(max_running=3)),
            SideQuestChatModel(cache=managed()),
            SideQuestChatModel(cache=managed(400)),
            SideQuestChatModel(exact=True),
        )
    ]
    assert keys[0] == keys[1], "settings that change no answer"
    assert len(set(keys)) == 4


# -- what an answer tells ---------------------------------------------------------------

WAYS = {
    "invoke": lambda chat, m: chat.invoke(m),
    "ainvoke": lambda chat, m: asyncio.run(chat.ainvoke(m)),
    "stream": lambda chat, m: functools.reduce(operator.add, chat.stream(m)),
    "astream": lambda chat, m: functools.reduce(operator.add, asyncio.run(_chunks(chat, m))),
}


async def _chunks(chat, messages):
    return [chunk async for chunk in chat.astream(messages)]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_tells_what_was_done_meanwhile_and_only_that(make_chat, way):
    chat = make_chat(cache=managed())
    first = WAYS[way](chat, TALK)
    told = first.response_metadata["sidequest"]["managed"]
    done = acts(chat)
    assert told == {
        "evicted_rows": sum(r.n_rows for r in done),
        "compressed_rows": 0,
        "archived_rows": 0,
        "restored_rows": 0,
        "freed_bytes": sum(r.freed_bytes for r in done),
        "most_kl": max(r.kl for r in done),
        "forced_acts": 0,
    }
    assert told["evicted_rows"] > 100
    assert told["most_kl"] > 0
    chat.kv.clear()
    quiet = WAYS[way](chat, [H("Hi")])
    assert "managed" not in quiet.response_metadata["sidequest"]


def test_packed_rows_are_counted_as_such(make_chat):
    chat = make_chat(cache=managed(None, budget_bytes=300 * 512, policy="staged"))
    told = chat.invoke(TALK).response_metadata["sidequest"]["managed"]
    packed = [r for r in acts(chat) if r.verb == "compress"]
    assert told["compressed_rows"] == sum(r.n_rows for r in packed) > 0


def test_without_a_policy_and_in_observe_mode_nothing_was_done(make_chat):
    for config in (CacheConfig(), CacheConfig(budget_tokens=20), managed(observe=True)):
        chat = make_chat(cache=config)
        answer = chat.invoke(TALK)
        assert "managed" not in answer.response_metadata["sidequest"]
        assert answer.text == right(chat, TALK)


def test_more_acts_than_are_kept_are_counted_as_far_as_they_are(make_chat, monkeypatch):
    chat = make_chat(cache=managed())
    chat.invoke(TALK)
    last = acts(chat)[-1]
    monkeypatch.setattr(chat.kv, "_receipts", [last] * 1000)
    call = chat._prepare([H("a")], None, None, {})
    monkeypatch.setattr(chat.kv, "_receipts", [copy_of(last)] * 1000)
    counts = call.managed.counts()
    assert counts is not None
    assert counts["evicted_rows"] == 1000 * last.n_rows


def copy_of(receipt: ActReceipt) -> ActReceipt:
    return ActReceipt(**receipt.to_json())


# -- texts to keep ----------------------------------------------------------------------


def test_texts_to_keep_are_marked_in_the_prompt(make_chat):
    protection = Protection(protect_text=("4711", "Hi"))
    chat = make_chat(cache=managed(protection=protection))
    request = chat._prepare(TALK, None, None, {}).requests[0]
    decode = chat.engine.tokenizer.decode
    pairs = zip(request.prompt_ids, request.kinds, strict=True)
    marked = [decode([token]) for token, kind in pairs if kind == TokenKind.MARKED]
    assert "".join(marked).replace(" ", "") == "Hi4711"


@pytest.mark.parametrize("texts", [(), (SECRET,)])
def test_a_text_to_keep_outlives_its_surroundings(make_chat, texts):
    rules = Protection(n_sink=2, recent_window=16, ends=0.0, protect_text=texts)
    chat = make_chat(cache=managed(200, protection=rules))
    chat.invoke(TALK)
    said = " ".join(r.text for r in acts(chat))
    assert "word1" in said
    assert (SECRET in said) != bool(texts)


def test_texts_to_keep_are_a_tuple_of_texts():
    assert Protection(protect_text=["b", "a", "b"]).protect_text == ("b", "a")
    assert repr(Protection(protect_text=("a",))) == "Protection(protect_text=('a',))"
    for wrong in ("text", ("",), (1,), None):
        with pytest.raises(ConfigError, match="protect_text must be texts that are not empty, as"):
            Protection(protect_text=wrong)
    with pytest.raises(ConfigError, match="marked=False protects none of it: leave marked out"):
        Protection(protect_text=("a",), marked=False)


def test_texts_to_keep_go_through_toml():
    config = managed(protection=Protection(protect_text=('say "no"', "é")))
    assert CacheConfig.from_toml(config.to_toml()) == config


# -- settings that meet their engine ----------------------------------------------------


def test_an_unknown_policy_is_named_where_the_engine_is_made(make_chat):
    with pytest.raises(ConfigError, match=r"no policy 'stagd'; did you mean 'staged'\?"):
        make_chat(cache=managed(policy="stagd"))
