"""Exact copies of rows out of the way: in CPU memory, then on disk, then nowhere.

Both tiers hold no more bytes than they may. Where CPU memory is full, the copy that was asked for
least recently moves to disk; where the disk is full, the least recent one there is dropped. It
must not know segments: what it keeps are named tensors.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv.allocator import return_to_system
from sidequest_langchain.kv.archive_entry import Entry, Ticket, as_text
from sidequest_langchain.kv.archive_file import (
    Contents,
    header_of,
    payload_bytes,
    read_archive,
    write_archive,
)
from sidequest_langchain.kv.archive_folder import ArchiveFolder
from sidequest_langchain.kv.beside import Copies

__all__ = ["Archive", "Ticket"]


class Archive:
    """Two tiers of copies. May be used by several threads at once.

    While one thread writes, others read; a copy is readable at every moment of its move to disk.
    In CPU memory it takes its tensors' bytes, on disk its names and strings too; moving it to
    disk takes no other memory.
    """

    def __init__(
        self,
        *,
        fingerprint: Mapping[str, str],
        cpu_bytes: int = 0,
        disk_bytes: int = 0,
        folder: Path | None = None,
    ) -> None:
        """Open an archive; without bytes for a tier there is no such tier.

        Args:
            fingerprint: What the rows depend on (weights, dtype, adapter, RoPE, tokenizer ...).
            cpu_bytes: What may lie in CPU memory.
            disk_bytes: What may lie on disk.
            folder: Where; needed for a disk tier. Other files there are left alone.

        Raises:
            ValueError: A number is negative, or there are bytes for a disk but no folder.
            ArchiveError: Nothing can be written to the folder.
        """
        if cpu_bytes < 0 or disk_bytes < 0:
            msg = f"bytes of a tier cannot be negative, as in {cpu_bytes} and {disk_bytes}"
            raise ValueError(msg)
        if disk_bytes and folder is None:
            msg = f"{disk_bytes} bytes on disk need a folder"
            raise ValueError(msg)
        self.cpu_bytes, self.disk_bytes = cpu_bytes, disk_bytes
        self.fingerprint = fingerprint
        self.n_cpu_bytes = 0
        """Bytes in CPU memory."""
        self.n_disk_bytes = 0
        """Bytes of files, that of one being written included."""
        self._cpu: OrderedDict[str, Entry] = OrderedDict()
        self._disk: OrderedDict[str, Entry] = OrderedDict()
        # They may be asked for again by a thread that has them: a collection may free a segment.
        self._books = threading.RLock()
        """For the fields above, never held while a file is written or read."""
        self._writing = threading.RLock()
        """For whoever makes room or takes it; taken before `_books`."""
        self._is_closed = False
        self._folder = ArchiveFolder(folder) if folder is not None and disk_bytes else None

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What rows put in from now on depend on; others are refused when they are asked for."""
        found: dict[str, str] = json.loads(self._fingerprint)
        return found

    @fingerprint.setter
    def fingerprint(self, fingerprint: Mapping[str, str]) -> None:
        self._fingerprint = as_text(fingerprint)

    @property
    def n_entries(self) -> int:
        """Copies in both tiers."""
        return len(self._cpu) + len(self._disk)

    def put(self, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Ticket | None:
        """Keep a copy; exact. The tensors are not changed.

        Makes room by moving the oldest copies to disk and by dropping the oldest there. Where
        the disk fails, the copies in memory stay there.

        Args:
            tensors: Of any device and stride.
            meta: Strings to go with them.

        Returns:
            A ticket with one owner; `None` if there is no room for it, the disk failed, or the
            archive is closed.

        Raises:
            ValueError: A dtype or name has no place in a file, or `meta` is too long.
        """
        ticket = Ticket(secrets.token_hex(16), payload_bytes(tensors))
        entry = Entry(dict(meta), self._fingerprint)
        header = header_of(tensors, entry.about(ticket.key))
        with self._writing:
            if self._is_closed:
                return None
            if self.cpu_bytes and ticket.n_bytes <= self.cpu_bytes:
                is_kept = self._put_in_memory(ticket, entry, tensors)
            else:
                is_kept = self._write(ticket.key, entry, tensors, header, is_new=True)
        return ticket if is_kept else None

    def get(self, ticket: Ticket) -> Contents:
        """The tensors, on the CPU and bit for bit, and the strings.

        The tensors are not to be written. What is damaged or another model's is dropped.

        Raises:
            ArchiveError: The copy is lost, damaged, or made under another fingerprint.
        """
        with self._books:
            tier = self._tier(ticket)
            entry = tier[ticket.key]
            tier.move_to_end(ticket.key)
            copies = entry.copies
        try:
            entry.check(self._fingerprint)
            if tier is self._cpu:
                return copies.tensors(), dict(entry.meta)
            found, about = read_archive(
                self._path(ticket.key),
                n_bytes=entry.n_file_bytes,
                checksum=entry.checksum,
                about=entry.about(ticket.key),
            )
        except ArchiveError:
            self._forget(ticket.key)
            raise
        return found, dict(json.loads(about["meta"]))

    def has(self, ticket: Ticket) -> bool:
        """Whether the copy is in either tier."""
        return ticket.key in self._cpu or ticket.key in self._disk

    def hold(self, ticket: Ticket) -> None:
        """Add an owner: the copy stays until each of them has dropped it.

        Raises:
            ArchiveError: The copy is lost.
        """
        with self._books:
            self._tier(ticket)[ticket.key].n_owners += 1

    def drop(self, ticket: Ticket) -> None:
        """One owner less; the last one's frees it. A copy that is lost already is no error."""
        with self._books:
            entry = self._cpu.get(ticket.key) or self._disk.get(ticket.key)
            if entry is None:
                return
            entry.n_owners -= 1
            if entry.n_owners > 0:
                return
            del entry
        return_to_system(self._forget(ticket.key))

    def close(self) -> None:
        """Drop all copies and remove the folder; may be called twice."""
        with self._writing:
            self._is_closed = True
            with self._books:
                freed, self.n_cpu_bytes, self.n_disk_bytes = self.n_cpu_bytes, 0, 0
                self._cpu.clear()
                self._disk.clear()
            if self._folder is not None:
                self._folder.close()
        return_to_system(freed)

    def _put_in_memory(self, ticket: Ticket, entry: Entry, tensors: Mapping[str, Tensor]) -> bool:
        while self.n_cpu_bytes + ticket.n_bytes > self.cpu_bytes:
            before = self.n_cpu_bytes
            if not self._spill():
                return False
            return_to_system(before - self.n_cpu_bytes)
        with self._books:
            self.n_cpu_bytes += ticket.n_bytes
        try:
            entry.copies = Copies.of(tensors)
        except BaseException:  # no memory: as if it had not been asked
            with self._books:
                self.n_cpu_bytes -= ticket.n_bytes
            raise
        with self._books:
            self._cpu[ticket.key] = entry
        return True

    def _spill(self) -> bool:
        """Move the oldest copy in memory to disk, or drop it where none could have it.

        Returns:
            Whether there is less in memory now: not if the disk failed.
        """
        with self._books:
            if not self._cpu:
                return True  # another thread dropped the last one
            key, entry = next(iter(self._cpu.items()))
            copies = entry.copies
        tensors = copies.tensors()
        header = header_of(tensors, entry.about(key))
        if len(header) + payload_bytes(tensors) > self.disk_bytes:
            self._forget(key)
            return True
        return self._write(key, entry, tensors, header, is_new=False)

    def _write(
        self, key: str, entry: Entry, tensors: Mapping[str, Tensor], header: bytes, *, is_new: bool
    ) -> bool:
        """Write a copy to disk: a new one, or one that stays in memory until it is there."""
        n_payload = payload_bytes(tensors)
        n_bytes = len(header) + n_payload
        if self._folder is None or n_bytes > self.disk_bytes:
            return False
        while self.n_disk_bytes + n_bytes > self.disk_bytes:
            with self._books:
                oldest = next(iter(self._disk), None)
            if oldest is None:
                return False
            self._forget(oldest)
        with self._books:
            self.n_disk_bytes += n_bytes
        try:
            checksum = write_archive(self._path(key), tensors, header)
        except BaseException as error:
            with self._books:
                self.n_disk_bytes -= n_bytes
            if isinstance(error, OSError):
                return False
            raise
        with self._books:
            is_wanted = is_new or key in self._cpu
            if is_wanted:
                self._disk[key] = entry
                entry.n_file_bytes, entry.checksum = n_bytes, checksum
                if self._cpu.pop(key, None) is not None:
                    entry.copies = Copies()
                    self.n_cpu_bytes -= n_payload
            else:
                self.n_disk_bytes -= n_bytes
        if not is_wanted:  # dropped while it was written
            self._unlink(key)
        return True

    def _tier(self, ticket: Ticket) -> OrderedDict[str, Entry]:
        for tier in (self._cpu, self._disk):
            if ticket.key in tier:
                return tier
        msg = "the copy is not in the archive: it was dropped, by its owners or to make room"
        raise ArchiveError(msg)

    def _forget(self, key: str) -> int:
        """Drop a copy, whoever owns it. Returns the bytes of CPU memory that are free now."""
        with self._books:
            entry = self._cpu.pop(key, None)
            if entry is not None:
                freed = entry.copies.n_bytes
                self.n_cpu_bytes -= freed
                return freed
            entry = self._disk.pop(key, None)
            if entry is None:
                return 0
            self.n_disk_bytes -= entry.n_file_bytes
        self._unlink(key)
        return 0

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder.path / f"{key}.safetensors"

    def _unlink(self, key: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path(key).unlink()
