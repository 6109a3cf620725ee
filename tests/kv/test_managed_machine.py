"""The random acts of `test_tree_machine`, and between them rows that are sealed, evicted, packed,
hidden, archived and brought back. Tokens, paths and books must stay what they are without that.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv import chain
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.labels import PathSelector
from tests.kv import attending
from tests.kv.attending import World
from tests.kv.growing import storage_bytes, tokens_to
from tests.kv.test_tree_machine import WHICH, TreeMachine

N_COPIES = 12
"""Rows of which the archive has room for copies."""


def chosen(segment, mask):
    """Which of a segment's tokens: one bit each."""
    return [at for at in range(segment.n_tokens) if mask >> at % 12 & 1]


def same(segment):
    """What must not have changed after an act that failed."""
    return segment.storage, segment.residency, list(segment.fellows)


def packed_tensors(segment):
    named = [pair for block in segment.packed for pair in block.tensors().items()]
    return [t for name, t in named if name != "header"]


def copies_of(segment):
    """(position, ticket, row) of what is archived, and its precision."""
    for copy in segment.archived:
        for at, row in zip(copy.offsets, copy.rows, strict=True):
            yield (segment.start + at, copy.ticket.key, row), copy.bits


def away(segment):
    managed = segment.residency
    if managed is None or managed.kept_by_head is not None:
        return set()
    held = {*managed.dense, *(at for block in managed.packed for at in block.offsets)}
    return set(range(segment.n_tokens)) - held


