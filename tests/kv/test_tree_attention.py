"""Attention of ragged batches over random trees: equal to dense causal attention, row by row."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from sidequest_langchain.kv import partial as partial_module
from sidequest_langchain.kv import tree_attention
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.layout import LayerShape
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.segment import Path
from sidequest_langchain.kv.step_plan import Row, StepPlan
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.kv.tree_attention import Features, attend
from tests.kv.growing import CPU, Grove, check_rows, ids, tokens_to

# (query heads, KV heads, key dim, value dim) of each layer
HEADS = [(4, 2, 8, 8), (7, 1, 16, 16), (2, 2, 8, 4)]
N_CODES = 4096


class World:
    """A stand-in for a model: queries, keys and values of a token in a layer.

    All of them are random, but a function of the tokens up to it.
    """

    def __init__(self, seed, dtype=torch.float32):
        g = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.tables = [
            tuple(
                torch.randn(n, N_CODES, dim, generator=g).to(dtype)
                for n, dim in [(hq, d), (h, d), (h, dv)]
            )
            for hq, h, d, dv in HEADS
        ]
        self.sinks = [torch.randn(hq, generator=g) for hq, *_ in HEADS]

    def codes(self, tokens, first):
        code, codes = 1, []
        for token in tokens:
            code = (code * 31 + token) % 65_521
            codes.append(code % N_CODES)
        return torch.tensor(codes[first:], dtype=torch.long)

    def qkv(self, tokens, first, layer):
        """q, k and v of `tokens[first:]`, `[heads, S, dim]` each."""
        codes = self.codes(tokens, first)
        return tuple(table[:, codes] for table in self.tables[layer])

    def rows_of(self, tokens, first, layer):
        return self.qkv(tokens, first, layer)[1:]

    def grove(self):
        layout = tuple(
            LayerShape(n_kv_heads=h, key_dim=d, value_dim=dv, dtype=self.dtype, device=CPU)
            for _, h, d, dv in HEADS
        )
        return Grove(SegmentTree(layout), rows_of=self.rows_of)


@dataclass
class Fed:
    """What one path feeds in a step."""

    path: Path
    text: str
    is_stored: bool = True

    def row(self, tree) -> Row:
        if self.is_stored:
            tree.reserve(self.path, len(self.text))
        end = self.path.tip.end
        return Row(
            tip=self.path.tip,
            n_new=len(self.text),
            position=end if self.is_stored else end - 1,
            is_stored=self.is_stored,
        )

    @property
    def tokens(self):
        """The whole sequence with what is fed now at its end."""
        return tokens_to(self.path.tip) + (tuple(ids(self.text)) if self.is_stored else ())


def densely(world, tokens, n_new, layer, features):
    """Causal attention of the last `n_new` tokens in float64, one token at a time."""
    q, k, v = (t.double() for t in world.qkv(tokens, 0, layer))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out = []
    for at in range(len(tokens) - n_new, len(tokens)):
        first = 0 if features.window is None else max(0, at - features.window + 1)
        scores = torch.einsum("hd,hsd->hs", q[:, at], k[:, first : at + 1]) * features.scaling
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        if features.sinks is not None:
            scores = torch.cat([scores, features.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : at + 1 - first]
        out.append(torch.einsum("hs,hsd->hd", weights, v[:, first : at + 1]))
    return torch.stack(out)


def run(world, grove, fed, features_of, *, tolerance=2e-5):
    """One step over all layers, compared with the dense way; then the tree counts it."""
    plan = StepPlan([f.row(grove.tree) for f in fed])
    for layer in range(len(HEADS)):
        features = features_of(layer)
        out = attend_layer(world, plan, fed, layer, features)
        n_heads, value_dim = HEADS[layer][0], HEADS[layer][3]
        assert (out.shape, out.dtype) == ((plan.n_tokens, n_heads, value_dim), world.dtype)
        wanted = torch.cat([densely(world, f.tokens, len(f.text), layer, features) for f in fed])
        torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    for f in fed:
        if f.is_stored:
            grove.tree.extend(f.path, ids(f.text))
    check_integrity(grove.tree)
    check_rows(grove)


def attend_layer(world, plan, fed, layer, features):
    packed = [world.qkv(f.tokens, len(f.tokens) - len(f.text), layer) for f in fed]
    q, k, v = (torch.cat(parts, 1) for parts in zip(*packed, strict=True))
    return attend(plan, layer, q, k, v, features)


def features_for(world, windows, softcap, has_sinks):
    """Features by layer; each layer may have a window of its own, as in Gemma."""
    return lambda layer: Features(
        scaling=0.3,
        window=windows[layer],
        softcap=softcap,
        sinks=world.sinks[layer] if has_sinks else None,
    )


def text_from(rng, n_most, n_least=1):
    return "".join(rng.choice("ab") for _ in range(rng.randint(n_least, n_most)))


def grow(world, rng, *, n_done=6, n_running=3):
    """A random tree of closed paths, and some running ones with room to grow full of NaN."""
    grove = world.grove()
    for _ in range(n_done):
        old = rng.choice([*grove.tree.paths.values(), None])
        head = "".join(map(chr, tokens_to(old.tip))) if old and rng.random() < 0.7 else ""
        grove.run(head + text_from(rng, 12))
    running = []
    for _ in range(n_running):
        path = grove.begin(text_from(rng, 8) * 2)
        grove.feed(path, text_from(rng, 10), at_once=rng.random() < 0.5)
        running.append(path)
    for segment in grove.tree.segments():
        for tensor in (*segment.keys, *segment.values):
            tensor[:, segment.n_rows :] = float("nan")
    return grove, running


def replayed(rng, grove):
    """A prompt that is resident to its end: its last token is run again, and not stored."""
    known = rng.choice([p for p in grove.tree.paths.values() if p.tip.n_rows])
    prompt = "".join(map(chr, tokens_to(known.tip)))
    return Fed(grove.begin(prompt), prompt[-1], is_stored=False)


def batch(rng, grove, running, kinds):
    """Decode rows, replays and prefill chunks in random order."""
    fed = [replayed(rng, grove) for kind in kinds if kind == "replay"]
    for kind in kinds:
        if kind == "decode":
            path = running.pop() if running else grove.begin(text_from(rng, 9, 3))
            fed.append(Fed(path, rng.choice("ab")))
        elif kind == "prefill":
            fed.append(Fed(grove.begin(text_from(rng, 30, 4)), text_from(rng, 20, 2)))
    rng.shuffle(fed)
    return fed


BATCHES = {
    "one decode": ["decode"],
    "decode": ["decode"] * 4,
    "one prefill": ["prefill"],
    "prefill": ["prefill"] * 3,
    "replay": ["replay"] * 2,
    "mixed": ["decode", "prefill", "decode", "replay", "prefill"],
}
WINDOWS = {"all": (None,) * 3, "3": (3,) * 3, "16": (16,) * 3, "by layer": (3, None, 16)}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision_keeps_its_dtype(dtype, softcap, monkeypatch):
    monkeypatch.setattr(partial_module, "KEY_BLOCK", 8)
    rng = random.Random(2)
    world = World(2, dtype)
    grove, running = grow(world, rng)
    fed = batch(rng, grove, running, BATCHES["mixed"])
    run(world, grove, fed, features_for(world, WINDOWS["by layer"], softcap, True), tolerance=6e-2)


def test_a_cold_prompt_in_chunks_and_then_token_by_token():
    world = World(3)
    grove = world.grove()
    path = grove.begin("a" * 5)
    features_of = features_for(world, WINDOWS["by layer"], None, False)
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
    """(storage address, first row's address, keys, queries) of every partial computed."""
    made = []

    def counting(q, k, v, **given):
        made.append((k.untyped_storage().data_ptr(), k.data_ptr(), k.shape[1], q.shape[1]))
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
    assert Counter(call[2:] for call in calls[:9]) == {(40, 8): 1, (1, 1): 8}
    assert [call[2:] for call in calls if call[0] == at] == [(40, 8)]
    assert len(calls) == 9 * len(HEADS)


@pytest.mark.parametrize("window", [None, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_each_distinct_block_is_attended_once(calls, seed, window):
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
