"""Archives under any history, and under several threads at once."""

from __future__ import annotations

import os
import threading

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv import archive_file, sealed_file
from sidequest_langchain.kv.archive import Archive
from tests.kv.archiving import KB, check, cpu_storages, files, rows


def test_threads_put_get_and_drop_at_once(opened):
    """An engine that archives and a thread that prefetches: never a wrong row, never a hang."""
    archive = opened(cpu_bytes=20 * KB, disk_bytes=40 * KB)
    tickets, wrong, stop = [], [], threading.Event()

    def prefetch():
        while not stop.is_set():
            for seed, ticket in list(tickets)[-12:]:
                try:
                    found, meta = archive.get(ticket)
                except ArchiveError:
                    continue
                if not (found["rows"] == seed).all() or meta != {"seed": str(seed)}:
                    wrong.append(seed)

    def drop():
        while not stop.is_set():
            for _, ticket in list(tickets)[-9:-6]:
                archive.drop(ticket)

    threads = [threading.Thread(target=work) for work in (prefetch, drop, prefetch)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(120):
            ticket = archive.put(rows(seed, KB * (1 + seed % 5)), {"seed": str(seed)})
            assert ticket is not None
            tickets.append((seed, ticket))
            assert cpu_storages(archive) <= archive.cpu_bytes
            assert archive.n_disk_bytes <= archive.disk_bytes
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    check(archive)


def test_a_copy_dropped_while_it_moves_leaves_no_file(opened, monkeypatch):
    archive = opened(cpu_bytes=5 * KB, disk_bytes=100 * KB)
    moving = archive.put(rows(1), {})
    real = os.fsync

    def drop_meanwhile(file):
        monkeypatch.undo()
        assert torch.equal(archive.get(moving)[0]["rows"], rows(1)["rows"])  # readable meanwhile
        archive.drop(moving)
        return real(file)

    monkeypatch.setattr(sealed_file.os, "fsync", drop_meanwhile)
    assert archive.put(rows(2), {})
    assert not archive.has(moving)
    assert not files(archive)
    check(archive)


class Book:
    """What an archive must be like: a list per tier, oldest first."""

    def __init__(self, cpu_bytes, disk_bytes):
        self.limits, self.tiers = (cpu_bytes, disk_bytes), ([], [])

    def put(self, item):
        size = item[1]
        level = 0 if self.limits[0] and size[0] <= self.limits[0] else 1
        if size[level] > self.limits[level]:
            return False
        self.add(level, item)
        return True

    def add(self, level, item):
        tier = self.tiers[level]
        while sum(size[level] for _, size in tier) + item[1][level] > self.limits[level]:
            moved = tier.pop(0)
            if level == 0 and moved[1][1] <= self.limits[1]:
                self.add(1, moved)
        tier.append(item)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cpu_bytes=st.sampled_from([0, 3 * KB, 9 * KB]),
    disk_bytes=st.sampled_from([0, 4 * KB, 12 * KB]),
    steps=st.lists(st.tuples(st.sampled_from(["put", "put", "get", "drop"]), st.integers(0, 9))),
)
def test_any_history_is_the_books_history(tmp_path, cpu_bytes, disk_bytes, steps):
    archive = Archive(
        fingerprint={}, cpu_bytes=cpu_bytes, disk_bytes=disk_bytes, folder=tmp_path / "archive"
    )
    book, tickets = Book(cpu_bytes, disk_bytes), []
    for seed, (verb, number) in enumerate(steps):
        if verb == "put":
            tensors = rows(seed, KB * number)
            ticket = archive.put(tensors, {})
            n_header = len(
                archive_file.header_of(
                    tensors, {"ticket": "0" * 32, "fingerprint": "{}", "meta": "{}"}
                )
            )
            item = (seed, (KB * number, KB * number + n_header))
            assert book.put(item) == (ticket is not None)
            if ticket is not None:
                tickets.append((item, ticket))
        elif tickets:
            item, ticket = tickets[number % len(tickets)]
            tier = next((tier for tier in book.tiers if item in tier), None)
            assert archive.has(ticket) == (tier is not None)
            if verb == "drop":
                archive.drop(ticket)
                if tier is not None:
                    tier.remove(item)
            elif tier is not None:
                assert (archive.get(ticket)[0]["rows"] == item[0]).all()
                tier.append(tier.pop(tier.index(item)))
        check(archive)
        assert [list(archive._cpu), list(archive._disk)] == [
            [dict(tickets)[item].key for item in tier] for tier in book.tiers
        ]
    archive.close()
