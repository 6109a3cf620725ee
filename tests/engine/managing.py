"""Records what an engine computes and what its managed cache loses; says what is right then.

What is right: one plain transformers forward over a path's full ids, in which no query sees a row
that was gone when the query was computed, and packed rows are what an own quantiser makes of the
rows that went in. Rows are told by the tokens up to them, so that cuts and joins do not matter.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from sidequest_langchain.config import CacheConfig, Guard, Protection, Tiers
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest, GenerationResult
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.policy.receipts import ActReceipt
from tests.engine import driving
from tests.engine.driving import PATIENCE_S
from tests.support.tiny import tiny_model

TOLERANCE = {"gpt_oss": 3e-4, "mistral": 3e-4}
"""fp32, else 1e-4: experts, and four layers, magnify what another order of summing leaves."""
Key = tuple[str, tuple[int, ...]]
"""A row: its scope, and the tokens up to it."""

UNGUARDED = Guard(max_kl=None, canary_tokens=0)
LITTLE = Protection(n_sink=2, recent_window=8, ends=0.0, newest_tool_call=False)
NO_PACKING = Tiers(int8=False, int4=False)


def managed(policy: Any = "h2o", budget_tokens: int | None = 72, **settings: Any) -> CacheConfig:
    """Settings under which a tiny model's short prompts are evicted from."""
    given = {
        "interval": 4,
        "prefill_chunk": 16,
        "guard": UNGUARDED,
        "protection": LITTLE,
        "tiers": NO_PACKING,
        "observed_layers": 2,
    }
    return CacheConfig(policy=policy, budget_tokens=budget_tokens, **{**given, **settings})


@functools.cache
def plain_model(family: str, **given: Any) -> PreTrainedModel:
    """The model of a family, with an attention that asks what each query may see."""
    AttentionInterface.register("tests-oracle", _attention)
    AttentionMaskInterface.register("tests-oracle", eager_mask)
    model = tiny_model(family, **given)
    model.set_attn_implementation("tests-oracle")
    return model


def settle(engine: Engine) -> None:
    """Wait for the end of the step that told the last result: it is managed after that."""
    engine._core.call(lambda: None).result(PATIENCE_S)


def run(engine: Engine, request: GenerationRequest) -> GenerationResult:
    """The result of one request, alone, once its last step is over."""
    result = driving.run(engine, request)
    settle(engine)
    return result


def run_together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """The results of requests that run in one batch, once its last step is over."""
    results = driving.run_together(engine, requests)
    settle(engine)
    return results


def tokens_to(segment: Segment) -> tuple[int, ...]:
    """The tokens from position 0 to the end of a segment, cleared or not."""
    return tuple(int(token) for part in segment.path() for token in part.token_ids)


@dataclass
class Event:
    """Something that happened to stored rows between two passes."""

    kind: str
    """gone, back, fresh (computed again), heads or packed."""
    rows: dict[Key, Any] = field(default_factory=dict)


@dataclass
class Said:
    """Logits of the engine after a token."""

    scope: str
    tokens: tuple[int, ...]
    logits: Tensor
    now: int
    """Events before the pass."""


