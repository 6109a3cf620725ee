"""What the monitor notes is what the plain model's attention matrices say."""

from __future__ import annotations

import functools

import pytest
import torch

from sidequest_langchain.policy.joining import Joiner
from tests.engine.driving import ask, ids
from tests.engine.managing import managed, run, run_together, tokens_to
from tests.support.tiny import tiny_model

DECAY, WINDOW = 0.9, 32
NAMES = ("importance", "accumulated", "n_seen", "last", "window")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2")


@functools.cache
def eager(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    return model


def attention_of(family, tokens):
    """Probabilities of every layer, mean over the query heads, `[L, T, T]`."""
    with torch.no_grad():
        given = {"attention_mask": torch.ones(1, len(tokens), dtype=torch.long)}
        out = eager(family)(
            torch.tensor([tokens]), output_attentions=True, use_cache=False, **given
        )
    return torch.stack([layer[0].mean(0) for layer in out.attentions])


def reach(family, layer):
    """How far back a layer sees."""
    config = eager(family).config
    types = getattr(config, "layer_types", None)
    is_local = types[layer] == "sliding_attention" if types else config.model_type == "mistral"
    window = getattr(config, "sliding_window", None)
    return window if is_local and window else 10**6


class Expected:
    """Notes kept by hand, by the tokens up to a token."""

    def __init__(self, family, layers):
        self.family, self.layers = family, layers
        self.notes = {}

    def step(self, rows):
        """Take in the rows of a step: (tokens, new ones among them)."""
        total, count, last, prefill = {}, {}, {}, set()
        for tokens, n_new in rows:
            p = attention_of(self.family, tokens)
            queries = range(len(tokens) - min(n_new, WINDOW), len(tokens))
            for at in range(len(tokens)):
                key = tokens[: at + 1]
                seen = [
                    (layer, q)
                    for layer in self.layers
                    for q in queries
                    if 0 <= q - at < reach(self.family, layer)
                ]
                if not seen:
                    continue
                total[key] = total.get(key, 0.0) + sum(float(p[layer, q, at]) for layer, q in seen)
                count[key] = count.get(key, 0) + len(seen)
                last[key] = sum(float(p[layer, queries[-1], at]) for layer in self.layers)
                if n_new > 1:
                    prefill.add(key)
        n = len(self.layers)
        for key, sum_ in total.items():
            mean = sum_ / count[key]
            note = self.notes.setdefault(key, dict.fromkeys(NAMES, 0.0))
            is_first = note["n_seen"] == 0
            old = note["importance"]
            note["importance"] = mean if is_first else DECAY * old + (1 - DECAY) * mean
            note["accumulated"] += sum_ / n
            note["n_seen"] += count[key] / n
            note["last"] = last[key] / n
            if key in prefill:
                note["window"] = mean


def watched(make_engine, family, **settings):
    """An engine that looks at every step, and the rows of its steps."""
    given = {"budget_tokens": 4000, "interval": 1, "prefill_chunk": 24, **settings}
    engine = make_engine(family, config=managed(**given))
    steps = []
    forward = engine._core.adapter.forward

    def record(rows, fed, wanted=None, **given):
        found, at = [], 0
        for row in rows:
            new = tuple(fed[at : at + row.n_new]) if row.is_stored else ()
            found.append((tokens_to(row.tip) + new, row.n_new))
            at += row.n_new
        steps.append(found)
        return forward(rows, fed, wanted, **given)

    engine._core.adapter.forward = record
    return engine, steps


def check(engine, steps, family, names=NAMES):
    monitor = engine._core.manager.monitor
    expected = Expected(family, sorted(monitor.layers))
    for step in steps:
        expected.step(step)
    n = 0
    for segment in engine._core.tree.segments():
        notes, tokens = monitor.notes_of(segment), tokens_to(segment)
        for name in names:
            found = getattr(notes, name)[: segment.n_tokens]
            wanted = [
                expected.notes.get(tokens[: segment.start + at + 1], {name: 0.0})[name]
                for at in range(segment.n_tokens)
            ]
            assert found.tolist() == pytest.approx(wanted, abs=2e-5, rel=1e-4), name
            n += len(wanted)
    assert n > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_plain_attention(family, make_engine):
    """Prefill in chunks, decoding, a second turn, a fork: every look at every token."""
    engine, steps = watched(make_engine, family)
    first = run(engine, ask(ids(50), 8, ignore_eos=True))
    run(engine, ask([*ids(50), *first.token_ids, *ids(9, seed=2)], 6, ignore_eos=True))
    run(engine, ask([*ids(31), *ids(5, seed=3)], 4, ignore_eos=True))
    check(engine, steps, family)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_scores_of_siblings_at_once(family, make_engine):
    engine, steps = watched(make_engine, family)
    run(engine, ask(ids(40), 2))
    run_together(engine, [ask([*ids(40), *ids(n, seed=n)], 6, ignore_eos=True) for n in (3, 5, 9)])
    assert any(len(step) == 3 for step in steps)
    check(engine, steps, family, names=("importance", "accumulated", "n_seen"))


@pytest.mark.parametrize("is_fused", [False, True])
def test_notes_follow_seals_and_cuts(is_fused, make_engine, monkeypatch):
    """Blocks of 8 rows are sealed while a path runs; then it is forked inside of them."""
    if not is_fused:
        monkeypatch.setattr(Joiner, "join", lambda self: None)
    engine, steps = watched(make_engine, "llama", prefill_chunk=8)
    run(engine, ask(ids(30), 30, ignore_eos=True))
    assert (len(list(engine._core.tree.segments())) > 4) is not is_fused
    for n in (5, 13, 27):
        run(engine, ask([*ids(n), *ids(4, seed=n)], 2, ignore_eos=True))
    check(engine, steps, "llama")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_masses_are_exact(family, make_engine):
    """A trunk's share of each step's attention, as a moving average over the steps that read it."""
    engine, steps = watched(make_engine, family)
    run(engine, ask(ids(40), 2))
    n_before = len(steps)
    monitor = engine._core.manager.monitor
    [trunk] = [s for s in engine._core.tree.segments() if s.start == 0]
    engine._core.call(monitor.read_masses).result()
    mass = monitor.notes_of(trunk).mass
    n_reads = monitor.notes_of(trunk).n_reads
    n = trunk.n_tokens
    run_together(
        engine,
        [ask([*tokens_to(trunk), *ids(m, seed=m)], 8, ignore_eos=True) for m in (3, 9)],
    )
    layers = sorted(monitor.layers)
    for step in steps[n_before:]:
        shares = []
        for tokens, n_new in step:
            if all(len(tokens) - n_new - n + 1 >= reach(family, layer) for layer in layers):
                continue
            p = attention_of(family, tokens)[layers]
            shares += p[:, -min(n_new, WINDOW) :, :n].sum(-1).mean((0, 1)).flatten().tolist()
        if not shares:
            continue
        share = sum(shares) / len(shares)
        mass = DECAY * mass + (1 - DECAY) * share
        n_reads += 1
    engine._core.call(monitor.read_masses).result()
    assert monitor.notes_of(trunk).n_reads == n_reads
    assert monitor.notes_of(trunk).mass == pytest.approx(mass, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_oss"])
def test_scores_by_head_are_means_over_a_group(family, make_engine):
    """Four query heads over two of K/V: the mean over the two that share one (B53)."""
    tiers = {"eviction": "per_head"}
    engine, _ = watched(make_engine, family, prefill_chunk=48, **tiers)
    run(engine, ask(ids(40), 1))
    [segment] = engine._core.tree.segments()
    heads = engine._core.manager.monitor.notes_of(segment).heads
    n_heads = heads.shape[1]
    with torch.no_grad():
        mask = torch.ones(1, 40, dtype=torch.long)
        out = eager(family)(torch.tensor([ids(40)]), attention_mask=mask, output_attentions=True)
    for layer, p in enumerate(out.attentions):
        of_group = p[0].unflatten(0, (n_heads, -1)).mean(1)[:, -WINDOW:]
        gap = torch.arange(40 - WINDOW, 40).unsqueeze(1) - torch.arange(40)
        n_seen = ((gap >= 0) & (gap < reach(family, layer))).sum(0)
        expected = of_group.sum(1) / n_seen.clamp_min(1)
        torch.testing.assert_close(heads[layer, :, :40], expected, atol=2e-5, rtol=1e-4)
