"""Every way to call the model gives the same answer, and it is that of plain transformers."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from sidequest_langchain.engine.constraint import Constraint
from sidequest_langchain.errors import ContextLengthError, RequestError
from tests.support import templates
from tests.support.force import force
from tests.support.oracle import greedy, logits
from tests.support.tiny import tiny_model
from tests.support.tok import END, START, byte_tokenizer, metaspace_tokenizer

H, S, A = HumanMessage, SystemMessage, AIMessage
MESSAGES = [S("The rule"), H("The plan of the day")]


def join(chunks):
    return functools.reduce(operator.add, chunks)


async def _gather(stream):
    return [chunk async for chunk in stream]


WAYS = {
    "invoke": lambda chat, m, **k: chat.invoke(m, **k),
    "ainvoke": lambda chat, m, **k: asyncio.run(chat.ainvoke(m, **k)),
    "stream": lambda chat, m, **k: join(chat.stream(m, **k)),
    "astream": lambda chat, m, **k: join(asyncio.run(_gather(chat.astream(m, **k)))),
    "invoke, streaming inside": lambda chat, m, **k: chat.invoke(m, stream=True, **k),
    "ainvoke, streaming inside": lambda chat, m, **k: asyncio.run(
        chat.ainvoke(m, stream=True, **k)
    ),
    "generate": lambda chat, m, **k: chat.generate([m], **k).generations[0][0].message,
    "batch": lambda chat, m, **k: chat.batch([m, [H("other")]], **k)[0],
    "abatch": lambda chat, m, **k: asyncio.run(chat.abatch([m, [H("other")]], **k))[0],
}


def answer_of(model, chat, messages, n, tokenizer=None) -> str:
    """The oracle: plain greedy generation on the ids the chat model says it feeds."""
    ids = greedy(model, chat.prompt_ids(messages), n)
    return (tokenizer or byte_tokenizer()).decode(ids, skip_special_tokens=True)


def spelled(tokenizer, *pieces: str) -> list[int]:
    each = (tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
    return [token_id for ids in each for token_id in ids]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_call_gives_the_answer_of_transformers_cold_and_warm(make_chat, way):
    model = tiny_model("qwen2")
    chat = make_chat(model=model)
    expected = answer_of(model, chat, MESSAGES, 8)
    for _ in ("cold", "warm"):
        assert WAYS[way](chat, MESSAGES).content == expected


def facts(message):
    """What must not depend on how the model was called: all but names, cache and clocks."""
    metadata = {k: v for k, v in message.response_metadata.items() if k != "sidequest"}
    usage = {k: v for k, v in message.usage_metadata.items() if k != "input_token_details"}
    return message.content, message.tool_calls, usage, rounded(metadata)


def rounded(value):
    """A cold and a warm prompt may differ by rounding in the last digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", [{}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e"]}])
def test_streamed_and_whole_answers_are_equal(chat, way, settings):
    assert facts(WAYS[way](chat, MESSAGES, **settings)) == facts(chat.invoke(MESSAGES, **settings))


@pytest.mark.parametrize("way", ["stream", "astream"])
def test_a_stream_is_chunks_of_text_and_one_last_empty_chunk_with_the_rest(chat, way):
    chunks = (
        list(chat.stream(MESSAGES))
        if way == "stream"
        else asyncio.run(_gather(chat.astream(MESSAGES)))
    )
    *texts, last = chunks
    assert len(texts) > 2
    assert all(chunk.content for chunk in texts)
    assert last.content == ""
    assert last.chunk_position == "last"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c for c in texts if c.usage_metadata or c.response_metadata or c.chunk_position] == []
    assert last.usage_metadata
    assert last.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("way", [way for way in WAYS if "batch" not in way])
