"""A thread goes on in another engine, or another process, from a file: exact, shared, whole."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import BudgetExceeded, ConfigError, SavedThreadError
from sidequest_langchain.kv import sealed_file
from sidequest_langchain.kv.grafting import GraftingTree
from sidequest_langchain.kv.sharing import SharingTree
from tests.engine.driving import (
    Listener,
    ask,
    audit,
    held,
    ids,
    model_of,
    resident,
    right_answer,
    run,
    stored,
    token_bytes,
)
from tests.engine.saved import assert_same, child, contents, n_ids, n_payload, written_over
from tests.support import oracle
from tests.support.tiny import FAMILIES, tiny_model

LLAMA = "llama"


def grow(engine, thread="t"):
    """Two turns and a branch of thread `t`, and another thread's branch; the next turn's prompt."""
    first = ask(ids(60), 9, thread=thread, call="one")
    result = run(engine, first)
    second = ask([*stored(first, result), *ids(9, seed=3)], 7, thread=thread, call="two")
    again = run(engine, second)
    run(engine, ask([*ids(40), *ids(9, seed=4)], 5, thread=thread, call="side", branch="b"))
    run(engine, ask([*ids(40), *ids(9, seed=5)], 5, thread="u", call="other"))
    return [*stored(second, again), *ids(7, seed=6)]


@pytest.fixture
def saved(make_engine, tmp_path):
    """An engine that saved thread `t`, the receipt, and the prompt that goes on."""
    engine = make_engine(model_of(LLAMA))
    prompt = grow(engine)
    return engine, engine.kv.save("t", tmp_path), prompt


def check_goes_on(engine, prompt, family=LLAMA):
    """The prompt's new tokens are computed, no other; the answer is that of a cold run."""
    result = run(engine, ask(prompt, 8, thread="t"))
    assert result.n_prefilled_tokens == 7
    assert result.token_ids == right_answer(family, prompt, 8)


