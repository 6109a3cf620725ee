"""A stand-in for a model over a tree, and causal attention written down plainly beside it.

It knows torch and `kv` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.layout import LayerShape
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


def densely(world, tokens, n_new, layer, features, unseen=None, rows=None):
    """Causal attention of the last `n_new` tokens in float64, one token at a time.

    `unseen`: positions that no query but the token's own sees; by KV head where it is a list.
    `rows`: K and V instead of the true ones.
    """
    q, k, v = world.qkv(tokens, 0, layer)
    q, k, v = (t.double() for t in (q, *(rows or (k, v))))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    out = []
    for at in range(len(tokens) - n_new, len(tokens)):
        first = 0 if features.window is None else max(0, at - features.window + 1)
        scores = torch.einsum("hd,hsd->hs", q[:, at], k[:, first : at + 1]) * features.scaling
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        for head, gone in enumerate(by_heads(unseen, scores.shape[0], group)):
            hidden = [position - first for position in gone if first <= position < at]
            scores[head, hidden] = float("-inf")
        if features.sinks is not None:
            scores = torch.cat([scores, features.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : at + 1 - first]
        out.append(torch.einsum("hs,hsd->hd", weights, v[:, first : at + 1]))
    return torch.stack(out)


def by_heads(unseen, n_heads, group):
    """What each query head does not see."""
    if isinstance(unseen, list):
        return [gone for gone in unseen for _ in range(group)]
    return [unseen or ()] * n_heads


def run(world, grove, fed, features_of, *, tolerance=2e-5, unseen=None, rows=None, **options):
    """One step over all layers, compared with the dense way; then the tree counts it.

    `unseen(f, layer)` says what the dense way masks of what is fed, `rows(f, layer)` which K and V
    it takes.
    """
    plan = StepPlan([f.row(grove.tree) for f in fed], **options)
    for layer in range(len(HEADS)):
        features = features_of(layer)
        out = attend_layer(world, plan, fed, layer, features)
        n_heads, value_dim = HEADS[layer][0], HEADS[layer][3]
        assert (out.shape, out.dtype) == ((plan.n_tokens, n_heads, value_dim), world.dtype)
        wanted = torch.cat(
            [
                densely(
                    world,
                    f.tokens,
                    len(f.text),
                    layer,
                    features,
                    None if unseen is None else unseen(f, layer),
                    None if rows is None else rows(f, layer),
                )
                for f in fed
            ]
        )
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