def test_usage_counts_the_prompt_whether_it_was_cached_or_not(chat, way):
    n_prompt = len(chat.prompt_ids(MESSAGES))
    for n_reused in (0, n_prompt):
        message = WAYS[way](chat, MESSAGES)
        ours = message.response_metadata["sidequest"]
        assert message.usage_metadata == {
            "input_tokens": n_prompt,
            "output_tokens": 8,
            "total_tokens": n_prompt + 8,
            "input_token_details": {"cache_read": n_reused, "cache_creation": n_prompt - n_reused},
        }
        assert (ours["reused_tokens"], ours["prefilled_tokens"]) == (n_reused, n_prompt - n_reused)


@pytest.mark.parametrize("way", WAYS)
def test_the_metadata_says_who_answered_and_where_its_tokens_are(chat, way):
    message = WAYS[way](chat, MESSAGES)
    metadata = message.response_metadata
    assert metadata["model_name"] == chat.model
    assert metadata["model_provider"] == "sidequest"
    ours = metadata["sidequest"]
    assert message.id == ours["path"] == ours["call_id"]
    assert message.id.startswith("sq-")
    assert 0 <= ours["queue_s"] <= ours["first_token_s"] <= ours["total_s"] < 60
    (segment,) = [s for s in chat.kv.segments() if s.segment_id == ours["segment"]]
    assert message.id in {label.call_id for label in segment.labels}


def test_the_answer_holds_neither_prompt_nor_control_tokens(make_chat):
    model, tok = tiny_model("llama"), byte_tokenizer()
    chat = make_chat(model=model, max_tokens=32)
    script = spelled(tok, START, "The plan", START, "🙂", END)
    with force(model, script):
        for _ in ("cold", "warm"):
            for way in ("invoke", "stream"):
                message = WAYS[way](chat, MESSAGES)
                assert message.content == "The plan🙂"
                assert message.response_metadata["finish_reason"] == "stop"
                assert message.usage_metadata["output_tokens"] == len(script)


def test_an_answer_that_ends_at_once_is_empty(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model)
    with force(model, spelled(byte_tokenizer(), END)):
        for way in ("invoke", "stream", "astream"):
            message = WAYS[way](chat, MESSAGES)
            assert (message.content, message.usage_metadata["output_tokens"]) == ("", 1)


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize("end", ["eos", "length", "stop"])
@pytest.mark.parametrize("pieces", [("H", "anzi"), ("城", "市", "。"), ("a", ".", "\n\n", "b")])
def test_a_conversation_goes_on_from_the_tokens_that_were_generated(
    make_chat, make_tokenizer, end, pieces
):
    model, tok = tiny_model("llama"), make_tokenizer()
    chat = make_chat(model=model, tokenizer=tok)
    pieces = (*pieces, "xENDy") if end == "stop" else pieces
    script = [i for p in pieces for i in chat.engine.tokenizer.encode(p, follows_text=True)]
    settings = {"max_tokens": len(script)} if end == "length" else {"max_tokens": len(script) + 1}
    messages = [H("Plan")]
    n_prompt = len(chat.prompt_ids(messages))
    stop = ["END"] if end == "stop" else None
    end_ids = spelled(tok, END) if end == "eos" else []
    with force(model, {n_prompt: script + end_ids}):
        reply = chat.invoke(messages, stop=stop, **settings)
    assert reply.response_metadata["finish_reason"] == ("length" if end == "length" else "stop")
    messages += [reply, H("And then?")]
    kept = list(chat.engine.replies.get(reply.id).token_ids)
    fed = chat.prompt_ids(messages)
    assert fed[: n_prompt + len(kept)] == [*chat.prompt_ids(messages[:1]), *kept]
    after = chat.invoke(messages)
    # the last token sampled before the end has no K/V: at most one kept token is computed anew
    assert after.usage_metadata["input_token_details"]["cache_read"] >= n_prompt + len(kept) - 1
    assert after.content == answer_of(model, chat, messages, 8, tok)
    chat.kv.check_integrity()


