"""Two tiers: what they hold, what moves to disk and what is dropped, and to whom it belongs."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv.archive import Ticket
from sidequest_langchain.kv.packed import PackedBlock
from tests.kv.archiving import KB, check, files, rows


@pytest.mark.parametrize("tier", [{"cpu_bytes": 10**6}, {"disk_bytes": 10**6}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_copy_is_bit_identical_and_its_own(opened, tier, dtype):
    archive = opened(**tier)
    wide = torch.randn(2, 20, 8).mul(100).to(dtype)
    given_ = {"a": wide[:, ::2], "b": wide[:, :0], "c": wide.mT}
    before = {name: t.clone() for name, t in given_.items()}
    ticket = archive.put(given_, {"offsets": "0-9"})
    wide.zero_()
    found, meta = archive.get(ticket)
    assert meta == {"offsets": "0-9"}
    assert ticket.n_bytes == sum(t.numel() * dtype.itemsize for t in before.values())
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == dtype
    check(archive)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_block_comes_back_as_it_was(opened, bits):
    archive = opened(disk_bytes=10**6)
    keys, values = ([torch.randn(2, 100, 16) for _ in range(3)] for _ in range(2))
    block = PackedBlock.pack(keys, values, range(100), bits=bits, exempt={1})
    found, _ = archive.get(archive.put(block.tensors(), block.meta()))
    again = PackedBlock.from_tensors(found, block.offsets)
    assert (again.bits, again.offsets, again.n_bytes) == (bits, block.offsets, block.n_bytes)
    for layer in range(3):
        for one, other in zip(again.load(layer), block.load(layer), strict=True):
            assert torch.equal(one, other)


def test_the_oldest_moves_to_disk_and_the_oldest_there_is_dropped(opened):
    archive = opened(cpu_bytes=10 * KB, disk_bytes=10 * KB)  # two copies each
    tickets = []
    for seed in range(6):
        tickets.append(archive.put(rows(seed), {}))
        check(archive)
    assert [archive.has(t) for t in tickets] == [False, False, True, True, True, True]
    assert [t.key for t in tickets[2:4]] == list(archive._disk)
    assert [t.key for t in tickets[4:]] == list(archive._cpu)
    for seed in range(2, 6):
        assert torch.equal(archive.get(tickets[seed])[0]["rows"], rows(seed)["rows"])
    with pytest.raises(ArchiveError, match="dropped"):
        archive.get(tickets[0])


def test_a_copy_that_was_asked_for_is_not_the_oldest(opened):
    archive = opened(cpu_bytes=10 * KB)
    first, second = archive.put(rows(1), {}), archive.put(rows(2), {})
    archive.get(first)
    archive.put(rows(3), {})
    assert archive.has(first)
    assert not archive.has(second)


def test_the_memory_tier_alone_drops_its_oldest(opened):
    archive = opened(cpu_bytes=10 * KB)
    tickets = [archive.put(rows(seed), {}) for seed in range(5)]
    assert [archive.has(t) for t in tickets] == [False, False, False, True, True]


def test_a_copy_goes_where_it_fits(opened):
    archive = opened(cpu_bytes=10 * KB, disk_bytes=40 * KB)
    small, large = archive.put(rows(1), {}), archive.put(rows(2, 20 * KB), {})
    assert (archive.n_cpu_bytes, len(archive._disk)) == (4 * KB, 1)
    assert archive.put(rows(3, 50 * KB), {}) is None
    assert archive.has(small)
    assert archive.has(large)
    # What fits no disk is dropped when it must leave memory; nothing is dropped on disk for it.
    tight = opened(cpu_bytes=40 * KB, disk_bytes=10 * KB)
    wide = tight.put(rows(4, 30 * KB), {})
    assert tight.put(rows(5, 30 * KB), {})
    assert not tight.has(wide)


@pytest.mark.parametrize("tier", [{}, {"cpu_bytes": KB}, {"disk_bytes": KB}])
def test_without_room_there_is_no_ticket(opened, tier):
    archive = opened(**tier)
    assert archive.put(rows(1), {}) is None
    assert archive.n_entries == 0


def test_a_hundred_segments_in_ten_megabytes(opened):
    """Caps hold at the storages all the time, and nothing is doubled on the way."""
    archive = opened(cpu_bytes=10 * 2**20, disk_bytes=20 * 2**20)
    tickets = []
    for seed in range(100):
        tickets.append(archive.put(rows(seed, 2**20), {}))
        check(archive)
        if seed % 7 == 0 and archive.has(tickets[seed // 2]):
            found, _ = archive.get(tickets[seed // 2])
            assert found["rows"][0] == seed // 2
    left = [seed for seed, ticket in enumerate(tickets) if archive.has(ticket)]
    assert len(left) in (28, 29)
    for seed in left:
        assert (archive.get(tickets[seed])[0]["rows"] == seed).all()
        archive.drop(tickets[seed])
        check(archive)
    assert archive.n_entries == 0


def test_moving_to_disk_takes_no_memory(opened):
    archive = opened(cpu_bytes=9 * 2**20, disk_bytes=20 * 2**20)
    archive.put(rows(1, 8 * 2**20), {})
    tracemalloc.start()
    assert archive._spill()
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert archive.n_cpu_bytes == 0


# ---- owners


def test_each_owner_drops_once(opened):
    archive = opened(cpu_bytes=10 * KB, disk_bytes=10 * KB)
    ticket = archive.put(rows(1), {})
    archive.hold(ticket)
    archive.drop(ticket)
    assert archive.has(ticket)
    archive.drop(ticket)
    assert not archive.has(ticket)
    archive.drop(ticket)
    with pytest.raises(ArchiveError, match="dropped"):
        archive.hold(ticket)


def test_owners_are_kept_on_the_way_to_disk(opened):
    archive = opened(cpu_bytes=5 * KB, disk_bytes=10 * KB)
    ticket = archive.put(rows(1), {})
    archive.hold(ticket)
    archive.put(rows(2), {})
    assert ticket.key in archive._disk
    archive.drop(ticket)
    assert torch.equal(archive.get(ticket)[0]["rows"], rows(1)["rows"])
    archive.drop(ticket)
    assert not files(archive)


def test_tickets_of_another_archive_mean_nothing(opened):
    one, other = opened(cpu_bytes=10 * KB), opened(cpu_bytes=10 * KB)
    ticket = one.put(rows(1), {})
    assert not other.has(ticket)
    other.drop(ticket)
    with pytest.raises(ArchiveError):
        other.get(ticket)
    assert one.has(ticket)


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "", ".", "~", "nul\0x", "x" * 5000])
def test_a_made_up_ticket_reaches_no_file(opened, key):
    archive = opened(disk_bytes=10 * KB)
    ticket = Ticket(key, 1)
    assert not archive.has(ticket)
    archive.drop(ticket)
    with pytest.raises(ArchiveError):
        archive.get(ticket)


def test_labels_do_not_reach_names(opened, tmp_path):
    archive = opened(disk_bytes=20 * KB)
    name = "../../x\0/etc/ü" * 20
    ticket = archive.put({name: torch.ones(3)}, {name: name})
    found, meta = archive.get(ticket)
    assert (list(found), meta) == ([name], {name: name})
    (path,) = files(archive)
    assert path.name == f"{ticket.key}.safetensors"
    assert len(ticket.key) == 32
    assert int(ticket.key, 16) >= 0
    assert {p.name for p in tmp_path.iterdir()} == {"archive"}
