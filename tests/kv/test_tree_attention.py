"""Attention of ragged batches over random trees: equal to dense causal attention, row by row."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from sidequest_langchain.kv import bunches, chain, tree_attention
from sidequest_langchain.kv import partial as partial_module
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.step_plan import StepPlan
from tests.kv.attending import (
    BATCHES,
    HEADS,
    WINDOWS,
    Fed,
    World,
    attend_layer,
    batch,
    features_for,
    grow,
    run,
    text_from,
)
from tests.kv.growing import CPU


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kinds", BATCHES.values(), ids=BATCHES)
def test_equals_dense_causal_attention(kinds, windows, softcap, has_sinks):
    for seed in range(4):
        rng = random.Random(seed)
        world = World(seed)
        grove, running = grow(world, rng)
        features_of = features_for(world, windows, softcap, has_sinks)
        fed = batch(rng, grove, running, kinds)
        run(world, grove, fed, features_of)
        again = [Fed(f.path, rng.choice("ab")) for f in fed]
        run(world, grove, again, features_of)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_segments_longer_than_a_block_of_keys(windows, softcap, monkeypatch):
    # With a window, the later queries of a chunk see nothing of a whole block.
    monkeypatch.setattr(partial_module, "KEY_BLOCK", 8)
    rng = random.Random(1)
    world = World(1)
    grove = world.grove()
    trunk = text_from(rng, 40, 40)
    grove.run(trunk)
    fed = [Fed(grove.begin(trunk + "ab"), text_from(rng, 25, 25)), Fed(grove.begin(trunk), "b")]
    run(world, grove, fed, features_for(world, windows, softcap, False))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 6e-3), (torch.float64, 1e-5)]
)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kinds", [BATCHES["mixed"], BATCHES["decode"]], ids=["mixed", "decode"])
def test_other_precisions_keep_their_dtype(kinds, dtype, tolerance, softcap, monkeypatch):
    monkeypatch.setattr(partial_module, "KEY_BLOCK", 8)
    rng = random.Random(2)
    world = World(2, dtype)
    grove, running = grow(world, rng)
    fed = batch(rng, grove, running, kinds)
    run(
        world,
        grove,
        fed,
        features_for(world, WINDOWS["by layer"], softcap, True),
        tolerance=tolerance,
    )


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_a_cold_prompt_in_chunks_and_then_token_by_token(has_sinks):
    world = World(3)
    grove = world.grove()
    path = grove.begin("a" * 5)
    features_of = features_for(world, WINDOWS["by layer"], None, has_sinks)
    for text in ["abbab", "bb", "a", "b", "abaabbbab", "a"]:
        run(world, grove, [Fed(path, text)], features_of)
    assert path.tip.n_rows == 19


def test_a_row_is_the_same_alone_and_in_company():
    world, rng = World(4), random.Random(4)
    features = features_for(world, WINDOWS["all"], None, False)(0)
    grove, running = grow(world, rng)
    fed = batch(rng, grove, running, BATCHES["mixed"])
    plan = StepPlan([f.row(grove.tree) for f in fed])
    together = attend_layer(world, plan, fed, 0, features)
    for f, (a, b) in zip(fed, plan.slices, strict=True):
        alone = attend_layer(world, StepPlan([f.row(grove.tree)]), [f], 0, features)
        torch.testing.assert_close(together[a:b], alone)


# -- writing -------------------------------------------------------------------------------


def everything(tree):
    return {
        (segment, layer, kind): tensor.clone()
        for segment in tree.segments()
        for kind, tensors in enumerate([segment.keys, segment.values])
        for layer, tensor in enumerate(tensors)
    }


@pytest.mark.parametrize("seed", range(6))
def test_writes_the_reserved_rows_of_its_layer_and_nothing_else(seed):
    world, rng = World(seed), random.Random(seed)
    grove, running = grow(world, rng)
    fed = batch(rng, grove, running, BATCHES["mixed"])
    plan = StepPlan([f.row(grove.tree) for f in fed])
    for segment in grove.tree.segments():  # a canary in every row that is not counted
        for tensor in (*segment.keys, *segment.values):
            tensor[:, segment.n_rows :] = -77.0
    before = everything(grove.tree)
    attend_layer(world, plan, fed, 1, features_for(world, WINDOWS["all"], None, False)(1))
    wanted = before
    for f in fed:
        if f.is_stored:
            tip, n = f.path.tip, f.path.tip.n_rows
            k, v = world.rows_of(f.tokens, tip.end, 1)
            wanted[tip, 1, 0][:, n : n + len(f.text)] = k
            wanted[tip, 1, 1][:, n : n + len(f.text)] = v
    after = everything(grove.tree)
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[key], wanted[key]) for key in wanted)
    assert any(s.capacity > s.n_rows + 20 for s in grove.tree.segments()), "no slack was guarded"


def test_a_step_that_failed_half_way_can_be_run_again():
    world, rng = World(5), random.Random(5)
    grove, running = grow(world, rng)
    features_of = features_for(world, WINDOWS["by layer"], None, False)
    fed = batch(rng, grove, running, BATCHES["mixed"])
    wrong = replace(fed[0], text=fed[0].text[::-1])
    plan = StepPlan([f.row(grove.tree) for f in [wrong, *fed[1:]]])
    attend_layer(world, plan, [wrong, *fed[1:]], 0, features_of(0))
    run(world, grove, fed, features_of)


# -- each block once -----------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """(storage address, first row's address, keys, queries of all heads) of every partial."""
    made = []

    def counting(q, k, v, **given):
        n_queries = q.shape[0] * q.shape[1]
        made.append((k.untyped_storage().data_ptr(), k.data_ptr(), k.shape[1], n_queries))
        return cpu_partial(q, k, v, **given)

    monkeypatch.setitem(tree_attention._PARTIALS, "cpu", counting)
    return made


def test_the_trunk_is_read_once_for_all_siblings(calls):
    world = World(6)
    grove = world.grove()
    trunk = grove.run("ab" * 20)
    fed = [Fed(grove.begin("ab" * 20 + "x"), letter) for letter in "abcdefgh"]
    run(world, grove, fed, features_for(world, WINDOWS["all"], None, False))
    at = trunk.tip.keys[0].untyped_storage().data_ptr()
    n_heads = HEADS[0][0]
    assert Counter(call[2:] for call in calls[:9]) == {(40, 8 * n_heads): 1, (1, n_heads): 8}
    assert [call[2:] for call in calls if call[0] == at] == [(40, 8 * n_heads)]
    assert len(calls) == 9 * len(HEADS)


@pytest.mark.parametrize("window", [None, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_each_distinct_block_is_attended_once(calls, seed, window, monkeypatch):
    monkeypatch.setattr(chain, "MOST_BLOCKS", 10**9)  # no two segments share a storage
    monkeypatch.setattr(bunches, "COPY_BYTES", 0)  # nor are they read with one call
    world, rng = World(seed), random.Random(seed)
    grove, running = grow(world, rng, n_running=6)
    fed = batch(rng, grove, running, ["decode"] * 6 + ["replay"])
    plan = StepPlan([f.row(grove.tree) for f in fed])
    blocks = set()
    for f, row in zip(fed, plan.rows, strict=True):
        oldest = 0 if window is None else row.position - window + 1
        for segment in f.path.tip.path():
            end = segment.end + (1 if segment is f.path.tip and f.is_stored else 0)
            if max(oldest, segment.start) < end:
                blocks.add((segment, max(oldest, segment.start), end))
    features = replace(features_for(world, WINDOWS["all"], None, False)(0), window=window)
    attend_layer(world, plan, fed, 0, features)
    assert len(calls) == len(set(calls)) == len(blocks)
    assert sorted(c[2] for c in calls) == sorted(end - first for _, first, end in blocks)
    if window is None:
        assert len({c[0] for c in calls}) == len(calls)


# -- the plan ------------------------------------------------------------------------------


def test_a_plan_packs_its_rows_one_after_another():
    grove = World(7).grove()
    grove.run("abab")
    fed = [
        Fed(grove.begin("abab"), "b", is_stored=False),
        Fed(grove.begin("ababxyz"), "xyz"),
        Fed(grove.begin("abq"), "q"),
    ]
    plan = StepPlan([f.row(grove.tree) for f in fed])
    assert plan.positions() == [3, 4, 5, 6, 2]
    assert (plan.n_tokens, plan.last_tokens()) == (5, [0, 3, 4])
    assert (plan.decoding, plan.prefilling) == ([0, 2], [1])
    assert plan.decoding_tokens(CPU).tolist() == [0, 4]
    assert [s.n_rows for s in plan.lineage(1)] == [2, 2, 0]