def test_what_a_template_stripped_from_an_earlier_reply_is_released(make_chat):
    model, tok = tiny_model("llama"), byte_tokenizer(templates.THINK)
    chat = make_chat(model=model, tokenizer=tok, max_tokens=32)
    script = spelled(tok, "<think>", "\nhm hm\n", "</think>", "\n\n", "H", "anzi", END)
    messages = [H("Plan")]
    first = chat.prompt_ids(messages)
    with force(model, {len(first): script}):
        messages += [chat.invoke(messages), H("And then?")]
    second = chat.prompt_ids(messages)
    reply = chat.invoke(messages, max_tokens=4)
    n_common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert reply.usage_metadata["input_token_details"]["cache_read"] == n_common
    assert reply.content == answer_of(model, chat, messages, 4, tok)
    # exactly this conversation is resident: the last token sampled has no K/V
    n_generated = len(chat.engine.replies.get(reply.id).token_ids)
    assert chat.kv.usage().n_tokens in (len(second) + n_generated - 1, len(second) + n_generated)
    chat.kv.check_integrity()


def test_an_edited_reply_is_answered_as_it_is_now(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model)
    reply = chat.invoke([H("Plan")])
    edited = [H("Plan"), reply.model_copy(update={"content": "Something else"}), H("And?")]
    assert chat.invoke(edited).content == answer_of(model, chat, edited, 8)
    assert "Something else" in byte_tokenizer().decode(chat.prompt_ids(edited))


def test_a_reply_is_continued_where_it_stopped(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model)
    whole = chat.invoke(MESSAGES, max_tokens=8)
    half = chat.invoke(MESSAGES, max_tokens=4)
    rest = chat.invoke([*MESSAGES, half], max_tokens=4)
    assert half.content + rest.content == whole.content


# -- stop strings ------------------------------------------------------------------------


def stopped(chat, model, *pieces: str, **given):
    with force(model, spelled(byte_tokenizer(), *pieces, END)):
        return {way: WAYS[way](chat, MESSAGES, **given) for way in ("invoke", "stream", "astream")}


@pytest.mark.parametrize(
    ("pieces", "stop", "content"),
    [
        (["The plan", "\n", "Obs", "ervation", ":", " no"], ["\nObservation:"], "The plan"),
        (["The plan", "xEND.", "no"], ["END"], "The planx"),
        (["城市", "。", "你好"], ["。"], "城市"),
        (["END", "no"], ["END"], ""),
        (["The plan", "END"], ["plan", "END"], "The "),
    ],
)
def test_text_ends_right_before_a_stop_string(make_chat, pieces, stop, content):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=32)
    for message in stopped(chat, model, *pieces, stop=stop).values():
        assert message.content == content
        assert message.response_metadata["finish_reason"] == "stop"


def test_stop_strings_of_the_model_and_of_the_call_both_end_an_answer(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, stop="END", max_tokens=32)
    for message in stopped(chat, model, "a", "END", "b", stop=[";"]).values():
        assert message.content == "a"
    for message in stopped(chat, model, "a", ";", "b", stop=[";"]).values():
        assert message.content == "a"


def test_a_stop_string_in_the_prompt_or_unfinished_in_the_answer_is_text(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=32)
    for message in stopped(chat, model, "a", "EN", stop=["END", "The plan"]).values():
        assert message.content == "aEN"


def test_no_chunk_holds_a_part_of_a_stop_string(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=32)
    script = spelled(byte_tokenizer(), "The plan", "\n", "Obs", "ervation", ":", END)
    with force(model, script):
        chunks = [c.content for c in chat.stream(MESSAGES, stop=["\nObservation:"])]
    assert "".join(chunks) == "The plan"
    assert not any("\n" in chunk for chunk in chunks)


