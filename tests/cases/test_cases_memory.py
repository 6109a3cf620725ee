"""Memory over a life: names used again, budgets under load, baselines, and the end of a model."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage

from sidequest_langchain import CacheConfig, SideQuestChatModel, branch
from tests.cases.conftest import BYTES_PER_TOKEN
from tests.support.oracle import storage_bytes
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

MakeChat = Callable[..., Any]
TRUNK = SystemMessage("Plan the trip from Paris to Rome, then fly to Oslo")


def thought(*words: str) -> list[Any]:
    return [TRUNK, HumanMessage(" ".join(words))]


def live_tensors() -> tuple[int, int]:
    """Tensors that anybody in this process can still reach: how many, and their bytes."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return len(found), sum(storages.values())


def test_a_model_nobody_holds_is_gone_with_its_thread_and_its_memory():
    chat = SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer(), max_tokens=4)
    chat.invoke("Plan")
    gone = [weakref.ref(thing) for thing in (chat.engine, chat.kv, chat.engine._core.tree)]
    threads = [t for t in threading.enumerate() if t.name == "sidequest-engine"]
    assert threads
    del chat
    deadline = time.perf_counter() + 5
    while any(ref() is not None for ref in gone) and time.perf_counter() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert [ref() for ref in gone] == [None] * 3
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(3))
def test_random_acts_end_with_as_many_tensors_as_they_began_with(make_chat: MakeChat, seed: int):
    """Ask, give up, prune, prune twice, ask again what was pruned."""
    one, rng = make_chat(max_tokens=3), random.Random(seed)
    chat = one.chat
    chat.invoke("warm up")
    chat.kv.clear()
    before = live_tensors()
    names, n_freed = [f"b{n}" for n in range(4)], 0
    for _ in range(40):
        name, word = rng.choice(names), rng.choice(["Rome", "Oslo", "Paris fly"])
        act = rng.randrange(4)
        with branch(name):
            if act < 2:
                reply = chat.invoke(thought(name, word))
                assert one.answered(reply) == one.expected(thought(name, word), 3)
            elif act == 2:
                next(chat.stream(thought(name, word, "long"), max_tokens=50))
        if act == 3:
            predicted = chat.kv.predict_release(name)
            receipt = chat.kv.release(name)
            assert receipt.freed_bytes == predicted.freed_bytes >= 0
            n_freed += receipt.freed_bytes
            again = chat.kv.release(name)
            assert (again.n_paths, again.freed_bytes) == (0, 0)
        n_bytes = one.n_bytes  # asked first: what was given up is gone by then
        assert storage_bytes(chat.engine._core.tree) == n_bytes
    n_freed += sum(chat.kv.release(name).freed_bytes for name in names)
    assert one.n_bytes == 0
    assert chat.kv.usage().n_released_bytes >= n_freed > 0
    receipts = chat.kv.receipts()
    del receipt, again, predicted, receipts
    # Not `==`: what another test left behind may go in the meantime.
    assert all(now <= then for now, then in zip(live_tensors(), before, strict=True))


def test_the_name_of_a_pruned_branch_is_used_again(make_chat: MakeChat):
    one = make_chat()
    with branch("a"):
        one.chat.invoke(thought("Rome"))
    with branch("b", parent="a"):
        kept = one.chat.invoke(thought("Rome", "Oslo"))
    one.chat.kv.release("a")
    with branch("a"):
        reply = one.chat.invoke(thought("Lisbon"))
    assert one.answered(reply) == one.expected(thought("Lisbon"))
    receipt = one.chat.kv.release("a")
    assert receipt.n_paths == 1
    whole = [*one.chat.prompt_ids(thought("Rome", "Oslo")), *one.answered(kept)]
    assert len(one.resident()) == 1
    assert one.n_bytes in [BYTES_PER_TOKEN * n for n in (len(whole), len(whole) - 1)]
    again = one.chat.invoke(thought("Rome", "Oslo"))
    assert one.answered(again) == one.expected(thought("Rome", "Oslo"))


def test_branches_stay_right_while_a_budget_takes_their_relatives(make_chat: MakeChat):
    one = make_chat(cache=CacheConfig(budget_tokens=90), max_tokens=12)
    words = ["Rome", "Oslo", "Lisbon", "Paris", "fly", "back", "score", "yes"]
    prompts = [thought(a, b) for a in words[:4] for b in words[4:]]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(one.chat.invoke, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert one.answered(reply) == one.expected(prompt, 12)
        ours = reply.response_metadata["sidequest"]
        assert ours["reused_tokens"] + ours["prefilled_tokens"] == len(one.chat.prompt_ids(prompt))
    assert one.n_bytes <= 90 * BYTES_PER_TOKEN


def test_a_released_branch_that_is_asked_again_is_computed_again(make_chat: MakeChat):
    one = make_chat()
    with branch("a"):
        first = one.chat.invoke(thought("Rome"))
    one.chat.kv.release("a")
    with branch("a"):
        again = one.chat.invoke(thought("Rome"))
    assert again.content == first.content
    assert again.usage_metadata == first.usage_metadata
    assert again.usage_metadata["input_token_details"]["cache_read"] == 0


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference_mode", "enable_grad", "autocast"],
)
def test_the_mode_a_model_is_made_and_called_in_changes_nothing(mode: Callable[[], Any]):
    weights = tiny_model("llama").requires_grad_()
    with mode():
        chat = SideQuestChatModel.from_model(weights, byte_tokenizer(), max_tokens=6)
        inside = chat.invoke(thought("Rome"))
    outside = chat.invoke(thought("Rome"))
    plain = SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer(), max_tokens=6)
    assert inside.content == outside.content == plain.invoke(thought("Rome")).content
    for segment in chat.engine._core.tree.segments():
        for tensor in (*segment.keys, *segment.values):
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
    for one in (chat, plain):
        one.engine.close()