class Shadow:
    """Watches one engine from its first request on."""

    def __init__(self, engine: Engine, family: str = "llama", **model: Any) -> None:
        self.engine, self.core = engine, engine._core
        self.family, self.model = family, model
        self.events: list[Event] = []
        self.receipts: list[ActReceipt] = []
        self.said: list[Said] = []
        self.computed: dict[Key, list[int]] = {}
        """Events before each stored row was computed, each time that it was."""
        self._n_checked = 0
        self._wrap("forward", self.core.adapter)
        for name in ("compress", "evict_by_head"):
            self._wrap(name, self.core.tree)
        if self.core.manager is not None:
            self.core.manager.log.observers.append(self._note)

    def _wrap(self, name: str, owner: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.partial(getattr(self, f"_on_{name}"), original))

    # -- told in the engine's thread -----------------------------------------------------

    def _on_forward(self, original, rows, fed, wanted=None, *, watcher=None, overlay=None):
        logits = original(rows, fed, wanted, watcher=watcher, overlay=overlay)
        at, fresh, told = 0, Event("fresh"), {}
        now = len(self.events) + 1
        for row in rows:
            tokens = tokens_to(row.tip)
            if row.is_stored:
                tokens += tuple(fed[at : at + row.n_new])
            assert len(tokens) == row.position + row.n_new, "a position is not that of its token"
            for i in range(row.n_new):
                head = tokens[: row.position + i + 1]
                told[at + i] = (row.tip.scope, head)
                if row.is_stored:
                    fresh.rows[row.tip.scope, head] = None
            at += row.n_new
        self.events.append(fresh)
        for key in fresh.rows:
            self.computed.setdefault(key, []).append(now)
        for place, row_logits in zip(wanted or (), logits, strict=True):
            self.said.append(Said(*told[place], row_logits.clone(), now))
        return logits

    def _on_compress(self, original, segment, offsets, bits, exempt=()):
        offsets = sorted(offsets)
        before = {at: self._row(segment, at) for at in offsets}
        freed = original(segment, offsets, bits, exempt)
        rows = packed_by_hand([before[at] for at in offsets], bits, exempt)
        self.events.append(
            Event("packed", dict(zip(self._keys(segment, offsets), rows, strict=True)))
        )
        return freed

    def _on_evict_by_head(self, original, segment, keep):
        freed = original(segment, keep)
        gone = torch.ones(segment.n_tokens, *keep.shape[:2], dtype=torch.bool)
        for layer, heads in enumerate(keep.tolist()):
            for head, kept in enumerate(heads):
                gone[kept, layer, head] = False
        keys = self._keys(segment, range(segment.n_tokens))
        self.events.append(Event("heads", dict(zip(keys, gone, strict=True))))
        return freed

    def _note(self, receipt: ActReceipt) -> None:
        self.receipts.append(receipt)
        kinds = {"evict": "gone", "archive": "gone", "hide": "gone", "restore": "back"}
        if receipt.outcome != "done" or receipt.verb not in kinds:
            return
        found = [s for s in self.core.tree.segments() if s.segment_id == receipt.segment_id]
        assert found, f"{receipt.verb} of a segment that is not there"
        offsets = [
            at - found[0].start for first, last in receipt.runs for at in range(first, last + 1)
        ]
        assert len(offsets) == receipt.n_rows
        self.events.append(Event(kinds[receipt.verb], dict.fromkeys(self._keys(found[0], offsets))))

    @staticmethod
    def _keys(segment: Segment, offsets: Sequence[int]) -> list[Key]:
        tokens = tokens_to(segment)
        return [(segment.scope, tokens[: segment.start + at + 1]) for at in offsets]

    def _row(self, segment: Segment, at: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of one token as they are read now, by layer, `[H, D]`."""
        layers = range(len(self.core.tree.layout))
        residency = segment.residency
        dense = range(segment.n_tokens) if residency is None else residency.dense
        if at in dense:
            row = list(dense).index(at)
            return [
                (segment.keys[n][:, row].clone(), segment.values[n][:, row].clone()) for n in layers
            ]
        [block] = [b for b in segment.packed if at in b.offsets]
        row = block.offsets.index(at)
        return [tuple(t[:, 0].clone() for t in block.load(n, row, row + 1)) for n in layers]

    # -- asked by tests ------------------------------------------------------------------

    def check(self) -> int:
        """Compare all logits said since the last check.

        Returns:
            How many of the queries saw less than everything.
        """
        settle(self.engine)
        said, self._n_checked = self.said[self._n_checked :], len(self.said)
        assert said, "nothing was said"
        longest: list[tuple[Said, Tensor]] = []
        n_blind, worst = 0, 0.0
        for one in sorted(said, key=lambda one: -len(one.tokens)):
            n = len(one.tokens)
            is_stored = one.now in self.computed.get((one.scope, one.tokens), ())
            # A stored row's logits stand in the forward over any longer path.
            times = torch.tensor(self._times(one)).float() if is_stored else None
            rows = next(
                (
                    found
                    for of, found in longest
                    if of.scope == one.scope
                    and of.tokens[:n] == one.tokens
                    and times is not None
                    and torch.equal(found[:n, -1], times)
                ),
                None,
            )
            if rows is None:
                rows = self._expected(one)
                if is_stored:
                    longest.append((one, rows))
            expected = rows[n - 1 if is_stored else -1]
            n_blind += int(expected[-2])
            worst = max(worst, float((one.logits - expected[:-2]).abs().max()))
        assert worst <= TOLERANCE.get(self.family, 1e-4), f"logits differ by {worst:.3g}"
        return n_blind

    def _expected(self, one: Said) -> Tensor:
        """Logits over a path, then whether something was hidden, and when, `[T, V + 2]`."""
        n = len(one.tokens)
        keys = [(one.scope, one.tokens[: at + 1]) for at in range(n)]
        times = self._times(one)
        fed, places = list(one.tokens), list(range(n))
        sights = self._sights(keys, times)
        if times[-1] != one.now:  # run again: a second query where a row is stored already
            [again] = self._sights(keys, [one.now] * n)
            hidden = torch.nn.functional.pad(again.hidden, (0, 1))
            hidden[..., n] = ~hidden[..., n - 1]  # it sees the stored row, or itself
            sights = [replace(s, hidden=torch.nn.functional.pad(s.hidden, (0, 1))) for s in sights]
            sights.append(Sight([n], hidden, again.packed, again=True))
            fed.append(fed[-1])
            places.append(n - 1)
            times.append(one.now)
        model = plain_model(self.family, **self.model)
        with torch.no_grad(), sight(sights):
            logits = model(
                input_ids=torch.tensor([fed]),
                position_ids=torch.tensor([places]),
                attention_mask=torch.ones(1, len(fed), dtype=torch.long),
                use_cache=False,
            ).logits[0]
        blind = torch.zeros(len(fed), 2)
        for found in sights:
            blind[found.queries, 0] = float(bool(found.hidden.any() or found.packed))
        blind[:, 1] = torch.tensor(times)
        return torch.cat([logits, blind], 1)

    def _times(self, one: Said) -> list[int]:
        """When the rows were computed that a path had, the last one included."""
        return [
            max(time for time in self.computed[one.scope, one.tokens[: at + 1]] if time <= one.now)
            for at in range(len(one.tokens))
        ]

    def again(self, tokens: Sequence[int], w: int, scope: str = "") -> Tensor:
        """Log-probabilities after the last `w` tokens, run again over what is left, `[w, V]`."""
        keys = [(scope, tuple(tokens[: at + 1])) for at in range(len(tokens))]
        now = len(self.events)
        times = [*(self.computed[key][-1] for key in keys[:-w]), *[now] * w]
        sights = self._sights(keys, times)
        last = sights[-1]  # the last tokens see each other as they are now
        last.hidden[..., -w:] = False
        for at in range(len(tokens) - w, len(tokens)):
            last.packed.pop(at, None)
        with torch.no_grad(), sight(sights):
            logits = plain_model(self.family, **self.model)(
                input_ids=torch.tensor([list(tokens)]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                use_cache=False,
            ).logits[0, -w:]
        return torch.log_softmax(logits, -1)

    def _sights(self, keys: list[Key], times: list[int]) -> list[Sight]:
        layout = self.core.tree.layout
        place = {key: at for at, key in enumerate(keys)}
        hidden = torch.zeros(len(layout), layout[0].n_kv_heads, len(keys), dtype=torch.bool)
        packed: dict[int, Any] = {}
        found, at = [], 0
        for now in sorted(set(times)):
            for event in self.events[at:now]:
                for key in event.rows.keys() & place.keys():
                    p = place[key]
                    if event.kind in ("gone", "back"):
                        hidden[:, :, p] = event.kind == "gone"
                    elif event.kind == "fresh":
                        hidden[:, :, p] = False
                        packed.pop(p, None)
                    elif event.kind == "heads":
                        hidden[:, :, p] |= event.rows[key]
                    else:
                        packed[p] = event.rows[key]
            at = now
            queries = [q for q, time in enumerate(times) if time == now]
            found.append(Sight(queries, hidden.clone(), dict(packed)))
        return found

    def lost(self) -> dict[Key, Tensor]:
        """What is gone by the receipts, by head."""
        found: dict[Key, Any] = {}
        layout = self.core.tree.layout
        shape = (len(layout), layout[0].n_kv_heads)
        for event in self.events:
            for key, value in event.rows.items():
                if event.kind == "gone":
                    found[key] = torch.ones(shape, dtype=torch.bool)
                elif event.kind == "heads" and value.any():
                    found[key] = value | found.get(key, torch.zeros(shape, dtype=torch.bool))
                elif event.kind in ("back", "fresh"):
                    found.pop(key, None)
        return found

    def check_books(self) -> None:
        """What is resident is what the receipts leave."""
        self.engine.kv.check_integrity()
        self.core.call(self._check_books).result(PATIENCE_S)

    def _check_books(self) -> None:
        lost = self.lost()
        for segment in self.core.tree.segments():
            managed = segment.residency
            for at, key in enumerate(self._keys(segment, range(segment.n_tokens))):
                if managed is None:
                    is_there = True
                elif managed.kept_by_head is not None:
                    there = (managed.kept_by_head == at).any(-1)
                    assert torch.equal(~there, lost.get(key, torch.zeros_like(there)))
                    continue
                else:
                    rows = {*managed.dense, *(o for b in managed.packed for o in b.offsets)}
                    is_there = at in rows - managed.hidden
                assert is_there == (key not in lost), (segment.segment_id, at, is_there)


@dataclass
class Sight:
    """What some queries see."""

    queries: list[int]
    hidden: Tensor
    """Rows they do not, bool `[L, H, T]`."""
    packed: dict[int, list[tuple[Tensor, Tensor]]]
    """Rows that they see changed: K and V by layer, `[H, D]`."""
    again: bool = False
    """Whether the query is a token's second one."""


_SIGHTS: list[list[Sight]] = []


@contextmanager
def sight(sights: list[Sight]) -> Iterator[None]:
    """Let plain models of `plain_model` see so much."""
    _SIGHTS.append(sights)
    try:
        yield
    finally:
        _SIGHTS.pop()


def _attention(module, query, key, value, attention_mask, **given):
    """The family's own eager attention, once for each group of queries that see the same."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    n_group = query.shape[1] // key.shape[1]
    out = None
    for group in _SIGHTS[-1]:
        k, v = key.clone(), value.clone()
        for p, layers in group.packed.items():
            k[0, :, p], v[0, :, p] = layers[module.layer_idx]
        q = group.queries
        n = attention_mask.shape[-1]
        mask = attention_mask[:, :, q].expand(-1, query.shape[1], -1, -1).clone()
        is_again = group.again
        if is_again:  # the window of the place where the token stands
            mask[..., : n - 1] = attention_mask[:, :, n - 2, None, : n - 1]
        hidden = group.hidden[module.layer_idx].repeat_interleave(n_group, 0)[None, :, None]
        hidden = hidden.expand_as(mask).clone()
        if not is_again:
            hidden[:, :, range(len(q)), q] = False  # a token sees itself
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        found, _ = eager(module, query[:, :, q], k, v, mask, **given)
        if out is None:
            out = found.new_zeros(found.shape[0], query.shape[2], *found.shape[2:])
        out[:, q] = found
    return out, None


def packed_by_hand(
    rows: list[list[tuple[Tensor, Tensor]]], bits: int, exempt: Sequence[int]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Rows quantised and read again, number by number: keys by channel over 64 rows, values by row.

    Each number lies on a grid of `2 ** bits` steps from the least to the largest of its group.
    """
    if not rows:
        return []
    found: list[list[Any]] = [[] for _ in rows]
    for layer in range(len(rows[0])):
        k = torch.stack([row[layer][0] for row in rows], 1)
        v = torch.stack([row[layer][1] for row in rows], 1)
        if layer not in exempt:
            k = torch.cat([on_grid(part, 1, bits) for part in k.split(64, 1)], 1)
            v = on_grid(v, 2, bits)
        for i in range(len(rows)):
            found[i].append((k[:, i], v[:, i]))
    return found


def on_grid(x: Tensor, dim: int, bits: int) -> Tensor:
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-30)
    return ((x - low) / step).round() * step + low