# -- characters --------------------------------------------------------------------------


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize("text", ["A🙂B", "A👨‍👩‍👧‍👦 B", "城市 and 你好.", "a� b"])
def test_characters_arrive_whole(make_chat, make_tokenizer, text):
    model, tok = tiny_model("llama"), make_tokenizer()
    chat = make_chat(model=model, tokenizer=tok, max_tokens=64)
    script = chat.engine.tokenizer.encode(text)
    with force(model, script + spelled(tok, END)):
        chunks = [c.content for c in chat.stream(MESSAGES)]
        whole = chat.invoke(MESSAGES).content
    assert "".join(chunks) == whole == text == tok.decode(script)
    assert "�" in text or not any("�" in chunk for chunk in chunks)
    assert len(chunks) > 2


def test_a_character_cut_by_the_length_is_flushed_once(make_chat):
    model, tok = tiny_model("llama"), byte_tokenizer()
    chat = make_chat(model=model)
    script = spelled(tok, "A", "🙂")[:3]
    with force(model, script):
        *texts, _last = [c.content for c in chat.stream(MESSAGES, max_tokens=3)]
    assert "".join(texts) == tok.decode(script) == "A�"
    assert texts == ["A", "�"]


# -- log-probabilities -------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "stream", "astream"])
def test_logprobs_have_openais_shape_and_the_models_values(make_chat, way):
    model, tok = tiny_model("llama"), byte_tokenizer()
    chat = make_chat(model=model)
    ids = chat.prompt_ids(MESSAGES)
    answer = greedy(model, ids, 8)
    message = WAYS[way](chat, MESSAGES, logprobs=True, top_logprobs=3)
    content = message.response_metadata["logprobs"]["content"]
    table = logits(model, [*ids, *answer]).log_softmax(-1)[len(ids) - 1 :]
    assert len(content) == len(answer)
    for entry, row, token_id in zip(content, table, answer, strict=False):
        assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
        assert bytes(entry["bytes"]) == chat.engine.tokenizer.token_bytes(token_id)
        best = torch.topk(row, 3)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == pytest.approx(best.values.tolist(), abs=1e-4)
        expected = [tok.decode([i]) for i in best.indices.tolist()]
        assert [top["token"] for top in entry["top_logprobs"]] == expected
        assert set(entry["top_logprobs"][0]) == {"token", "bytes", "logprob"}


def test_logprobs_are_there_when_asked_for_and_only_then(make_chat):
    chat = make_chat(logprobs=True)
    (first, *_rest) = chat.invoke(MESSAGES).response_metadata["logprobs"]["content"]
    assert first["top_logprobs"] == []
    assert "logprobs" not in chat.invoke(MESSAGES, logprobs=False).response_metadata


# -- samples -----------------------------------------------------------------------------


def samples(chat, **given):
    (generations,) = chat.generate([MESSAGES], **given).generations
    return [generation.message for generation in generations]


def test_greedy_samples_are_equal_and_messages_of_their_own(chat):
    messages = samples(chat, n=4)
    assert len({m.content for m in messages}) == 1
    assert len({m.id for m in messages}) == 4
    assert messages[0].content == chat.invoke(MESSAGES).content


def test_seeded_samples_differ_and_are_repeatable_in_any_company(chat):
    drawn = [m.content for m in samples(chat, n=4, temperature=1.5, seed=7)]
    assert len(set(drawn)) == 4
    assert [m.content for m in samples(chat, n=4, temperature=1.5, seed=7)] == drawn
    assert drawn[0] == chat.invoke(MESSAGES, temperature=1.5, seed=7).content
    with ThreadPoolExecutor(4) as pool:
        asked = {"temperature": 1.5, "seed": 7}
        together = pool.map(lambda _: chat.invoke(MESSAGES, **asked).content, range(4))
        assert set(together) == {drawn[0]}
    assert [m.content for m in samples(chat, n=4, temperature=1.5, seed=8)] != drawn


