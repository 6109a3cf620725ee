"""Short blocks read with one call: every row once, few calls, nothing but rounding changed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from math import ceil

import pytest
import torch

from sidequest_langchain.kv import bunches, part_attention, parts, tree_attention
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.packed_reading import PackedRows
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.step_plan import StepPlan
from tests.kv.attending import (
    BATCHES,
    HEADS,
    Fed,
    World,
    attend_layer,
    batch,
    densely,
    features_for,
    grow,
)
from tests.kv.masking import Gone, manage_some, rows_with_packed
from tests.kv.packing import LAYOUTS, rows_of


class Watch:
    layers = frozenset({0, 1, 2})

    def __init__(self):
        self.told = []

    def decoded(self, plan, layer, seen):
        self.told.append((layer, seen))

    def prefilled(self, plan, layer, seen):
        pass


@pytest.fixture
def calls(monkeypatch):
    """Keys and queries' heads of every call of the kernel."""
    made = []

    def counting(q, k, v, **given):
        made.append(k)
        return cpu_partial(q, k, v, **given)

    monkeypatch.setitem(tree_attention._PARTIALS, "cpu", counting)
    return made


def few_rows(monkeypatch, n):
    for module in (parts, part_attention, bunches):
        monkeypatch.setattr(module, "LOAD_ROWS", n)


# -- packed rows together --------------------------------------------------------------------