class ManagedMachine(TreeMachine):
    """Layers that differ."""

    def __init__(self):
        super().__init__()
        self.archive = Archive(
            fingerprint={"model": "m"}, cpu_bytes=N_COPIES * self.tree.bytes_per_token
        )
        self.tree.archive = self.archive

    @property
    def closed(self):
        return [s for s in self.tree.segments() if not s.is_open and s.n_tokens]

    def is_pinned(self, segment):
        stands = [segment]
        for at in stands:
            stands.extend(at.children)
        return any(pin.segment in stands for pin in self.pins)

    def act(self, which, acts, *, is_lossy=True):
        """Do something to a closed segment. Returns what it gave, and the change in bytes."""
        segment = self.closed[which % len(self.closed)]
        before, n_bytes, tokens = same(segment), self.tree.n_bytes, tokens_to(segment)
        is_refused = is_lossy and self.is_pinned(segment)
        may_refuse = is_refused or segment.kept_by_head is not None or bool(segment.packed)
        given, error = None, None
        try:
            given = acts(segment)
        except (ValueError, ArchiveError) as raised:
            error = raised
        if error is not None:
            assert may_refuse or isinstance(error, ArchiveError)
            assert same(segment) == before
            return segment, None, 0
        assert not is_refused
        assert tokens_to(segment) == tokens
        return segment, given, n_bytes - self.tree.n_bytes

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def seal(self, which):
        claim = self.running[which % len(self.running)]
        n, n_bytes = claim.path.tip.n_tokens, self.tree.n_bytes
        end = self.tree.seal(claim.path)
        assert (end is None) == (n == 0)
        assert claim.path.tip.n_tokens == 0
        assert self.tree.n_bytes <= n_bytes
        if end is not None:
            assert claim.path.tip.parent is end

    @precondition(lambda self: self.claims)
    @rule(which=WHICH, most_rows=st.integers(0, 20))
    def fuse(self, which, most_rows):
        tip = self.claims[which % len(self.claims)].path.tip
        tokens, n_bytes, n_tokens = tokens_to(tip), self.tree.n_bytes, self.tree.n_tokens
        line, told = tip.path(), []
        copies = {tokens_at: n for s in line for tokens_at, n in copies_of(s)}
        self.tree.on_fuse = lambda parent, child: told.append((parent, child))
        n = self.tree.fuse(tip, most_rows)
        assert n == len(told) == len(line) - len(tip.path())
        assert set(line) - set(tip.path()) == {parent for parent, _ in told}
        assert (tokens_to(tip), self.tree.n_tokens) == (tokens, n_tokens)
        n_packed = sum(b.n_rows for s in tip.path() for b in s.packed)
        # Slack of sealed segments may go; rows may be told their groups.
        assert self.tree.n_bytes - n_bytes <= 4 * len(self.tree.layout) * n_packed
        assert {tokens_at: n for s in tip.path() for tokens_at, n in copies_of(s)} == copies
        if most_rows >= 20:
            self.check_fused(tip)

    def check_fused(self, tip):
        """Nobody is left who could have been taken in, but where storages are shared."""
        for parent, child in itertools.pairwise(tip.path()):
            stands = parent.paths or len(parent.children) > 1 or child.is_open
            stays = any(s.n_pins or s.kept_by_head is not None for s in (parent, child))
            is_long = parent.n_resident + child.n_resident > 20
            is_shared = parent.fellows or child.fellows
            assert stands or stays or is_long or is_shared or child.parent is not parent

    @precondition(lambda self: self.claims)
    @rule(which=WHICH, most_of_piece=st.integers(0, 30), most_of_layer=st.integers(0, 30))
    def unite(self, which, most_of_piece, most_of_layer):
        tip = self.claims[which % len(self.claims)].path.tip
        before, n_bytes = [(s, s.residency) for s in tip.path()], self.tree.n_bytes
        self.tree.unite(tip, most_of_piece=most_of_piece, most_of_layer=most_of_layer)
        assert [(s, s.residency) for s in tip.path()] == before
        assert self.tree.n_bytes <= n_bytes  # slack of sealed segments may go
        if min(most_of_piece, most_of_layer) >= 30:
            self.check_united(tip)

    def check_united(self, tip):
        """Layers differ: everything stays where it is."""
        assert all(len(s.storage._parts) == 4 for s in tip.path())

    ACTS = ("evict", "compress", "hide", "unhide", "archive_some", "restore")

    @precondition(lambda self: self.closed)
    @rule(seed=st.integers(0, 2**16), n=st.integers(1, 5))
    def manage(self, seed, n):
        rng = random.Random(seed)
        for _ in range(n):
            act = rng.choice(self.ACTS)
            getattr(self, act)(rng, rng.randrange(99), rng.getrandbits(12))

    def evict(self, rng, which, mask):
        segment, freed, change = self.act(
            which, lambda s: self.tree.evict(s, reversed(chosen(s, mask)))
        )
        if freed is not None:
            assert freed == change >= 0
            assert set(chosen(segment, mask)) <= away(segment)

    def compress(self, rng, which, mask):
        bits, exempt = rng.choice([8, 4]), rng.choice([(), (0,), (1,)])

        def pack(segment):
            self.lost = away(segment)
            return self.tree.compress(segment, chosen(segment, mask), bits, exempt)

        segment, freed, change = self.act(which, pack)
        if freed is not None:
            assert freed == change
            assert away(segment) == self.lost
            coarse = {at for b in segment.packed if b.bits <= bits for at in b.offsets}
            assert set(chosen(segment, mask)) <= coarse | self.lost

    def hide(self, rng, which, mask):
        segment, _, change = self.act(which, lambda s: self.tree.hide(s, chosen(s, mask)))
        assert change == 0
        assert segment.hidden >= set(chosen(segment, mask)) or self.is_pinned(segment)

    def unhide(self, rng, which, mask):
        segment, _, _ = self.act(which, self.tree.unhide, is_lossy=False)
        assert not segment.hidden

    def archive_some(self, rng, which, mask):
        self.tree.most_staged_rows = rng.choice([None, 1, 3])
        segment, is_copied, change = self.act(
            which, lambda s: self.tree.archive_rows(s, chosen(s, mask)), is_lossy=False
        )
        assert change == 0
        if is_copied:
            copied = {at for a in segment.archived for at in a.offsets}
            assert set(chosen(segment, mask)) <= copied | away(segment)
            if rng.random() < 0.5 and not self.is_pinned(segment):
                self.tree.evict(segment, chosen(segment, mask))

    def restore(self, rng, which, mask):
        def bring(segment):
            self.wanted = {
                at for a in segment.archived for at in a.offsets if at in chosen(segment, mask)
            }
            return self.tree.restore(segment, chosen(segment, mask))

        segment, taken, change = self.act(which, bring, is_lossy=False)
        if taken is not None:
            assert taken == -change
            assert not self.wanted & away(segment)

    # -- what always holds -----------------------------------------------------------------

    @invariant()
    def the_books_balance(self):
        check_integrity(self.tree)
        tensors = [
            t for s in self.tree.segments() for t in (*s.keys, *s.values, *packed_tensors(s))
        ]
        assert self.tree.n_bytes == storage_bytes(tensors) <= self.tree.peak_bytes
        told = sum(r.freed_bytes for r in self.grove.receipts)
        assert self.tree.n_released_bytes == told + self.n_swept_bytes

    @invariant()
    def nothing_is_stored_twice_once_it_is_closed(self):
        first = [(id(s.parent), s.token_ids[0]) for s in self.closed]
        assert len(first) == len(set(first))

    @invariant()
    def every_copy_has_an_owner(self):
        owned = {a.ticket.key for s in self.tree.segments() for a in s.archived}
        entries = {**self.archive._cpu, **self.archive._disk}
        assert entries.keys() <= owned
        owners = Counter(
            key for s in self.tree.segments() for key in {a.ticket.key for a in s.archived}
        )
        assert {key: entry.n_owners for key, entry in entries.items()} == {
            key: owners[key] for key in entries
        }

    def teardown(self):
        super().teardown()
        assert self.archive.n_entries == 0
        self.archive.close()