def test_samples_of_a_prompt_compute_it_once(chat):
    n_prompt = len(chat.prompt_ids(MESSAGES))
    before = chat.kv.usage().n_prefilled_tokens
    samples(chat, n=4, temperature=1.5, seed=7)
    assert chat.kv.usage().n_prefilled_tokens - before == n_prompt


async def test_async_samples_are_the_sync_ones(chat):
    asked = {"n": 3, "temperature": 1.5, "seed": 7}
    result = await chat.agenerate([MESSAGES], **asked)
    assert [g.text for g in result.generations[0]] == [m.content for m in samples(chat, **asked)]


def test_several_prompts_run_at_once_and_the_usage_is_summed(make_chat):
    chat = make_chat(n=2)
    prompts = [MESSAGES, [H("Another")], [H("Third")]]
    result = chat.generate(prompts)
    assert [len(g) for g in result.generations] == [2, 2, 2]
    for prompt, generations in zip(prompts, result.generations, strict=True):
        assert generations[0].text == chat.invoke(prompt, n=1).content
    usage = result.llm_output["token_usage"]
    assert usage["prompt_tokens"] == sum(len(chat.prompt_ids(p)) for p in prompts)
    n_out = sum(g.message.usage_metadata["output_tokens"] for gs in result.generations for g in gs)
    assert usage["completion_tokens"] == n_out
    assert usage["total_tokens"] == usage["prompt_tokens"] + n_out
    assert len(result.run) == 3


def test_several_prompts_of_one_call_share_passes(make_chat):
    chat = make_chat()
    prompts = [MESSAGES, [H("Another")], [H("Third")]]
    most, forward = [0], chat.engine._core.adapter.forward

    def counting(rows, *args, **given):
        most[0] = max(most[0], len(rows))
        return forward(rows, *args, **given)

    chat.engine._core.adapter.forward = counting
    # The engine waits until all of them are there: run one by one, the second never comes.
    n_waiting, submit = threading.Barrier(len(prompts), timeout=20), type(chat.engine).submit

    def together(*args, **given):
        n_waiting.wait()
        return submit(chat.engine, *args, **given)

    chat.engine.submit = together
    result = chat.generate(prompts)
    assert len(result.generations) == 3
    assert most == [3]


@pytest.mark.parametrize("streaming", [True, None])
def test_several_samples_are_never_streamed(make_chat, streaming):
    chat = make_chat(n=2, streaming=streaming)
    assert len(samples(chat)) == 2
    chunks = list(chat.stream(MESSAGES))
    assert [c.content for c in chunks] == [chat.invoke(MESSAGES).content]


# -- the seam for constrained decoding ---------------------------------------------------


class Spells(Constraint):
    """Allows one text only."""

    def __init__(self, ids: list[int]) -> None:
        self._left = list(ids)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, float("-inf"))
        masked[self._left[0]] = 0.0
        return masked

    def accept(self, token_id: int) -> None:
        assert self._left.pop(0) == token_id

    @property
    def is_done(self) -> bool:
        return not self._left


def test_a_constraint_decides_what_may_come(chat):
    ids = spelled(byte_tokenizer(), "The plan")
    assert chat.invoke(MESSAGES, constraint=Spells(ids)).content == "The plan"
    made = [m.content for m in samples(chat, n=3, constraint=lambda: Spells(ids))]
    assert made == ["The plan"] * 3
    with pytest.raises(RequestError, match="one constraint"):
        samples(chat, n=3, constraint=Spells(ids))


# -- what does not fit -------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_beyond_the_context_names_both_numbers_and_leaves_nothing(make_chat, way):
    chat = make_chat(model=tiny_model("llama", max_position_embeddings=64))
    chat.invoke([H("a")])
    before = chat.kv.usage().n_bytes
    long = [H("a" * 80)]
    n = len(chat.prompt_ids(long))
    with pytest.raises(ContextLengthError, match=rf"{n} tokens.*64"):
        WAYS[way](chat, long)
    assert chat.kv.usage().n_bytes == before or "batch" in way