def packed_blocks(layout, bits, rng):
    """Blocks of one kind: whole, cut, thinned, and joined out of order."""
    found = []
    for seed, n_rows in enumerate((64, 3, 200, 130, 70)):
        k, v = rows_of(layout, n_rows, seed=seed)
        block = PackedBlock.pack(k, v, range(n_rows), bits=bits, exempt=(1,))
        found.append(block)
        if n_rows > 64:
            found += block.split(rng.randint(1, n_rows - 1))
            thin = block.without(rng.sample(range(n_rows), n_rows // 3))
            found += [thin, PackedBlock.joined([thin, found[0]], [0, 10**4])]
            found.append(PackedBlock.joined([found[0], thin], [10**4, 0]))
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_packed_rows_load_as_their_blocks_do(layout, bits):
    rng = random.Random(bits)
    pieces = []
    for block in packed_blocks(layout, bits, rng):
        first = rng.randrange(block.n_rows)
        pieces += [(block, 0, block.n_rows), (block, first, rng.randint(first + 1, block.n_rows))]
    together = PackedRows(pieces)
    for layer in range(len(layout)):
        one_by_one = [block.load(layer, first, last) for block, first, last in pieces]
        for found, wanted in zip(together.load(layer), zip(*one_by_one, strict=True), strict=True):
            assert found.dtype == wanted[0].dtype
            assert torch.equal(found, torch.cat(wanted, 1))


# -- bunches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_bytes", [0, 200, 2**18])
@pytest.mark.parametrize("load_rows", [3, 7, 512])
def test_every_row_is_read_once_and_few_at_once(load_rows, copy_bytes, monkeypatch):
    few_rows(monkeypatch, load_rows)
    monkeypatch.setattr(bunches, "COPY_BYTES", copy_bytes)
    n_bunches = 0
    for seed in range(3):
        rng, world = random.Random(seed), World(seed)
        grove, running = grow(world, rng, n_done=10)
        manage_some(rng, grove, Gone())
        fed = batch(rng, grove, running, ["decode"] * 3)
        plan = StepPlan([f.row(grove.tree) for f in fed])
        for window, is_watched in itertools.product((None, 3), (False, True)):
            reads = plan.reads(window, is_watched=is_watched)
            read = Counter((at, row) for at in reads.alone for row in rows_in(reads.blocks[at]))
            for bunch in reads.bunches:
                n_bunches += 1
                assert {piece.block.rows for piece in bunch.pieces} == {bunch.rows}
                if len(bunch.pieces) > 1:
                    assert sum(piece.n_rows for piece in bunch.pieces) <= load_rows
                for layer in range(len(HEADS)):
                    k, v = bunch.load(layer)
                    for n, loaded in enumerate((k, v)):
                        of = [piece_rows(piece, layer)[n] for piece in bunch.pieces]
                        # The rows of open tips are not written yet.
                        assert torch.equal(loaded.nan_to_num(7), torch.cat(of, 1).nan_to_num(7))
                read.update(
                    (piece.at, row)
                    for piece in bunch.pieces
                    for row in range(piece.first, piece.last)
                )
            wanted = [(at, row) for at, b in enumerate(reads.blocks) for row in rows_in(b)]
            assert read == Counter(wanted)
            slots = Counter()
            for call, slot in zip(reads.calls, reads.slots(len(fed)), strict=True):
                slots.update((slot, j) for j in call.rows or range(len(fed)))
            assert set(slots.values()) == {1}, "two calls for one row in one slot"
    assert n_bunches or not copy_bytes


def rows_in(block):
    return range(block.first, block.last)


def piece_rows(piece, layer):
    block = piece.block
    k, v = block.load(layer)
    cut = slice(piece.first - block.first, piece.last - block.first)
    return k[:, cut], v[:, cut]


def managed_path(world, *, n_pieces, n_rows):
    """A path of short closed segments: every third one packed, every third one thinned."""
    grove = world.grove()
    rng = random.Random(1)
    path = grove.begin("".join(rng.choices("abcd", k=n_pieces * n_rows)) + "z")
    gone = Gone()
    for at in range(n_pieces):
        grove.feed(path, "".join(rng.choices("abcd", k=n_rows)))
        grove.tree.seal(path)
        segment = path.tip.path()[at]
        if at % 3 == 0:
            grove.tree.compress(segment, range(1, n_rows), 4 if at % 2 else 8, exempt=(1,))
        elif at % 3 == 1:
            grove.tree.evict(segment, range(2, 5))
            gone.take(segment, range(2, 5))
    return grove, path, gone


@pytest.mark.parametrize("text", ["a", "abcabc"], ids=["decoding", "a chunk"])
@pytest.mark.parametrize("load_rows", [64, 512])
def test_short_pieces_cost_few_calls(calls, text, load_rows, monkeypatch):
    few_rows(monkeypatch, load_rows)
    world = World(2)
    grove, path, gone = managed_path(world, n_pieces=24, n_rows=20)
    features_of = features_for(world, (None,) * 3, None, True)
    fed = Fed(path, text)
    plan = StepPlan([fed.row(grove.tree)])
    n_rows = 24 * 20 - 8 * 3
    for layer in range(len(HEADS)):
        calls.clear()
        out = attend_layer(world, plan, [fed], layer, features_of(layer))
        own = 1 if len(text) > 1 else 0
        # Where bunches are not quite full there is another one.
        assert len(calls) <= own + ceil(n_rows * 1.5 / load_rows)
        assert all(k.shape[1] <= load_rows for k in calls)
        rows = rows_with_packed(world, fed, layer)
        features = features_of(layer)
        unseen = gone.unseen(fed, layer)
        wanted = densely(world, fed.tokens, len(text), layer, features, unseen, rows)
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)


def test_packed_pieces_of_a_kind_are_loaded_with_one_call(monkeypatch):
    """Blocks of 4 and of 8 bits take turns on the path: two loads a layer, not one for each."""
    loads = Counter()
    for owner in (PackedRows, PackedBlock):

        def counting(self, layer, *args, _load=owner.load, _owner=owner):
            loads[_owner, layer] += 1
            return _load(self, layer, *args)

        monkeypatch.setattr(owner, "load", counting)
    world = World(2)
    grove, path, _ = managed_path(world, n_pieces=12, n_rows=20)
    fed = Fed(path, "a")
    plan = StepPlan([fed.row(grove.tree)])
    loads.clear()
    for layer in range(len(HEADS)):
        features = features_for(world, (None,) * 3, None, False)(layer)
        attend_layer(world, plan, [fed], layer, features)
    assert {bits for s in path.tip.path() for bits in [b.bits for b in s.packed]} == {4, 8}
    assert loads == {(PackedRows, layer): 2 for layer in range(len(HEADS))}


def test_long_rows_in_a_storage_are_not_copied(calls, monkeypatch):
    world = World(2)
    grove, path, _ = managed_path(world, n_pieces=6, n_rows=20)
    fed = Fed(path, "a")
    features = features_for(world, (None,) * 3, None, False)(0)
    of_row = 2 * 2 * 8 * 4  # K and V of two heads, in float32
    for limit, n_in_place in [(16 * of_row, 4), (20 * of_row, 0)]:
        monkeypatch.setattr(bunches, "COPY_BYTES", limit)
        calls.clear()
        attend_layer(world, StepPlan([fed.row(grove.tree)]), [fed], 0, features)
        storages = {s.storage.keys[0].untyped_storage().data_ptr() for s in path.tip.path()}
        in_place = [k for k in calls if k.untyped_storage().data_ptr() in storages]
        assert len([k for k in in_place if k.shape[1] >= 17]) == n_in_place


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("load_rows", [3, 512])
@pytest.mark.parametrize("kinds", [BATCHES["decode"], BATCHES["mixed"]], ids=["decode", "mixed"])
def test_who_watches_is_told_of_each_block_apart(kinds, load_rows, softcap, monkeypatch):
    few_rows(monkeypatch, load_rows)
    n_together = 0
    for seed in range(3):
        rng, world = random.Random(seed), World(seed)
        grove, running = grow(world, rng, n_done=10)
        manage_some(rng, grove, Gone())
        fed = batch(rng, grove, running, kinds)
        features_of = features_for(world, (None, 5, None), softcap, True)
        told = []
        for limit in (2**18, 0):
            monkeypatch.setattr(bunches, "COPY_BYTES", limit)
            if not limit:  # one piece a call: the kernel says what a block's log-sum-exp is
                monkeypatch.setattr(bunches, "_filled", lambda pieces: [[p] for p in pieces])
            watch = Watch()
            plan = StepPlan([f.row(grove.tree) for f in fed], watcher=watch)
            for layer in range(len(HEADS)):
                attend_layer(world, plan, fed, layer, features_of(layer))
            told.append(watch.told)
            n_together += sum(len(b.pieces) > 1 for b in plan.reads(None, is_watched=True).bunches)
            monkeypatch.undo()
            few_rows(monkeypatch, load_rows)
        for (_, one), (_, other) in zip(*told, strict=True):
            assert [b.segment for b in one.blocks] == [b.segment for b in other.blocks]
            torch.testing.assert_close(one.total, other.total, atol=1e-5, rtol=1e-5)
            for mine, apart in zip(one.lses, other.lses, strict=True):
                torch.testing.assert_close(mine, apart, atol=1e-5, rtol=1e-5)
    assert n_together