class ByHeadMachine(ManagedMachine):
    """Layers that are alike, every path joined as soon as a call begins, and rows by head."""

    ACTS = (*ManagedMachine.ACTS, "keep_by_head", "keep_by_head")

    def __init__(self):
        self.most, chain.MOST_BLOCKS = chain.MOST_BLOCKS, 1
        self.heads, attending.HEADS = attending.HEADS, [(4, 2, 8, 8), (6, 2, 8, 8)]
        super().__init__()
        self.grove = World(0).grove()
        self.archive.close()
        self.tree = self.grove.tree
        self.archive = Archive(fingerprint={}, cpu_bytes=N_COPIES * self.tree.bytes_per_token)
        self.tree.archive = self.archive

    def keep_by_head(self, rng, which, mask):
        def keep(segment):
            by_head = segment.kept_by_head
            if by_head is not None:
                keep = by_head[..., : rng.randint(0, by_head.shape[2])]
                return self.tree.evict_by_head(segment, keep.contiguous())
            held = sorted(set(range(segment.n_tokens)) - away(segment))
            n = rng.randint(0, len(held))
            keep = [sorted(rng.sample(held, n)) for _ in range(4)]
            return self.tree.evict_by_head(segment, torch.tensor(keep).long().view(2, 2, n))

        _, freed, change = self.act(which, keep)
        assert freed is None or freed == change >= 0

    def check_united(self, tip):
        """Nobody is left beside the storage of all who may lie there."""
        path = tip.path()
        free = [
            s
            for s in path
            if s.n_rows
            and not (s.is_open or s.packed or s.kept_by_head is not None)
            and set(s.fellows) <= set(path)
        ]
        assert len({id(s.storage) for s in free}) <= 1

    def teardown(self):
        chain.MOST_BLOCKS = self.most
        attending.HEADS = self.heads
        super().teardown()


SETTINGS = TreeMachine.TestCase.settings
TestManagedMachine = ManagedMachine.TestCase
TestManagedMachine.settings = settings(SETTINGS, max_examples=250)
TestByHeadMachine = ByHeadMachine.TestCase
TestByHeadMachine.settings = settings(SETTINGS, max_examples=150)


# -- many acts -----------------------------------------------------------------------------


def drive(machine, rng, n_steps):
    """Random acts as hypothesis chooses them, but more of those on managed rows."""
    for _ in range(n_steps):
        name = rng.choices(*zip(*WEIGHTS.items(), strict=True))[0]
        which = rng.randrange(10)
        if name == "begin":
            old = "".join(map(chr, rng.choice(machine.claims).tokens)) if machine.claims else ""
            head = old[: rng.randrange(14)] if rng.random() < 0.8 else ""
            prompt = head + "".join(rng.choices("ab", k=rng.randint(1, 9)))
            label = {"branch": rng.choice([None, "x", "y"])}
            machine.begin(scope="s", prompt=prompt, label=label, superseded=set())
            if rng.random() < 0.8:
                new = machine.claims[-1].path
                text = prompt[new.n_reused :]
                machine.grove.feed(new, text)
                machine.claims[-1].tokens.extend(map(ord, text))
        elif name == "manage" and machine.closed:
            machine.manage(seed=rng.getrandbits(16), n=4)
        elif name in ("extend", "crop", "commit", "discard", "seal") and machine.running:
            given = {"extend": {"text": rng.choice(["a", "ab", "bab"]), "at_once": False}}
            given["crop"] = {"n": rng.randrange(3)}
            getattr(machine, name)(which=which, **given.get(name, {}))
        elif name == "fuse" and machine.claims:
            machine.fuse(which=which, most_rows=rng.choice([0, 5, 20, 20, 20]))
        elif name == "unite" and machine.claims:
            most = rng.choice([3, 30, 30])
            machine.unite(which=which, most_of_piece=most, most_of_layer=rng.choice([3, 30, 30]))
        elif name == "pin" and machine.claims:
            machine.pin(which=which)
        elif name == "unpin" and machine.pins:
            machine.unpin(which=which)
        elif name == "release":
            path_id = rng.choice(["x", "y", "c1", "c2", "c3"])
            machine.release(selector=PathSelector(path_id=path_id))
        elif name == "sweep":
            machine.sweep(n_tokens=rng.randrange(10, 40))
        machine.the_books_balance()
        machine.the_paths_are_those_of_the_model()
        machine.just_what_somebody_needs_is_resident()
        machine.every_row_is_the_one_its_tokens_ask_for()
        machine.nothing_is_stored_twice_once_it_is_closed()
        machine.every_copy_has_an_owner()
    machine.teardown()


WEIGHTS = {
    "begin": 4,
    "extend": 3,
    "crop": 0.3,
    "commit": 3,
    "discard": 0.5,
    "seal": 2,
    "manage": 5,
    "fuse": 1.5,
    "unite": 1.5,
    "pin": 0.5,
    "unpin": 1,
    "release": 0.7,
    "sweep": 0.3,
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("machine", [ManagedMachine, ByHeadMachine])
def test_long_runs(machine, seed):
    drive(machine(), random.Random(seed), 120)