def test_generation_ends_where_the_context_does(make_chat):
    chat = make_chat(model=tiny_model("llama", max_position_embeddings=64), max_tokens=None)
    n = len(chat.prompt_ids([H("a" * 20)]))
    message = chat.invoke([H("a" * 20)], stop=[])
    if message.response_metadata["finish_reason"] == "length":
        assert message.usage_metadata["output_tokens"] == 64 - n
    assert message.usage_metadata["total_tokens"] <= 64


# -- callbacks ---------------------------------------------------------------------------


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ids: set[str] = set()

    def on_llm_new_token(self, token, *, chunk=None, **_):
        self.tokens.append(token)
        self.ids.add(chunk.message.id)


def test_callbacks_get_every_token_once(make_chat):
    chat = make_chat(streaming=True)
    for call in (
        lambda h: chat.invoke(MESSAGES, {"callbacks": [h]}),
        lambda h: join(chat.stream(MESSAGES, {"callbacks": [h]})),
        lambda h: asyncio.run(chat.ainvoke(MESSAGES, {"callbacks": [h]})),
        lambda h: join(asyncio.run(_gather(chat.astream(MESSAGES, {"callbacks": [h]})))),
    ):
        handler = Tokens()
        message = call(handler)
        assert "".join(handler.tokens) == message.content
        assert handler.ids == {message.id}


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
def test_streamed_events_of_version_3_give_the_same_message_and_it_is_known_again(make_chat):
    model, tok = tiny_model("llama"), byte_tokenizer()
    chat = make_chat(model=model)
    with force(model, spelled(tok, "H", "anzi", END)):
        handler = Tokens()
        stream = chat.stream_events(MESSAGES, {"callbacks": [handler]}, version="v3")
        message = stream.output
        text = str(stream.text)
    assert message.text == text == "Hanzi" == "".join(handler.tokens)
    assert message.usage_metadata["output_tokens"] == 3
    ids = chat.prompt_ids([*MESSAGES, message, H("And?")])
    fed = [*chat.prompt_ids(MESSAGES), *spelled(tok, "H", "anzi")]
    assert ids[: len(fed)] == fed


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
async def test_async_events_of_version_3_give_the_same_message(chat):
    stream = await chat.astream_events(MESSAGES, version="v3")
    texts = [text async for text in stream.text]
    message = await stream.output
    assert message.text == "".join(texts) == chat.invoke(MESSAGES).content
    assert len(texts) > 2
    assert message.usage_metadata["output_tokens"] == 8


def test_output_version_1_is_blocks_of_the_same_text(make_chat):
    chat = make_chat(output_version="v1")
    text = chat.invoke(MESSAGES).text
    for message in (chat.invoke(MESSAGES), join(chat.stream(MESSAGES))):
        assert [b["text"] for b in message.content_blocks if b["type"] == "text"] == [text]
    follow = [*MESSAGES, chat.invoke(MESSAGES), H("And?")]
    plain = [*MESSAGES, A(text, id=follow[2].id), H("And?")]
    assert chat.prompt_ids(follow) == chat.prompt_ids(plain)


def test_inputs_of_every_form_are_the_same_prompt(chat):
    ids = chat.prompt_ids([H("Plan")])
    for form in ("Plan", [("user", "Plan")], [{"role": "user", "content": "Plan"}]):
        assert chat.prompt_ids(form) == ids
    assert chat.invoke("").content == chat.invoke([H("")]).content
    assert chat.prompt_ids([H("Plan", name="Ann")]) == ids


def test_bad_messages_raise_before_anything_is_computed(chat):
    before = chat.kv.usage()
    image = H([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}])
    for way in ("invoke", "ainvoke", "stream", "astream"):
        with pytest.raises(RequestError, match="image_url"):
            WAYS[way](chat, [image])
        with pytest.raises(RequestError, match="messages"):
            WAYS[way](chat, [])
    assert chat.kv.usage() == before
