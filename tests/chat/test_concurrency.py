"""Many calls at once, and calls that are given up: nothing waits for what nobody wants."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage

from sidequest_langchain.engine.constraint import Constraint
from tests.support.oracle import greedy
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

STEP_S = 0.02


@contextlib.contextmanager
def slowed(chat, model, seconds: float = STEP_S):
    """Each forward takes at least so long; yields the times at which one began."""
    began: list[float] = []

    def wait(*_):
        began.append(time.perf_counter())
        time.sleep(seconds)

    hook = model.register_forward_pre_hook(wait)
    try:
        yield began
    finally:
        hook.remove()


@pytest.fixture
def slow(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=400)
    with slowed(chat, model) as began:
        chat.invoke("warm up", max_tokens=1)
        chat.kv.clear()
        yield _Slow(chat, began)


class _Slow:
    def __init__(self, chat, began) -> None:
        self.chat = chat
        self.began = began
        self.baseline = chat.kv.usage()

    def assert_idle_again(self) -> None:
        """No forward begins any more, and nothing of the call is resident."""
        deadline = time.perf_counter() + 10 * STEP_S + 1
        while self.chat.kv.usage().n_bytes and time.perf_counter() < deadline:
            time.sleep(STEP_S)
        assert self.chat.kv.usage().n_bytes == 0
        n_steps = len(self.began)
        time.sleep(4 * STEP_S)
        assert len(self.began) == n_steps < 100
        self.chat.kv.check_integrity()

    def wait_until_running(self) -> None:
        n_steps = len(self.began)
        while len(self.began) < n_steps + 3:
            time.sleep(STEP_S / 4)


# -- given up ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ainvoke", "astream", "abatch", "agenerate"])
async def test_a_cancelled_task_ends_its_generation(slow, way):
    async def run():
        if way == "astream":
            async for _ in slow.chat.astream("Plan"):
                pass
        elif way == "abatch":
            await slow.chat.abatch(["Plan", "Other"])
        elif way == "agenerate":
            await slow.chat.agenerate([[HumanMessage("Plan")]], n=3)
        else:
            await slow.chat.ainvoke("Plan")

    task = asyncio.create_task(run())
    await asyncio.to_thread(slow.wait_until_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(slow.assert_idle_again)


async def test_a_timeout_ends_the_generation(slow):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slow.chat.ainvoke("Plan"), timeout=5 * STEP_S)
    await asyncio.to_thread(slow.assert_idle_again)


def test_a_stream_that_is_closed_or_dropped_ends_its_generation(slow):
    stream = slow.chat.stream("Plan")
    assert next(stream).content
    stream.close()
    slow.assert_idle_again()
    for _ in slow.chat.stream("Plan"):
        break
    slow.assert_idle_again()


async def test_an_async_stream_that_is_closed_ends_its_generation(slow):
    stream = slow.chat.astream("Plan")
    assert (await anext(stream)).content
    await stream.aclose()
    await asyncio.to_thread(slow.assert_idle_again)


class Interrupts(BaseCallbackHandler):
    raise_error = True

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_llm_new_token(self, token, **_):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no more")])
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_an_interrupt_in_a_callback_reaches_the_caller_and_ends_the_generation(slow, way, error):
    config = {"callbacks": [Interrupts(error)]}
    calls = {
        "invoke": lambda: slow.chat.invoke("Plan", config, stream=True),
        "stream": lambda: list(slow.chat.stream("Plan", config)),
    }
    with pytest.raises(type(error)):
        calls[way]()
    slow.assert_idle_again()


@pytest.mark.parametrize("way", ["invoke", "stream", "generate"])
def test_ctrl_c_while_waiting_ends_the_generation(slow, way):
    calls = {
        "invoke": lambda: slow.chat.invoke("Plan"),
        "stream": lambda: list(slow.chat.stream("Plan")),
        "generate": lambda: slow.chat.generate([[HumanMessage("Plan")]], n=2),
    }
    press = [threading.main_thread().ident, signal.SIGINT]
    timer = threading.Timer(4 * STEP_S, signal.pthread_kill, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        calls[way]()
    slow.assert_idle_again()


class Breaks(Constraint):
    """Fails at its third token."""

    def __init__(self) -> None:
        self._n_taken = 0

    def mask(self, logits):
        if self._n_taken == 3:
            msg = "a broken grammar"
            raise ZeroDivisionError(msg)
        return logits

    def accept(self, token_id):
        self._n_taken += 1

    @property
    def is_done(self):
        return False


class Free(Breaks):
    def mask(self, logits):
        return logits


def one_breaks() -> dict:
    made = iter([Free, Breaks, Free])
    return {"n": 3, "constraint": lambda: next(made)()}


def test_when_one_sample_fails_the_others_end_and_the_error_is_the_original(slow):
    with pytest.raises(ZeroDivisionError, match="a broken grammar"):
        slow.chat.generate([[HumanMessage("Plan")]], **one_breaks())
    slow.assert_idle_again()
    assert slow.chat.invoke("Plan", max_tokens=2).content is not None


async def test_when_one_async_sample_fails_the_others_end_too(slow):
    with pytest.raises(ZeroDivisionError, match="a broken grammar"):
        await slow.chat.agenerate([[HumanMessage("Plan")]], **one_breaks())
    await asyncio.to_thread(slow.assert_idle_again)


def test_giving_one_call_up_leaves_the_others_right(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=12)
    expected = [answer(model, chat, f"Plan {n}") for n in range(4)]

    async def main():
        tasks = [asyncio.create_task(chat.ainvoke(f"Plan {n}")) for n in range(4)]
        given_up = [
            asyncio.create_task(chat.ainvoke(f"Drop {n}", max_tokens=300)) for n in range(4)
        ]
        await asyncio.sleep(3 * STEP_S)
        for task in given_up:
            task.cancel()
        done = await asyncio.gather(*tasks)
        await asyncio.gather(*given_up, return_exceptions=True)
        return [message.content for message in done]

    with slowed(chat, model):
        assert asyncio.run(main()) == expected


def answer(model, chat, text, n=12):
    return byte_tokenizer().decode(
        greedy(model, chat.prompt_ids(text), n), skip_special_tokens=True
    )


# -- many at once ------------------------------------------------------------------------


async def _widest_gap(job) -> float:
    """The longest that the event loop did not get round to a 10 ms heartbeat during `job`."""
    gaps: list[float] = []

    async def beat():
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    heart = asyncio.create_task(beat())
    await job
    heart.cancel()
    return max(gaps)


async def test_the_event_loop_goes_on_while_the_model_works(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=12)
    expected = [answer(model, chat, f"Plan {n}") for n in range(4)]
    with slowed(chat, model):
        calls = asyncio.gather(*(chat.ainvoke(f"Plan {n}") for n in range(4)))
        gap = await _widest_gap(calls)
    assert [message.content for message in calls.result()] == expected
    assert gap < 0.25


async def test_long_prompts_are_made_off_the_loop(make_chat):
    model = tiny_model("llama", max_position_embeddings=64)
    chat = make_chat(model=model, max_tokens=2)
    seen = []
    encode = chat.engine.tokenizer.encode

    def watched(*args, **given):
        seen.append(threading.current_thread() is threading.main_thread())
        return encode(*args, **given)

    chat.engine.tokenizer.encode = watched
    with pytest.raises(ValueError, match="64"):
        await chat.ainvoke("city " * 20_000)
    assert seen
    assert not any(seen)


async def test_a_stream_yields_while_the_model_still_works(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=10)
    with slowed(chat, model) as began:
        n_steps = []
        async for chunk in chat.astream("Plan"):
            n_steps.append(len(began))
            assert chunk.content or chunk.chunk_position == "last"
    assert n_steps[0] <= 3
    assert n_steps == sorted(n_steps)
    assert len(set(n_steps)) > 4


@pytest.mark.parametrize("way", ["threads", "batch", "abatch", "generate"])
def test_calls_at_the_same_time_share_their_steps_and_stay_right(make_chat, way):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=12)
    texts = [f"Plan {n}" for n in range(6)]
    expected = [answer(model, chat, text) for text in texts]
    before = chat.kv.usage().n_steps
    with slowed(chat, model, 0.01):
        if way == "threads":
            with ThreadPoolExecutor(6) as pool:
                answers = [m.content for m in pool.map(chat.invoke, texts)]
        elif way == "batch":
            answers = [m.content for m in chat.batch(texts)]
        elif way == "abatch":
            answers = [m.content for m in asyncio.run(chat.abatch(texts))]
        else:
            prompts = [[HumanMessage(text)] for text in texts]
            answers = [g[0].text for g in chat.generate(prompts).generations]
    assert answers == expected
    assert chat.kv.usage().n_steps - before < 40  # one after the other: 72


async def test_64_streams_at_once_finish(make_chat):
    model = tiny_model("llama")
    chat = make_chat(model=model, max_tokens=6)

    async def one(n):
        return "".join([chunk.content async for chunk in chat.astream(f"Plan {n % 8}")])

    answers = await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(64))), timeout=120)
    expected = [answer(model, chat, f"Plan {n}", 6) for n in range(8)]
    assert answers == expected * 8
    chat.kv.check_integrity()


def test_prompts_and_counts_from_many_threads_are_those_of_one(chat):
    texts = [f"The plan of day {n} 城市" * (n % 4 + 1) for n in range(20)]
    serial = [chat.prompt_ids(text) for text in texts]

    def work(worker: int):
        if worker % 2:
            return [chat.get_num_tokens_from_messages([HumanMessage(t)]) for t in texts * 3]
        return [chat.prompt_ids(text) for text in texts * 3]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    assert all(r == serial * 3 for r in results[::2])
    assert all(r == [len(ids) for ids in serial * 3] for r in results[1::2])
