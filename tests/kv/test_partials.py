"""Attention over several blocks with one call: the same as block by block, and when it is used."""

from __future__ import annotations

import random

import pytest
import torch

from sidequest_langchain.kv import bunches, tree_attention
from sidequest_langchain.kv.features import Features
from sidequest_langchain.kv.partial import math_partial, one_by_one
from sidequest_langchain.kv.partial_cpu import cpu_partial, cpu_partials
from sidequest_langchain.kv.step_plan import StepPlan
from tests.kv import attending
from tests.kv.attending import HEADS, Fed, World, attend_layer, densely, text_from
from tests.kv.test_partial import TOLERANCE, plainly

LENGTHS = {1: [[1], [37]], 2: [[1, 1], [1, 64], [513, 3]], 5: [[1, 2, 33, 1, 700], [8] * 5]}
CASES = [lengths for several in LENGTHS.values() for lengths in several]


def drawn(seed, lengths, dtype, *, n_heads=3, n_queries=4, dim=16, value_dim=None):
    """Queries, and blocks of keys and values that are views of longer ones."""
    g = torch.Generator().manual_seed(seed)

    def normal(n, of):
        return torch.randn(n_heads, n, of, generator=g).to(dtype)

    q = normal(n_queries, dim)
    blocks = [
        (normal(n + 4, dim)[:, 1 : n + 1], normal(n + 4, value_dim or dim)[:, 2 : n + 2])
        for n in lengths
    ]
    return q, blocks


