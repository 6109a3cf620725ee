"""The managed cache in hard situations: positions, scores, heads, packing, copies, numbers.

Each test is one sentence of a case, told as a user meets it: whole engines over tiny models, and an
oracle of its own. What single rooms do about them is tested where the rooms are.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from sidequest_langchain.config import CacheConfig, Protection, Tiers
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.kinds import TokenKind
from sidequest_langchain.kv import packing, sealed_file
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.policy.acts import Archive, Compress, Evict
from sidequest_langchain.policy.facts import CacheFacts
from sidequest_langchain.policy.monitor import Monitor
from sidequest_langchain.policy.registry import policy_names
from tests.engine.driving import THREAD, ask, ids, model_of, token_bytes
from tests.engine.managing import Shadow, managed, run
from tests.engine.test_managed_faults import (
    Switch,
    archive_idle,
    check_return,
    files_in,
    left_and_archived,
    rows_of,
)
from tests.engine.test_managed_oracle import turns
from tests.support import oracle
from tests.support.tiny import tiny_model

MakeEngine = Callable[..., Engine]
CHOSEN = frozenset(range(8, 56, 3))
"""16 of the 64 tokens of a prompt."""
PRESSED = {"budget_tokens": 400, "trigger": 0.1, "target": 0.05}
"""A policy is always asked, and nothing has to go."""


def at_positions(kind: Any, positions: Iterable[int], **given: Any) -> Callable[..., list[Any]]:
    """Acts on the tokens at some positions."""
    chosen = set(positions)

    def policy(facts: CacheFacts) -> list[Any]:
        acts = []
        for s in facts.segments:
            offsets = tuple(p - s.start for p in range(s.start, s.end) if p in chosen)
            if offsets:
                acts.append(kind(s.segment_id, offsets, **given))
        return acts

    return policy


class Once:
    """A policy that acts in the first cycle in which so many tokens are stored."""

    def __init__(self, policy: Callable[..., list[Any]], n_tokens: int) -> None:
        self.policy, self.n_tokens, self.is_done = policy, n_tokens, False

    def __call__(self, facts: CacheFacts) -> list[Any]:
        if self.is_done or max((s.end for s in facts.segments), default=0) < self.n_tokens:
            return []
        self.is_done = True
        return self.policy(facts)


def logits_without(
    model: PreTrainedModel, tokens: Sequence[int], gone: Iterable[int], blind: Sequence[int]
) -> Tensor:
    """Plain logits of all tokens where the `blind` queries do not see `gone`, `[T, V]` (R1)."""
    n = len(tokens)
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    for query in blind:
        seen[query, [p for p in gone if p != query]] = False
    mask = torch.zeros(n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([list(tokens)]),
            attention_mask=mask[None, None],
            position_ids=torch.arange(n)[None],
            use_cache=False,
        ).logits[0]


# -- B51: positions after eviction --------------------------------------------------------


@pytest.mark.parametrize("kind", [Evict, Archive])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_who_comes_after_an_eviction_stands_where_it_stood(
    family: str, kind: Any, make_engine: MakeEngine
):
    """64 tokens, 16 of them leave while the answer is decoded; then a turn, and they come back."""
    model = model_of(family)
    policy = Once(at_positions(kind, CHOSEN), 64)
    tiers = Tiers(int8=False, int4=False, cpu_bytes=10**6 if kind is Archive else 0)
    engine = make_engine(model, config=managed(policy, tiers=tiers, **PRESSED))
    shadow = Shadow(engine, family)
    prompt = ids(64)
    first = run(engine, ask(prompt, 16, ignore_eos=True, call="a"))
    left = [r for r in shadow.receipts if r.outcome == "done"]
    assert {p for r in left for a, b in r.runs for p in range(a, b + 1)} == CHOSEN
    assert engine.kv.usage().n_tokens == 64 + 15 - 16
    following = [*prompt, *first.token_ids, *ids(5, seed=9)]
    second = run(engine, ask(following, 8, ignore_eos=True, call="b"))
    assert second.n_reused_tokens == 64 + 15
    n_away = len(following) + 8 - 1
    tokens = [*following, *second.token_ids]
    if kind is Archive:
        engine.kv.recall("b")
        following = [*tokens, *ids(5, seed=11)]
        third = run(engine, ask(following, 8, ignore_eos=True))
        tokens = [*following, *third.token_ids]
    # Those that were computed while the rows were away.
    gone_at = next(i for i, e in enumerate(shadow.events) if e.kind == "gone")
    first_blind = min(len(one.tokens) for one in shadow.said if one.now > gone_at + 1) - 1
    assert 64 <= first_blind < 72
    right = logits_without(model, tokens, CHOSEN, range(first_blind, n_away))
    whole = logits_without(model, tokens, CHOSEN, [])
    assert (right - whole)[first_blind:].abs().max() > 0.1, "the oracle can tell"
    for one in shadow.said:
        expected = right[len(one.tokens) - 1]
        assert float((one.logits - expected).abs().max()) <= 1e-4, len(one.tokens)
    for result, asked in ((first, 64), (second, 64 + 16 + 5)):
        answer = right[asked - 1 : asked - 1 + len(result.token_ids)].argmax(-1)
        assert tuple(answer.tolist()) == result.token_ids


# -- B52: scores without the model's attention weights ------------------------------------


@pytest.mark.parametrize("is_managed", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_scores_are_our_own_whatever_attention_the_model_was_loaded_with(
    implementation: str, is_managed: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    config = managed("tova", interval=1) if is_managed else CacheConfig()
    engine = make_engine(model, config=config)
    used = []
    for name in ("eager", "sdpa"):
        plain = modeling_llama.eager_attention_forward if name == "eager" else None
        plain = plain or ALL_ATTENTION_FUNCTIONS[name]

        def told(*args: Any, _name: str = name, _plain: Any = plain, **given: Any) -> Any:
            if threading.current_thread().name == THREAD:
                used.append(_name)
            return _plain(*args, **given)

        if name == "eager":
            monkeypatch.setattr(modeling_llama, "eager_attention_forward", told)
        else:
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, told)
    shares: dict[Any, Any] = defaultdict(float)
    add = Monitor._add

    def adding(self: Monitor, segment: Any, layer: int, offsets: Any, p: Tensor, **given: Any):
        if p.shape[2] == 1:  # a decoding row: its last query
            shares[self.n_steps, layer] = shares[self.n_steps, layer] + p.sum(-1)
        return add(self, segment, layer, offsets, p, **given)

    monkeypatch.setattr(Monitor, "_add", adding)
    shadow = Shadow(engine, "llama")
    turns(engine)
    assert (shadow.check() > 20) is is_managed
    assert used == []
    assert (engine._core.manager is not None) is is_managed
    assert (len(shares) > 100) is is_managed
    for row in shares.values():
        assert row.shape == (2, 2, 1), "query heads in groups, each its own"
        assert torch.allclose(row, torch.ones_like(row), atol=1e-5)
    engine.close()
    assert model.config._attn_implementation == implementation


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operator makes."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, Tensor):
                Largest.n_bytes = max(Largest.n_bytes, one.nbytes)
        return made


def test_a_long_prefill_that_is_watched_makes_no_square_of_scores(make_engine: MakeEngine):
    """2048 tokens by 4 heads: whole, that square is 64 MB; of a chunk and all before it, 2 MB."""
    model = tiny_model("llama", max_position_embeddings=4096)
    config = managed("h2o", budget_tokens=4000, prefill_chunk=64, interval=1)
    engine = make_engine(model, config=config)
    forward = engine._core.adapter.forward

    def measured(*args: Any, **given: Any) -> Any:
        with Largest():
            return forward(*args, **given)

    engine._core.adapter.forward = measured  # type: ignore[method-assign]
    Largest.n_bytes = 0
    prompt = ids(2048)
    run(engine, ask(prompt, 2, ignore_eos=True))
    monitor = engine._core.manager.monitor
    n_scored = sum(
        int((monitor.notes_of(s).n_seen > 0).sum()) for s in engine._core.tree.segments()
    )
    assert n_scored == 2049
    # Rows of one layer, side by side, are the largest; no scores of a chunk over all of them.
    assert Largest.n_bytes <= 4 * 64 * 2048 * 4


# -- B53: grouped heads -------------------------------------------------------------------

POINTED = (401, 404, 407, 410)
"""Tokens that the query heads of a group are made to look at; those of `ids` are below 400."""


def pointing(n_kv_heads: int) -> PreTrainedModel:
    """One layer whose K/V head `g`, seen from any query of its group, shows `POINTED[g]`."""
    model = tiny_model(
        "llama", num_hidden_layers=1, num_key_value_heads=n_kv_heads, attention_bias=True
    )
    layer = model.model.layers[0]
    slow = 7  # RoPE hardly turns this one
    with torch.no_grad():
        layer.input_layernorm.weight.fill_(1.0)
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight.zero_()
            part.bias.zero_()
        layer.self_attn.q_proj.bias.view(4, 16)[:, slow] = 4.0
        for g in range(n_kv_heads):
            embedding = model.model.embed_tokens.weight[POINTED[g]]
            layer.self_attn.k_proj.weight.view(n_kv_heads, 16, 64)[g, slow] = (
                4.0 * embedding / embedding.norm()
            )
    return model


def pointed_prompt(n_kv_heads: int, n: int) -> list[int]:
    prompt = ids(n)
    for g in range(n_kv_heads):
        prompt[12 + 12 * g] = POINTED[g]
    return prompt


@pytest.mark.parametrize("policy", ["h2o", "tova", "staged"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_a_token_that_one_group_of_heads_looks_at_survives(
    n_kv_heads: int, policy: str, make_engine: MakeEngine
):
    config = managed(policy, budget_tokens=80)
    engine = make_engine(pointing(n_kv_heads), config=config)
    run(engine, ask(pointed_prompt(n_kv_heads, 160), 6, ignore_eos=True))
    usage = engine.kv.usage()
    assert 0 < usage.n_tokens <= 80
    assert usage.n_bytes == usage.n_tokens * 1 * 2 * n_kv_heads * 16 * 4
    kept = set()
    for segment in engine._core.tree.segments():
        assert segment.keys[0].shape[0] == segment.values[0].shape[0] == n_kv_heads
        there = segment.residency
        dense = range(segment.n_tokens) if there is None else there.dense
        kept |= {segment.token_ids[at] for at in dense}
    assert kept >= set(POINTED[:n_kv_heads])


@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_each_head_keeps_what_its_own_group_looks_at(n_kv_heads: int, make_engine: MakeEngine):
    policy = Switch()
    config = managed(
        policy,
        eviction="per_head",
        prefill_chunk=64,
        protection=Protection(n_sink=0, recent_window=1, ends=0.0, newest_tool_call=False),
        **PRESSED,
    )
    engine = make_engine(pointing(n_kv_heads), config=config)
    prompt = pointed_prompt(n_kv_heads, 60)
    run(engine, ask(prompt, 1))
    [segment] = engine._core.tree.segments()
    policy.policy = at_positions(Evict, range(57))  # as many for each head, not these
    engine.kv.manage()
    assert segment.kept_by_head is not None
    kept = [{prompt[at] for at in row} for row in segment.kept_by_head[0].tolist()]
    assert all(len(head) == 3 for head in kept)
    for g in range(n_kv_heads):
        assert kept[g] & set(POINTED) == {POINTED[g]}


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "staged"])
def test_shared_heads_are_managed_as_heads_that_are_repeated(policy: str, make_engine: MakeEngine):
    """Two of K/V, and the same two written out for every query head: one answer, the same acts."""
    grouped, whole = tiny_model("llama"), tiny_model("llama", num_key_value_heads=4)
    given = grouped.state_dict()
    for name in list(given):
        if "k_proj" in name or "v_proj" in name:
            heads = given[name].view(2, 16, 64)
            given[name] = heads.repeat_interleave(2, 0).reshape(64, 64)
    whole.load_state_dict(given)
    seen = []
    for model, heads in ((grouped, 2), (whole, 4)):
        assert token_bytes(model) == 2 * 2 * heads * 16 * 4
        engine = make_engine(model, config=managed(policy))
        receipts: list[Any] = []
        engine._core.manager.log.observers.append(receipts.append)
        answers = []
        prompt = ids(70)
        for turn in range(3):
            result = run(engine, ask(prompt, 24, ignore_eos=True))
            answers.append(result.token_ids)
            prompt = [*prompt, *result.token_ids, *ids(9, seed=20 + turn)]
        done = [(r.verb, r.runs, r.freed_bytes // heads) for r in receipts if r.outcome == "done"]
        assert any(verb == "evict" for verb, *_ in done)
        seen.append((answers, done, engine.kv.usage().n_bytes // heads))
    assert seen[0] == seen[1]


# -- B55: what must not leave -------------------------------------------------------------


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "none"])
def test_first_protected_and_last_tokens_outlive_any_policy(policy: str, make_engine: MakeEngine):
    """A budget of 32 over 200 tokens, the second time as one that was asked before."""
    kinds = bytearray([TokenKind.TOOL_RESULT] * 200)
    system, question = range(40, 45), range(120, 126)
    for span, kind in ((system, TokenKind.SYSTEM), (question, TokenKind.QUESTION)):
        kinds[span.start : span.stop] = bytes([kind]) * len(span)
    rules = Protection(n_sink=4, recent_window=8, ends=0.0, newest_tool_call=False)
    engine = make_engine("llama", config=managed(policy, budget_tokens=32, protection=rules))
    prompt = ids(200)
    for n in (200, 170):
        request = replace(ask(prompt[:n], 6, ignore_eos=True), kinds=bytes(kinds[:n]))
        run(engine, request)
        tips = {path.tip for path in engine._core.tree.paths.values()}
        kept: set[int] = set()
        newest = (
            max(tips, key=lambda tip: tip.segment_id)
            if n == 170
            else max(tips, key=lambda tip: tip.start + tip.n_tokens)
        )
        for segment in newest.path():
            there = segment.residency
            dense = range(segment.n_tokens) if there is None else there.dense
            kept |= {segment.start + at for at in dense}
        assert kept >= {*range(4), *system, *question}
        assert engine.kv.usage().n_tokens <= 32
    assert kept


# -- B56: layers of other lengths ---------------------------------------------------------


def test_layers_keep_other_tokens_but_never_another_number(make_engine: MakeEngine):
    """A ragged choice is refused; decoding and a turn of five tokens go on over an equal one."""
    config = managed("snapkv", eviction="per_head", budget_tokens=100)
    engine = make_engine(model_of("llama"), config=config)
    shadow = Shadow(engine, "llama")
    prompt = ids(70)
    first = run(engine, ask(prompt, 20, ignore_eos=True))
    run(engine, ask([*prompt, *first.token_ids, *ids(5, seed=3)], 8, ignore_eos=True))
    assert shadow.check() > 8
    shadow.check_books()
    by_head = [s for s in engine._core.tree.segments() if s.kept_by_head is not None]
    assert any(not torch.equal(*s.kept_by_head) for s in by_head), "layers keep other tokens"
    for segment in by_head:
        n = segment.kept_by_head.shape[2]
        assert {t.shape[1] for t in (*segment.keys, *segment.values)} == {n}
    [segment] = [s for s in engine._core.tree.segments() if s.start == 0]
    held = segment.kept_by_head[:, :, :2].tolist()
    held[0] = [[head[0]] * 2 for head in held[0]]  # one token fewer in a layer, its place filled
    with pytest.raises(ValueError, match="ascend"):
        engine._core.tree.evict_by_head(segment, torch.tensor(held))


# -- B63: channels of keys that are out of proportion -------------------------------------


SURE, UNSURE = 5, 20
"""Prompts; after the first one no model below says another word because of 8 bits."""


def with_outliers(is_answered: bool) -> PreTrainedModel:
    """The tiny llama with one RoPE pair of key channels times 200.

    Args:
        is_answered: Divide the queries' by 200: another model of the same function.
    """
    model = tiny_model("llama")
    for layer in model.model.layers:
        with torch.no_grad():
            for channel in (5, 13):  # RoPE turns them as a pair
                layer.self_attn.k_proj.weight.view(2, 16, 64)[:, channel] *= 200
                if is_answered:
                    layer.self_attn.q_proj.weight.view(4, 16, 64)[:, channel] /= 200
    return model


def packed_answer(make_engine: MakeEngine, model: PreTrainedModel, seed: int) -> tuple[Any, Any]:
    """A prompt that was packed to INT8 and goes on, and 16 tokens that are said over it."""
    config = managed(
        at_positions(Compress, range(2, 128), bits=8), tiers=Tiers(), prefill_chunk=64, **PRESSED
    )
    engine = make_engine(model, config=config)
    prompt = ids(140, seed)
    first = run(engine, ask(prompt, 1, call="a"))
    engine.kv.manage()
    packed = [block for s in engine._core.tree.segments() for block in s.packed]
    assert sum(block.n_rows for block in packed) == 126
    following = [*prompt, *first.token_ids, 7]
    return following, run(engine, ask(following, 16, ignore_eos=True))


@pytest.mark.parametrize("is_answered", [True, False])
def test_huge_channels_of_keys_change_no_word_once_packed(
    is_answered: bool, make_engine: MakeEngine
):
    model = with_outliers(is_answered)
    following, result = packed_answer(make_engine, model, SURE)
    assert result.n_reused_tokens >= 140
    assert list(result.token_ids) == oracle.greedy(model, following, 16, ignore_eos=True)


def test_what_8_bits_lose_does_not_depend_on_a_channels_size(make_engine: MakeEngine):
    """Where the tiny model itself says other words once packed, they are the same other words."""
    _, plain = packed_answer(make_engine, model_of("llama"), UNSURE)
    following, result = packed_answer(make_engine, with_outliers(is_answered=True), UNSURE)
    assert result.token_ids == plain.token_ids
    full = oracle.greedy(model_of("llama"), following, 16, ignore_eos=True)
    assert list(plain.token_ids) != full, "the prompt can tell"


def test_one_grid_for_a_rows_channels_would_change_the_words(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """The test above can tell: with a grid for each row, the small channels are lost."""
    pack = PackedBlock.pack.__func__  # type: ignore[attr-defined]

    def by_row(cls: Any, keys: Sequence[Tensor], values: Any, *args: Any, **given: Any) -> Any:
        coarse = []
        for k in keys:
            low, high = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
            step = (high - low).clamp_min(1e-12) / 255
            coarse.append(((k - low) / step).round() * step + low)
        return pack(cls, coarse, values, *args, **given)

    monkeypatch.setattr(packing.PackedBlock, "pack", classmethod(by_row))
    model = with_outliers(is_answered=True)
    following, result = packed_answer(make_engine, model, SURE)
    assert list(result.token_ids) != oracle.greedy(model, following, 16, ignore_eos=True)


# -- B64, B65, B80: copies of another model, a full disk, files of somebody else ----------


class Adapted(nn.Module):
    """A linear layer with adapters, switched as in PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(1)
        self.deltas = {n: torch.randn(base.weight.shape, generator=generator) / 8 for n in "ab"}
        self.active_adapters, self.disable_adapters = ["a"], False

    def forward(self, x: Tensor) -> Tensor:
        if self.disable_adapters:
            return self.base(x)
        return self.base(x) + sum(x @ self.deltas[name].T for name in self.active_adapters)


