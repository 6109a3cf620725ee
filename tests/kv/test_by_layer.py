"""Storages by layer: their rows, what is there twice while they change, and trees that use them."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidequest_langchain.kv import bunches, chain, saved_thread, tree_attention
from sidequest_langchain.kv import storage as storage_room
from sidequest_langchain.kv.archive import Archive
from sidequest_langchain.kv.integrity import check_integrity
from sidequest_langchain.kv.layout import bytes_per_token
from sidequest_langchain.kv.partial_cpu import cpu_partial
from sidequest_langchain.kv.storage import Storage
from tests.kv import attending
from tests.kv.attending import WINDOWS, Fed, World, features_for, run
from tests.kv.growing import check_rows, reachable_bytes
from tests.kv.masking import Gone, evict_some
from tests.kv.test_storage import LAYOUTS, filled, holds

LAYOUT = LAYOUTS["alike"]
EVEN = [(4, 2, 8, 8), (6, 2, 8, 8), (4, 2, 8, 8)]
"""Heads of layers that are alike but for their queries."""


def rows_of(storage):
    return [t.clone() for t in (*storage.keys, *storage.values)]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- storages ------------------------------------------------------------------------------


WAYS = {
    "views": lambda s: [t for of in s.views(1, 4) for t in of],
    "kept views": lambda s: [t for of in (s.kept_views(1, 4), s.kept_views(1, 4)) for t in of[0]],
    "one layer": lambda s: [t for n in range(3) for t in s.layer(n, 2, 5)],
    "a copy": lambda s: rows_of(s.copy(1, 4)),
    "some rows": lambda s: rows_of(s.gathered([0, 2, 3])),
    "rows by head": lambda s: rows_of(s.gathered_by_head(HEADS)),
    "resized": lambda s: [t[:, :3] for t in rows_of(s.resized(3, 7))],
    "joined": lambda s: rows_of(Storage.joined([s, s], [(3, 5), (0, 2)])),
    "named tensors": lambda s: list(s.tensors(1, 4).values()),
    "from tensors": lambda s: rows_of(Storage.from_tensors(s.tensors(), LAYOUT)),
}
HEADS = torch.tensor([[[0, 2], [1, 3]], [[4, 0], [2, 1]], [[3, 3], [0, 4]]])


@pytest.mark.parametrize("way", WAYS)
def test_the_form_makes_no_difference(way):
    whole = filled(LAYOUT, 5)
    by_layer = whole.by_layer(5)
    assert (whole.n_parts, by_layer.n_parts) == (1, 3)
    assert by_layer.changes_by_layer
    assert not whole.changes_by_layer
    assert by_layer.n_bytes == whole.n_bytes == 3 * by_layer.n_part_bytes
    assert same(WAYS[way](by_layer), WAYS[way](whole))


def test_what_grew_gives_its_room_back():
    by_layer = filled(LAYOUT, 5).by_layer(3)
    assert holds(by_layer, filled(LAYOUT, 5), 0, 3)
    assert by_layer.n_bytes == 3 * bytes_per_token(LAYOUT)


def test_forms_may_be_joined():
    whole = filled(LAYOUT, 5)
    joined = Storage.joined([whole, whole.by_layer(5)], [(0, 2), (1, 4)])
    assert same([t[:, :2] for t in rows_of(joined)], [t[:, :2] for t in rows_of(whole)])
    assert same([t[:, 2:] for t in rows_of(joined)], [t[:, 1:4] for t in rows_of(whole)])


@pytest.mark.parametrize("rows", [[0], [4], [0, 1, 2], [1, 3, 4], [0, 1, 2, 3, 4], []])
def test_rows_that_are_kept(rows):
    storage = filled(LAYOUT, 5).by_layer(5)
    expected = rows_of(storage.gathered(rows))
    storage.kept_views(0, 5)
    storage.keep(rows)
    assert storage.capacity == len(rows)
    assert same(rows_of(storage), expected)
    assert same(storage.kept_views(0, len(rows))[0], expected[:3])
    assert storage.n_bytes == len(rows) * bytes_per_token(LAYOUT)


@pytest.mark.parametrize("n_fine", [0, 1, 2])
def test_without_memory_rows_that_are_kept_are_right(n_fine, monkeypatch):
    storage = filled(LAYOUT, 5).by_layer(5)
    before, after = rows_of(storage), rows_of(storage.gathered([1, 3, 4]))
    monkeypatch.setattr(storage_room, "_chosen", failing(storage_room._chosen, n_fine))
    if n_fine == 0:  # the first layer tells whether there is memory: nothing was done
        with pytest.raises(torch.OutOfMemoryError):
            storage.keep([1, 3, 4])
        assert (storage.capacity, same(rows_of(storage), before)) == (5, True)
    else:
        storage.keep([1, 3, 4])
        assert (storage.capacity, same(rows_of(storage), after)) == (3, True)


@pytest.mark.parametrize("n_fine", [0, 1, 2, 3])
def test_storages_are_united_or_stay(n_fine, monkeypatch):
    wholes = [filled(LAYOUT, 2), filled(LAYOUT, 4)]
    storages = [s.by_layer(s.capacity) for s in wholes]
    before = [rows_of(s) for s in storages]
    n_bytes = [s.n_bytes for s in storages]
    monkeypatch.setattr(storage_room.torch, "cat", failing(torch.cat, n_fine))
    try:
        united = Storage.united(storages)
    except torch.OutOfMemoryError:
        assert n_fine < 3
        assert [s.n_bytes for s in storages] == n_bytes
        assert all(same(rows_of(s), rows) for s, rows in zip(storages, before, strict=True))
        if n_fine < 3:  # there was memory to part them again
            parts = [t for s in storages for t in s._parts]
            assert len({t.untyped_storage().data_ptr() for t in parts}) == len(parts)
            assert all(t.is_contiguous() for t in parts)
    else:
        assert n_fine == 3
        monkeypatch.undo()
        places = [(0, s.capacity) for s in wholes]
        assert same(rows_of(united), rows_of(Storage.joined(wholes, places)))
        assert united.changes_by_layer


CHANGES = {
    "rows are kept": lambda storages: [s.keep(range(1, 1000)) for s in storages],
    "they are united": Storage.united,
}


@pytest.mark.parametrize("change", CHANGES)
def test_hardly_more_than_a_layer_is_there_twice(change):
    """Old rows of a layer are gone when those of the next one are copied."""
    storages = [filled(LAYOUT, 1000).by_layer(1000) for _ in range(2)]
    alive, most = Allocations(), 0

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                alive.add(out)
            most = max(most, alive.n_bytes)
            return out

    for tensor in (t for s in storages for t in s._parts):
        alive.add(tensor)
    for s in storages:  # whoever decodes over them
        for view in (v for views in s.kept_views(0, 1000) for v in views):
            alive.add(view)
    del tensor, view, s
    held, layer = alive.n_bytes, sum(s.n_part_bytes for s in storages)
    with Watching():
        CHANGES[change](storages)
    assert held < most <= held + layer + 8 * 1000  # and the rows' indices


class Allocations:
    """Storages of tensors that somebody holds, by address."""

    def __init__(self):
        self._known = {}

    def add(self, tensor):
        self._known[id(tensor)] = weakref.ref(tensor)

    @property
    def n_bytes(self):
        tensors = [t for ref in self._known.values() if (t := ref()) is not None]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(held.values())


def test_what_is_lent_stays_as_it_is():
    storage = filled(LAYOUT, 5).by_layer(5)
    before = rows_of(storage)
    lent = storage.lent()
    assert (storage.is_borrowed, storage.changes_by_layer, lent.is_of(storage)) == (
        True,
        False,
        True,
    )
    storage.keep([0, 1])  # nobody should: even then
    assert same(rows_of(lent), before)
    assert not lent.is_of(storage)
    del lent
    assert not storage.is_borrowed


def failing(real, n_fine):
    made = []

    def make(*args):
        made.append(args)
        if len(made) > n_fine:
            raise torch.OutOfMemoryError
        return real(*args)

    return make


# -- trees ---------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(attending, "HEADS", EVEN)
    return World(0)


def sealed_path(grove, texts):
    path = grove.begin("".join(texts))
    for text in texts:
        grove.feed(path, text)
        grove.tree.seal(path)
    return path


def unite(grove, path, most=100):
    grove.tree.unite(path.tip, most_of_piece=most, most_of_layer=most)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("seed", range(8))
def test_attention_is_exact_while_rows_leave(seed, windows, monkeypatch):
    monkeypatch.setattr(attending, "HEADS", EVEN)
    world, rng = World(seed), random.Random(seed)
    features_of = features_for(world, windows, None, True)
    grove, gone, n_united = world.grove(), Gone(), 0
    grove.run("ab" * 9)
    paths = [grove.begin("ab" * rng.randint(1, 9)) for _ in range(3)]
    for _ in range(14):
        fed = [Fed(p, "".join(rng.choices("ab", k=rng.choice([1, 1, 7])))) for p in paths]
        run(world, grove, fed, features_of, unseen=gone.unseen)
        if rng.random() < 0.6:
            grove.tree.seal(rng.choice(paths))
        if rng.random() < 0.6:
            unite(grove, rng.choice(paths), rng.choice([4, 100]))
        n_united += any(s.storage.changes_by_layer and s.fellows for s in grove.tree.segments())
        if rng.random() < 0.5:
            evict_some(rng, grove, gone)
        check_integrity(grove.tree)
    assert n_united, "nothing lay together"
    for p in paths:
        grove.tree.commit(p)
    check_integrity(grove.tree)
    check_rows(grove)


def test_a_united_path_is_one_block(world, monkeypatch):
    made = []

    def counting(q, k, v, **given):
        made.append(k.shape[1])
        return cpu_partial(q, k, v, **given)

    monkeypatch.setattr(bunches, "COPY_BYTES", 0)
    monkeypatch.setitem(tree_attention._PARTIALS, "cpu", counting)
    grove, gone = world.grove(), Gone()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab", "defabc"])
    unite(grove, path)
    for segment in path.tip.path()[:3]:
        gone_now = [1, 4]
        grove.tree.evict(segment, gone_now)
        gone.take(segment, gone_now)
    features_of = features_for(world, (None,) * 3, None, False)
    run(world, grove, [Fed(path, "x")], features_of, unseen=gone.unseen)
    assert made == [24 - 6, 1] * 3


def test_rows_leave_where_they_lie_and_others_move_up(world):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    unite(grove, path)
    first, second, third, _ = path.tip.path()
    storage = first.storage
    assert first.fellows == [first, second, third]
    grove.tree.peak_bytes = n_bytes = grove.tree.n_bytes
    row = grove.tree.bytes_per_token
    assert grove.tree.evict(second, [0, 2, 3]) == 3 * row
    assert second.storage is third.storage is storage
    assert [s.place for s in (first, second, third)] == [(0, 6), (6, 9), (9, 15)]
    assert grove.tree.n_bytes == n_bytes - 3 * row == reachable_bytes(grove.tree)
    assert grove.tree.peak_bytes == n_bytes + 15 * row // 3  # one layer of three
    check_rows(grove)


def test_a_segment_without_rows_leaves_the_others(world):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    unite(grove, path)
    first, second, third, _ = path.tip.path()
    grove.tree.evict(second, range(6))
    assert second.fellows == []
    assert first.fellows == [first, third]
    assert third.place == (6, 12)
    check_integrity(grove.tree)
    check_rows(grove)


def test_a_fork_inside_of_it_copies_nothing(world):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa"])
    unite(grove, path)
    grove.tree.commit(path)
    grove.tree.peak_bytes = grove.tree.n_bytes
    other = grove.begin("abcdefbcd" + "x")
    assert other.n_reused == 9
    assert grove.tree.peak_bytes == grove.tree.n_bytes
    check_integrity(grove.tree)
    grove.tree.discard(other)
    check_rows(grove)


@pytest.mark.parametrize(
    ("piece", "layer", "n_twice"), [(5, 100, 0), (100, 3, 6), (6, 4, 6), (100, 100, 6)]
)
def test_no_more_is_copied_than_may_be(world, piece, layer, n_twice):
    """A piece of six rows is copied as a whole, then a layer of three of all twelve."""
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa"])
    grove.tree.peak_bytes = n_bytes = grove.tree.n_bytes
    grove.tree.unite(path.tip, most_of_piece=piece, most_of_layer=layer)
    first, second, _ = path.tip.path()
    assert (first.storage is second.storage) == (piece >= 6 and layer >= 4)
    assert grove.tree.peak_bytes == n_bytes + n_twice * grove.tree.bytes_per_token


@pytest.mark.parametrize(("most", "n_twice"), [(5, 0), (6, 6)])
def test_a_segment_alone_loses_rows_layer_by_layer_too(world, most, n_twice):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef"])
    grove.tree.peak_bytes = n_bytes = grove.tree.n_bytes
    unite(grove, path, most)
    [segment, _] = path.tip.path()
    assert segment.storage.changes_by_layer == (most >= 6)
    assert grove.tree.peak_bytes == n_bytes + n_twice * grove.tree.bytes_per_token
    storage = segment.storage
    unite(grove, path, 5)
    assert segment.storage is storage
    grove.tree.peak_bytes = grove.tree.n_bytes
    grove.tree.evict(segment, [1])
    rows = 5 if most < 6 else 0
    layer = storage.n_part_bytes if most >= 6 else 0
    assert grove.tree.peak_bytes == n_bytes + rows * grove.tree.bytes_per_token + layer
    check_integrity(grove.tree)
    check_rows(grove)


def test_rows_come_back_beside_others_without_a_copy_of_those(world, monkeypatch):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    grove.tree.archive = Archive(fingerprint={}, cpu_bytes=10**6)
    second = path.tip.path()[1]
    grove.tree.archive_rows(second, range(4))
    grove.tree.evict(second, range(4))
    unite(grove, path)
    assert second.fellows
    old = [weakref.ref(part) for part in second.storage._parts]
    grove.tree.peak_bytes = n_bytes = grove.tree.n_bytes
    alive = []
    leave = chain.leave

    def watched(segment, storage, residency):
        n_copied = leave(segment, storage, residency)
        alive.extend(ref() is not None for ref in old)
        return n_copied

    monkeypatch.setattr(chain, "leave", watched)
    united, copied, copy = second.storage, [], Storage.copy
    monkeypatch.setattr(Storage, "copy", lambda s, *at: copied.append(s) or copy(s, *at))
    assert grove.tree.restore(second) == grove.tree.n_bytes - n_bytes
    assert copied
    assert united not in copied
    assert alive
    assert not any(alive), "views keep rows that have gone"
    layer = path.tip.path()[0].storage.n_part_bytes
    # Its six rows, and the four that came back while they were put in.
    assert grove.tree.peak_bytes == n_bytes + 10 * grove.tree.bytes_per_token + layer
    check_integrity(grove.tree)
    check_rows(grove)
    grove.tree.archive.close()


def test_siblings_beside_the_path_keep_a_storage_where_it_is(world):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa"])
    unite(grove, path)
    grove.tree.commit(path)
    other = grove.begin("abcdef" + "xyz")
    grove.feed(other, "xyz")
    grove.tree.seal(other)
    storage = path.tip.path()[0].storage
    unite(grove, other)
    assert path.tip.path()[0].storage is storage
    assert other.tip.path()[1].storage is not storage
    check_integrity(grove.tree)


@pytest.mark.parametrize("n_fine", range(6))
def test_without_memory_a_path_is_only_slower_to_read(world, monkeypatch, n_fine):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    with monkeypatch.context() as patch:
        patch.setattr(storage_room.torch, "cat", failing(torch.cat, n_fine))
        patch.setattr(Storage, "by_layer", failing(Storage.by_layer, n_fine))
        unite(grove, path)
    check_integrity(grove.tree)
    check_rows(grove)
    grove.tree.evict(path.tip.path()[1], [0, 5])
    unite(grove, path)
    check_integrity(grove.tree)
    check_rows(grove)


def test_a_snapshot_is_of_the_moment_it_was_taken(world):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    unite(grove, path)
    grove.tree.commit(path)
    taken = saved_thread.take([path], None, lambda _: False)
    first = path.tip.path()[0]
    held = rows_of(taken.segments[0].storage)
    assert taken.n_orphaned_bytes() == 0
    grove.tree.evict(first, [0, 1])
    check_integrity(grove.tree)
    check_rows(grove)
    assert same(rows_of(taken.segments[0].storage), held)
    assert taken.n_orphaned_bytes() == 18 * grove.tree.bytes_per_token


def test_segments_keep_their_rows_whatever_their_order(world):
    """One that left and came back lies behind those that followed it."""
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab", "defabc"])
    grove.tree.archive = Archive(fingerprint={}, cpu_bytes=10**6)
    unite(grove, path)
    first, second, third, last, _ = path.tip.path()
    grove.tree.archive_rows(second, range(6))
    grove.tree.evict(second, range(6))
    grove.tree.restore(second)
    for segment in (third, last):
        unite(grove, path)
        check_integrity(grove.tree)
        check_rows(grove)
        grove.tree.evict(segment, [1, 2])
        check_rows(grove)
    assert first.storage is second.storage is third.storage is last.storage
    assert first.place < third.place < last.place < second.place
    assert grove.begin("abcdefbcxyz").n_reused == 8
    check_integrity(grove.tree)
    check_rows(grove)


def test_packed_rows_that_come_back_stand_alone(world):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    grove.tree.archive = Archive(fingerprint={}, cpu_bytes=10**6)
    second = path.tip.path()[1]
    grove.tree.compress(second, range(4), 8)
    grove.tree.archive_rows(second, range(4))
    grove.tree.evict(second, range(4))
    unite(grove, path)
    assert second.fellows
    n_bytes = grove.tree.n_bytes
    assert grove.tree.restore(second) == grove.tree.n_bytes - n_bytes > 0
    assert second.packed
    assert not second.fellows
    check_integrity(grove.tree)
    check_rows(grove)


def test_rows_that_nobody_has_stay_where_they_are(world, monkeypatch):
    """There was no memory to give them back."""
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    unite(grove, path)
    other = grove.begin("abcdef" + "zz")
    grove.feed(other, "zz")
    grove.tree.seal(other)
    with monkeypatch.context() as patch:
        patch.setattr(storage_room, "_chosen", failing(storage_room._chosen, 0))
        grove.tree.discard(path)
    assert other.tip.path()[0].storage.capacity == 18
    unite(grove, other)
    check_rows(grove)
    assert other.tip.path()[0].storage.capacity == 18


@pytest.mark.parametrize("at", [1, 2])
def test_a_layer_without_memory_leaves_every_segment_its_own(world, monkeypatch, at):
    grove = world.grove()
    path = sealed_path(grove, ["abcdef", "bcdefa", "cdefab"])
    with monkeypatch.context() as patch:
        patch.setattr(storage_room.torch, "cat", failing(torch.cat, at))
        unite(grove, path)
    segments = path.tip.path()[:3]
    assert all(s.storage.changes_by_layer and not s.fellows for s in segments)
    n_bytes = grove.tree.n_bytes
    assert n_bytes == reachable_bytes(grove.tree)
    check_integrity(grove.tree)
    grove.tree.evict(segments[0], [0])
    check_integrity(grove.tree)
    check_rows(grove)


def test_a_copy_by_name_is_made_once():
    storage = filled(LAYOUT, 9)
    rows = [0, 2, 3, 7]
    by_layer = storage.by_layer(9)
    assert same(by_layer.named(rows).values(), storage.named(rows).values())
    for form in (storage, by_layer):
        likes, tensors = form.likes(2, 6), form.tensors(2, 6)
        assert {n: (t.shape, t.dtype) for n, t in likes.items()} == {
            n: (t.shape, t.dtype) for n, t in tensors.items()
        }
    assert by_layer.likes(2, 6)["rows"].is_meta


def test_forms_that_are_joined_are_copied_once():
    whole = filled(LAYOUT, 1000)
    by_layer = whole.by_layer(1000)
    made = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                made.append((out.untyped_storage().data_ptr(), out.untyped_storage().nbytes()))
            return out

    with Watching():
        joined = Storage.joined([whole, by_layer], [(0, 1000), (0, 1000)])
    old = {t.untyped_storage().data_ptr() for t in (*whole._parts, *by_layer._parts)}
    assert sum(n for at, n in set(made) if at not in old) == joined.n_bytes