@pytest.mark.parametrize("value_dim", [None, 8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", CASES, ids=str)
@pytest.mark.parametrize("partial", [cpu_partial, math_partial])
def test_equals_one_by_one(partial, lengths, dtype, value_dim):
    for n_queries in (1, 4):
        q, blocks = drawn(len(lengths), lengths, dtype, n_queries=n_queries, value_dim=value_dim)
        before = [t.clone() for t in (q, *(t for block in blocks for t in block))]
        out, lse = cpu_partials(q, blocks, scaling=0.3)
        wanted_out, wanted_lse = one_by_one(partial)(q, blocks, scaling=0.3)
        assert out.shape == wanted_out.shape == (len(lengths), 3, n_queries, value_dim or 16)
        assert lse.shape == wanted_lse.shape == (len(lengths), 3, n_queries)
        assert lse.dtype == wanted_lse.dtype == torch.float32
        near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out.float(), wanted_out.float(), **near)
        torch.testing.assert_close(lse, wanted_lse, **near)
        after = [q, *(t for block in blocks for t in block)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ways", [cpu_partials, one_by_one(cpu_partial), one_by_one(math_partial)])
def test_every_block_is_attention_written_down_plainly(ways, dtype):
    q, blocks = drawn(9, [1, 2, 33, 1, 700], dtype)
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    found = ways(q, blocks, scaling=0.3)
    for (k, v), out, lse in zip(blocks, *found, strict=True):
        wanted_out, wanted_lse = plainly(q, k, v, scaling=0.3)
        torch.testing.assert_close(out.double(), wanted_out, **near)
        torch.testing.assert_close(lse.double(), wanted_lse, **near)


def test_one_block_among_others_with_smaller_values():
    """Where the kernel refuses one of them, all go the other way, with the dims that they have."""
    q, blocks = drawn(10, [5, 7], torch.float32, value_dim=8)
    out, lse = cpu_partials(q, blocks, scaling=0.3)
    for at, (k, v) in enumerate(blocks):
        wanted = math_partial(q, k, v, scaling=0.3)
        torch.testing.assert_close((out[at], lse[at]), wanted)


# -- when decoding uses it -----------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Rows of the blocks of every call."""
    made = []

    def counting(q, blocks, *, scaling):
        assert q.shape[0] == blocks[0][0].shape[0], "not one query head for each KV head"
        made.append([k.shape[1] for k, _ in blocks])
        return cpu_partials(q, blocks, scaling=scaling)

    monkeypatch.setitem(tree_attention._OF_MANY, cpu_partial, counting)
    monkeypatch.setattr(bunches, "COPY_BYTES", 0)  # blocks of any size stay where they are
    return made


class Watch:
    layers = frozenset(range(len(HEADS)))

    def __init__(self):
        self.told = []

    def decoded(self, plan, layer, seen):
        self.told.append(seen)

    def prefilled(self, plan, layer, seen):
        pass


def trunk_and_tips(world, n_tips, *, n_more=0):
    """A trunk of 40 rows with running tips on it, of which each has `n_more` rows more."""
    rng = random.Random(3)
    grove = world.grove()
    trunk = text_from(rng, 40, 40)
    grove.run(trunk)
    paths = [grove.begin(trunk + "x") for _ in range(n_tips)]
    for n, path in enumerate(paths):
        grove.feed(path, text_from(rng, 9 + n_more * n, 9 + n_more * n))
    return grove, paths


def decoded(world, grove, paths, *, watcher=None, has_sinks=False, **given):
    """A decode step over all layers, each compared with the dense way."""
    fed = [Fed(path, "b") for path in paths]
    plan = StepPlan([f.row(grove.tree) for f in fed], watcher=watcher)
    for layer in range(len(HEADS)):
        sinks = world.sinks[layer] if has_sinks else None
        features = Features(scaling=0.3, sinks=sinks, **given)
        out = attend_layer(world, plan, fed, layer, features)
        wanted = torch.cat([densely(world, f.tokens, 1, layer, features) for f in fed])
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
    return plan


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_step_over_whole_blocks_is_one_call(calls, has_sinks, is_watched):
    world = World(0)
    grove, [path] = trunk_and_tips(world, 1)
    grove.tree.seal(path)
    grove.feed(path, "abab")
    watcher = Watch() if is_watched else None
    plan = decoded(world, grove, [path], watcher=watcher, has_sinks=has_sinks)
    n_calls = len(plan.reads(None, is_watched=is_watched).calls)
    assert n_calls > 1
    assert [len(rows) for rows in calls] == [n_calls] * len(HEADS)
    assert {sum(rows) for rows in calls} == {40 + 9 + 4 + 1}


@pytest.mark.parametrize("has_sinks", [False, True])
def test_what_a_watcher_hears_is_the_same_either_way(calls, has_sinks, monkeypatch):
    heard = []
    for ways in ({}, {cpu_partial: tree_attention._OF_MANY[cpu_partial]}):
        monkeypatch.setattr(tree_attention, "_OF_MANY", ways)
        world, watcher = World(0), Watch()
        grove, [path] = trunk_and_tips(world, 1)
        grove.tree.seal(path)
        decoded(world, grove, [path], watcher=watcher, has_sinks=has_sinks)
        heard.append(watcher.told)
    assert len(calls) == len(HEADS)
    assert len(heard[0]) == len(heard[1]) == len(HEADS)
    for layer, (one, other) in enumerate(zip(*heard, strict=True)):
        assert len(one.lses) == len(one.blocks) == len(other.lses) > 1
        torch.testing.assert_close(one.lses, other.lses)
        torch.testing.assert_close(one.total, other.total)
        for block, lse in zip(one.blocks, one.lses, strict=True):
            _, wanted = math_partial(one.q, *block.load(layer), scaling=0.3)
            torch.testing.assert_close(lse.flatten(), wanted.flatten())
        whole = torch.logsumexp(torch.stack([lse.flatten() for lse in one.lses]), 0)
        if has_sinks:
            whole = torch.logaddexp(whole, world.sinks[layer])
        torch.testing.assert_close(whole, one.total.flatten())


def test_softcap_goes_block_by_block(calls):
    world = World(1)
    grove, [path] = trunk_and_tips(world, 1)
    decoded(world, grove, [path], softcap=2.0)
    assert calls == []
    decoded(world, grove, [path])
    assert len(calls) == len(HEADS)


def test_siblings_that_see_different_rows_go_block_by_block(calls):
    world = World(2)
    grove, paths = trunk_and_tips(world, 2, n_more=1)
    decoded(world, grove, paths)
    assert calls == []
    decoded(world, grove, paths[:1])
    assert len(calls) == len(HEADS)


def test_a_window_that_ends_in_a_block_reads_the_rest_of_it_at_once(calls):
    """One query: what its window leaves of a block is seen whole."""
    world = World(3)
    grove, [path] = trunk_and_tips(world, 1)
    decoded(world, grove, [path], window=16)
    assert [sum(rows) for rows in calls] == [16] * len(HEADS)


def test_rows_that_heads_do_not_all_see_go_block_by_block(calls, monkeypatch):
    monkeypatch.setattr(attending, "HEADS", [(4, 2, 8, 8)] * 2)
    world = World(4)
    grove, [path] = trunk_and_tips(world, 1)
    trunk = path.tip.path()[0]
    heads = [[[0, 3, 5, 9], [1, 5, 7, 8]], [[2, 5, 7, 9], [5, 6, 8, 30]]]
    grove.tree.evict_by_head(trunk, torch.tensor(heads))

    def step():
        fed = Fed(path, "b")
        plan = StepPlan([fed.row(grove.tree)])
        for layer in range(2):
            features = Features(scaling=0.3)
            out = attend_layer(world, plan, [fed], layer, features)
            gone = [
                set(range(40)) - set(kept) | (set(kept) & trunk.hidden) for kept in heads[layer]
            ]
            wanted = densely(world, fed.tokens, 1, layer, features, gone)
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)

    step()
    assert len(calls) == 2
    grove.tree.hide(trunk, [5])
    step()
    assert len(calls) == 2