def adapted_model() -> PreTrainedModel:
    model = tiny_model("llama")
    layers = [layer.self_attn for layer in model.model.layers]
    for attention in layers:
        attention.k_proj = Adapted(attention.k_proj)
    model.active_adapters = lambda: layers[0].k_proj.active_adapters  # type: ignore[method-assign]
    return model


def switch_adapter(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.active_adapters = ["b"]


def disable_adapters(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.disable_adapters = True


def turn_faster(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 50.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def train(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight.add_(0.3)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("change", [switch_adapter, disable_adapters, turn_faster, train])
def test_copies_made_before_a_model_was_changed_are_not_used(
    change: Callable[[Any], None], tier: str, make_engine: MakeEngine, tmp_path: Path
):
    model = adapted_model()
    engine, prompt = left_and_archived(make_engine, tier, tmp_path, model=model)
    engine._core.manager._returns.costs.tokens_a_second = 1e-3  # a restore is cheaper
    before = oracle.greedy(model, prompt, 8, ignore_eos=True)
    change(model)
    assert oracle.greedy(model, prompt, 8, ignore_eos=True) != before, "the change shows"
    check_return(engine, prompt, is_restored=False)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_while_archiving_leaves_rows_where_they_are(
    call: str, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "a"
    tiers = Tiers(int8=False, int4=False, disk_bytes=10**6, archive_folder=folder)
    engine = make_engine(model_of("llama"), config=managed(archive_idle, 300, tiers=tiers))
    receipts: list[Any] = []
    engine._core.manager.log.observers.append(receipts.append)

    def full(*args: Any, **given: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sealed_file.os, call, full)
    prompt = ids(100, seed=1)
    answer = run(engine, ask(prompt, 8, ignore_eos=True))
    run(engine, ask(ids(140, seed=2), 4, ignore_eos=True))
    monkeypatch.undo()
    tried = [r for r in receipts if r.verb == "archive"]
    assert tried
    assert {r.outcome for r in tried} & {"done"} == set()
    assert files_in(folder) == []
    following = [*prompt, *answer.token_ids, 3]
    again = run(engine, ask(following, 8, ignore_eos=True))
    assert again.n_reused_tokens == len(prompt) + 7
    assert list(again.token_ids) == oracle.greedy(model_of("llama"), following, 8, ignore_eos=True)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("writer", ["pickle", "torch.save", "a header of a terabyte"])
def test_a_file_of_somebody_else_in_the_archive_is_neither_run_nor_read(
    writer: str, make_engine: MakeEngine, tmp_path: Path
):
    engine, prompt = left_and_archived(make_engine, "disk", tmp_path)
    engine._core.manager._returns.costs.tokens_a_second = 1e-3
    marker = tmp_path / "marker"
    copies = files_in(tmp_path / "a")
    assert copies
    for file in copies:
        if writer == "pickle":
            file.write_bytes(pickle.dumps(Touch(marker)))
        elif writer == "torch.save":
            torch.save({"rows": Touch(marker)}, file)
        else:
            file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])
    check_return(engine, prompt, is_restored=False)
    assert not marker.exists()


# -- B67: half precision ------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["cpu_bytes", "disk_bytes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_come_back_bit_for_bit(
    dtype: torch.dtype, tier: str, make_engine: MakeEngine, tmp_path: Path
):
    policy = Switch()
    folder = tmp_path if tier == "disk_bytes" else None
    tiers = Tiers(int8=False, int4=False, archive_folder=folder, **{tier: 10**6})
    engine = make_engine(
        tiny_model("llama").to(dtype), config=managed(policy, tiers=tiers, **PRESSED)
    )
    run(engine, ask(ids(70), 1, call="a"))
    before = rows_of(engine, ids(70))
    assert {t.dtype for t in before} == {dtype}
    policy.policy = at_positions(Evict, CHOSEN)
    done = [r for r in engine.kv.manage() if r.outcome == "done"]
    assert sum(r.n_rows for r in done) == len(CHOSEN)
    archive = engine._core.tree.archive
    n_payload = len(CHOSEN) * token_bytes(engine._core.adapter.model)
    held = archive.n_cpu_bytes if tier == "cpu_bytes" else archive.n_disk_bytes
    assert n_payload <= held < n_payload + archive.n_entries * 64 * 1024
    policy.policy = None
    engine.kv.recall("a")
    assert all(map(torch.equal, before, rows_of(engine, ids(70))))


# -- B71: numbers by hand -----------------------------------------------------------------


@pytest.mark.parametrize("is_archived", [False, True])
def test_what_left_and_is_computed_again_is_no_hit_and_what_comes_back_is(
    is_archived: bool, make_engine: MakeEngine
):
    """Prompts of 100, 100 and 150 tokens that share 80; a retry; then a path leaves and returns."""
    policy = Switch()
    tiers = Tiers(int8=False, int4=False, cpu_bytes=10**6)
    engine = make_engine(model_of("llama"), config=managed(policy, 1000, tiers=tiers))
    trunk = ids(80)
    prompts = [[*trunk, *ids(n, seed=n)] for n in (20, 20, 70)]
    prompts[1] = [*trunk, *ids(20, seed=21)]
    results = []

    def asked(prompt: list[int]) -> int:
        results.append(run(engine, ask(prompt, 1)))
        assert results[-1].n_reused_tokens + results[-1].n_prefilled_tokens == len(prompt)
        return results[-1].n_reused_tokens

    assert [asked(p) for p in prompts] == [0, 80, 80]
    assert asked(prompts[0]) == 100, "a retry finds all of it"
    assert asked(ids(50, seed=33)) == 0, "another prompt finds nothing"
    policy.policy = at_positions(Archive, range(2, 142))
    engine._core.manager._cycles.limits.budget_rows = 100
    engine.kv.manage()
    engine._core.manager._cycles.limits.budget_rows = 1000
    policy.policy = None
    costs = engine._core.manager._returns.costs
    costs.bytes_a_second, costs.tokens_a_second = (1e9, 1e-3) if is_archived else (1e-3, 1e9)
    returned = asked(prompts[2])
    assert returned == (150 if is_archived else 0)
    usage = engine.kv.usage()
    assert usage.n_prompt_tokens == sum(r.n_prompt_tokens for r in results)
    assert usage.n_reused_tokens == sum(r.n_reused_tokens for r in results)
    assert usage.n_prefilled_tokens == usage.n_prompt_tokens - usage.n_reused_tokens
    tree = engine._core.tree
    archive, tree.archive = tree.archive, None
    assert oracle.storage_bytes(tree) == usage.n_bytes
    tree.archive = archive