def test_another_process_goes_on(make_engine, tmp_path):
    code = f"""
        import json
        from sidequest_langchain.engine.engine import Engine
        from tests.engine.test_saving import grow
        from tests.support.tiny import tiny_model
        from tests.support.tok import byte_tokenizer
        engine = Engine(tiny_model("llama"), byte_tokenizer())
        prompt = grow(engine)
        engine.kv.save("t", {str(tmp_path)!r})
        engine.close()
        print(json.dumps(prompt))
    """
    prompt = json.loads(child(code))
    engine = make_engine(model_of(LLAMA))
    receipt = engine.kv.load(tmp_path, "t")
    audit(engine)
    assert (receipt.n_paths, receipt.n_replies, receipt.n_left_out_tokens) == (3, 3, 0)
    assert receipt.n_bytes == engine.kv.usage().n_bytes
    check_goes_on(engine, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_on(make_engine, tmp_path, family):
    engine = make_engine(model_of(family))
    prompt = grow(engine)
    engine.kv.save("t", tmp_path)
    other = make_engine(model_of(family))
    other.kv.load(tmp_path, "t")
    check_goes_on(other, prompt, family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_come_back_bit_for_bit(make_engine, tmp_path, dtype):
    model = tiny_model(LLAMA).to(dtype)
    engine, other = make_engine(model), make_engine(tiny_model(LLAMA).to(dtype))
    grow(engine)
    receipt = engine.kv.save("t", tmp_path)
    kept = contents(engine, "t")
    other.kv.load(tmp_path, "t")
    assert_same(contents(other), kept)
    assert {t.dtype for one in contents(other).values() for t in one["tensors"].values()} == {dtype}
    other.kv.check_integrity()
    assert receipt.file.stat().st_size == receipt.n_bytes
    assert receipt.n_bytes < n_payload(kept) + 8 * n_ids(kept) + 64 * 1024


def test_what_paths_share_is_written_once(saved):
    engine, receipt, _ = saved
    kept = contents(engine, "t")
    assert receipt.n_tokens == n_ids(kept) < sum(map(len, resident(engine).values()))
    assert (receipt.n_segments, receipt.n_paths, receipt.n_replies) == (len(kept), 3, 3)
    assert n_payload(kept) < receipt.n_bytes < n_payload(kept) + 8 * n_ids(kept) + 4096


def test_nothing_changes_by_saving(saved, tmp_path):
    engine, _, prompt = saved
    before, usage = contents(engine), engine.kv.usage()
    engine.kv.save("t", tmp_path / "again")
    assert_same(contents(engine), before)
    assert engine.kv.usage() == usage
    check_goes_on(engine, prompt)


def test_labels_and_other_threads(saved, make_engine, tmp_path):
    engine, _, _ = saved
    other = make_engine(model_of(LLAMA))
    other.kv.load(tmp_path, "t")
    expected = {call: ids for call, ids in resident(engine).items() if call != "other"}
    assert resident(other) == expected
    receipt = other.kv.release("b", thread_id="t")
    assert receipt.is_known
    assert receipt.freed_tokens == 13, "the branch's own"
    other.kv.clear("t")
    audit(other, [])


def test_replies_are_known_again(saved, make_engine, tmp_path):
    engine, _, _ = saved
    other = make_engine(model_of(LLAMA))
    other.kv.load(tmp_path, "t")
    for call in ("one", "two", "side"):
        assert other.replies.get(call) == engine.replies.get(call)
    assert other.replies.get("other") is None
    again = other.kv.save("t", tmp_path / "again")
    assert again.n_replies == 3


def test_a_reply_whose_path_was_released_is_still_known(make_engine, tmp_path):
    engine, other = make_engine(model_of(LLAMA)), make_engine(model_of(LLAMA))
    grow(engine)
    engine.kv.release("one")
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    assert other.replies.get("one") == engine.replies.get("one")


# ---- what is there already


def test_loading_twice_changes_nothing(saved, make_engine, tmp_path):
    other = make_engine(model_of(LLAMA))
    first = other.kv.load(tmp_path, "t")
    before, usage = contents(other), other.kv.usage()
    again = other.kv.load(tmp_path, "t")
    assert (again.n_tokens, again.n_bytes, again.n_paths) == (0, 0, 0)
    assert again.n_shared_tokens == first.n_tokens
    assert_same(contents(other), before)
    assert other.kv.usage().n_bytes == usage.n_bytes


@pytest.mark.parametrize("n_head", [1, 40, 55, 60, 63])
def test_what_is_resident_is_shared(saved, make_engine, tmp_path, n_head):
    engine, _, prompt = saved
    other = make_engine(model_of(LLAMA))
    head = [*prompt[:n_head], *ids(11, seed=8)]
    mine = ask(head, 6, thread="t", call="mine")
    paths = [stored(mine, run(other, mine))]
    receipt = other.kv.load(tmp_path, "t")
    paths += [kept for call, kept in resident(engine).items() if call != "other"]
    audit(other, paths)
    assert receipt.n_tokens + receipt.n_shared_tokens == n_ids(contents(engine, "t"))
    check_goes_on(other, prompt)
    assert run(other, ask(head, 6)).token_ids == right_answer(LLAMA, head, 6)


def test_a_saved_thread_that_moved_on_keeps_both_ends(saved, make_engine, tmp_path):
    engine, _, prompt = saved
    check_goes_on(engine, prompt)
    before = resident(engine)
    receipt = engine.kv.load(tmp_path, "t")
    assert (receipt.n_tokens, receipt.n_paths) == (0, 0)
    assert resident(engine) == before
    engine.kv.check_integrity()


def test_loading_beside_a_running_request(saved, make_engine, tmp_path):
    _, _, prompt = saved
    other = make_engine(model_of(LLAMA))
    listener = Listener()
    long = ask(prompt[:50], 40, ignore_eos=True)
    with held(other):
        other.submit(long, listener)
    receipt = other.kv.load(tmp_path, "t")
    assert receipt.n_paths == 3
    assert listener.result().token_ids == right_answer_of(prompt[:50], 40)
    other.kv.check_integrity()
    check_goes_on(other, prompt)


def right_answer_of(prompt, n):
    return tuple(oracle.greedy(model_of(LLAMA), prompt, n, ignore_eos=True))


# ---- while others run


def test_a_running_path_is_not_saved_and_not_held_up(make_engine, tmp_path):
    engine, other = make_engine(model_of(LLAMA)), make_engine(model_of(LLAMA))
    prompt = grow(engine)
    listener = Listener()
    with held(engine):
        engine.submit(ask(prompt, 40, thread="t", call="late", ignore_eos=True), listener)
    receipt = engine.kv.save("t", tmp_path)
    assert receipt.n_paths == 3 or listener.is_over.is_set()
    assert listener.result().token_ids == right_answer_of(prompt, 40)
    engine.kv.check_integrity()
    other.kv.load(tmp_path, "t")
    audit(other)


def test_rows_that_go_while_they_are_written_are_written_and_counted(
    make_engine, tmp_path, monkeypatch
):
    engine, other = make_engine(model_of(LLAMA)), make_engine(model_of(LLAMA))
    prompt = grow(engine)
    kept, n_bytes = contents(engine, "t"), engine.kv.usage().n_bytes
    reached, gate = threading.Event(), threading.Event()
    real = sealed_file._write

    def slow(file, block):
        if not reached.is_set():
            reached.set()
            assert gate.wait(30)
        real(file, block)

    monkeypatch.setattr(sealed_file, "_write", slow)
    receipts = []
    saver = threading.Thread(target=lambda: receipts.append(engine.kv.save("t", tmp_path)))
    saver.start()
    assert reached.wait(30)
    engine.kv.clear()
    audit(engine, [])
    engine.kv.reset_peak()
    gate.set()
    saver.join(30)
    assert receipts[0].n_held_bytes >= n_payload(kept)
    assert engine.kv.usage().peak_bytes == receipts[0].n_held_bytes <= n_bytes
    other.kv.load(tmp_path, "t")
    assert_same(contents(other), kept)
    check_goes_on(other, prompt)


# ---- nothing half-way


@pytest.mark.parametrize("place", [20, 300, -9, -2000])
def test_a_damaged_file_loads_nothing(saved, make_engine, tmp_path, place):
    _, receipt, prompt = saved
    written_over(receipt.file, place)
    other = make_engine(model_of(LLAMA))
    other.kv.reset_peak()
    with pytest.raises(SavedThreadError, match="was not loaded"):
        other.kv.load(tmp_path, "t")
    audit(other, [])
    assert len(other.replies) == 0
    result = run(other, ask(prompt, 8, thread="t"))
    assert result.n_reused_tokens == 0
    assert result.token_ids == right_answer(LLAMA, prompt, 8)


@pytest.mark.parametrize("n_calls", range(3))
@pytest.mark.parametrize("owner", [(GraftingTree, "_plant"), (SharingTree, "_share")])
def test_no_memory_while_it_joins_loads_nothing(
    saved, make_engine, tmp_path, monkeypatch, owner, n_calls
):
    other = make_engine(model_of(LLAMA))
    before = ask(ids(45), 6)
    paths = [stored(before, run(other, before))]
    cls, name = owner
    real, n_left = getattr(cls, name), [n_calls]

    def exhausted(self, *given):
        n_left[0] -= 1
        if n_left[0] < 0:
            raise MemoryError
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(cls, name, exhausted)
        with pytest.raises(MemoryError):
            other.kv.load(tmp_path, "t")
    audit(other, paths)
    other.kv.load(tmp_path, "t")
    audit(other)


def test_no_memory_to_read_gives_the_room_back(saved, make_engine, tmp_path, monkeypatch):
    other = make_engine(model_of(LLAMA))

    def exhausted(self, tensor):
        if tensor.dtype == torch.float32:
            raise MemoryError
        return real(self, tensor)

    real = sealed_file.SealedFile.read_into
    with monkeypatch.context() as patch:
        patch.setattr(sealed_file.SealedFile, "read_into", exhausted)
        with pytest.raises(MemoryError):
            other.kv.load(tmp_path, "t")
    audit(other, [])


# ---- budgets


def test_what_is_read_counts_before_it_is_there(saved, make_engine, tmp_path, monkeypatch):
    other = make_engine(model_of(LLAMA))
    seen = []
    real = sealed_file.SealedFile.check

    def look(self):
        seen.append(other.kv.usage().n_bytes)
        other.kv.check_integrity()
        real(self)

    monkeypatch.setattr(sealed_file.SealedFile, "check", look)
    receipt = other.kv.load(tmp_path, "t")
    assert seen == [receipt.n_bytes]


@pytest.mark.parametrize("unit", ["bytes", "tokens"])
def test_a_budget_with_room_for_a_part_takes_the_newest_paths(saved, make_engine, tmp_path, unit):
    engine, _, prompt = saved
    kept = resident(engine)
    n_tokens = len(kept["one"]) + 5  # for the oldest, too, but for no two of them
    size = token_bytes(model_of(LLAMA)) if unit == "bytes" else 1
    config = CacheConfig(**{f"budget_{unit}": n_tokens * size})
    other = make_engine(model_of(LLAMA), config=config)
    receipt = other.kv.load(tmp_path, "t")
    audit(other, [kept["side"]])
    assert receipt.n_tokens == len(kept["side"])
    assert receipt.n_left_out_tokens == n_ids(contents(engine, "t")) - receipt.n_tokens
    result = run(other, ask(prompt, 8, thread="t"))
    assert result.n_reused_tokens == 40
    assert result.token_ids == right_answer(LLAMA, prompt, 8)


def test_a_budget_with_no_room_is_an_error_and_loses_nothing(saved, make_engine, tmp_path):
    size = token_bytes(model_of(LLAMA))
    other = make_engine(model_of(LLAMA), config=CacheConfig(budget_bytes=30 * size))
    with pytest.raises(BudgetExceeded, match=r"give a larger budget, release"):
        other.kv.load(tmp_path, "t")
    audit(other, [])


def test_what_idles_longest_makes_room_but_nothing_that_is_needed(saved, make_engine, tmp_path):
    _, receipt, prompt = saved
    size = token_bytes(model_of(LLAMA))
    config = CacheConfig(budget_bytes=(receipt.n_tokens + 60) * size)
    other = make_engine(model_of(LLAMA), config=config)
    old, new = ask(ids(50, seed=20), 3, call="old"), ask(ids(40, seed=21), 3, call="new")
    paths = [stored(request, run(other, request)) for request in (old, new)]
    loaded = other.kv.load(tmp_path, "t")
    assert loaded.n_left_out_tokens == 0
    assert "old" not in resident(other)
    assert resident(other)["new"] == paths[1]
    assert other.kv.usage().n_bytes <= config.budget_bytes
    check_goes_on(other, prompt)


# ---- names and files


NAMES = ["../x", "/etc/x", "~", "", "nul\0x", "x" * 4000, "城市"]


@pytest.mark.parametrize("thread", NAMES)
def test_any_id_names_a_thread(make_engine, tmp_path, thread):
    engine, other = make_engine(model_of(LLAMA)), make_engine(model_of(LLAMA))
    run(engine, ask(ids(20), 4, thread=thread))
    folder = tmp_path / "saved"
    receipt = engine.kv.save(thread, folder)
    assert list(folder.iterdir()) == [receipt.file] == [engine.kv.saved_file(folder, thread)]
    assert list(tmp_path.iterdir()) == [folder]
    assert other.kv.load(folder, thread).thread_id == thread
    assert other.kv.load(receipt.file).thread_id == thread


def test_a_thread_that_is_not_there(saved, tmp_path):
    engine, receipt, _ = saved
    nothing = engine.kv.save("nobody", tmp_path)
    assert (nothing.file, nothing.n_bytes, nothing.n_tokens) == (None, 0, 0)
    with pytest.raises(SavedThreadError, match="cannot be opened"):
        engine.kv.load(tmp_path, "nobody")
    engine.kv.clear("t")
    engine.kv.save("t", tmp_path)
    assert receipt.file.exists(), "an older file is still right"
    receipt.file.rename(engine.kv.saved_file(tmp_path, "nobody"))
    with pytest.raises(SavedThreadError, match="not of thread 'nobody'"):
        engine.kv.load(tmp_path, "nobody")


def test_what_names_no_thread_is_refused(saved, tmp_path):
    engine, _, _ = saved
    with pytest.raises(ConfigError, match="say which one"):
        engine.kv.load(tmp_path)
    with pytest.raises(ConfigError, match="a thread is named by a string, found int"):
        engine.kv.save(7, tmp_path)


def test_scopes_stay_apart(make_engine, tmp_path):
    engine, other = make_engine(model_of(LLAMA)), make_engine(model_of(LLAMA))
    for scope in ("one", "two"):
        run(engine, ask(ids(30), 5, thread="t", scope=scope))
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    assert_same(contents(other), contents(engine))
    assert run(other, ask(ids(30), 5, scope="three")).n_reused_tokens == 0
    assert run(other, ask(ids(30), 5, scope="two")).n_reused_tokens == 30


@pytest.mark.real
def test_a_real_model_goes_on(real_smollm, make_engine, tmp_path):
    engine, other = (make_engine(real_smollm.model, real_smollm.tokenizer) for _ in range(2))
    prompt = engine.tokenizer.encode("The capital of France is Paris. " * 20 + "The capital of")
    first = ask(prompt, 12, thread="t")
    result = run(engine, first)
    engine.kv.save("t", tmp_path)
    assert other.kv.load(tmp_path, "t").n_tokens == len(stored(first, result))
    more = [*stored(first, result), *engine.tokenizer.encode(" And Germany?")]
    answer = run(other, ask(more, 12, thread="t"))
    assert answer.n_prefilled_tokens == len(more) - len(stored(first, result))
    assert list(answer.token_ids) == oracle.greedy(real_smollm.model, more, 12)
