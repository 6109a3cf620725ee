"""One file in safetensors form with a checksum over every byte: written whole, read in order.

It must not know what the tensors are. Nothing in a file is trusted before its checksum was
compared, and nothing is ever unpickled.

    8 bytes      length of the header, little endian
    header       JSON: dtype, shape and place of each tensor, and strings about the whole
    payload      the tensors' bytes, one after another

The checksum is the sha256 of the file with 64 zeros where the checksum itself stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from sidequest_langchain.kv.sealed_form import (
    BLOCK_BYTES,
    DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    NO_SUM,
    Form,
    Shape,
    blocks_of,
)

_SUM = re.compile(r"[0-9a-f]{64}")


def write_sealed(
    path: Path, header: bytes, blocks: Iterable[memoryview], *, temporary: Path | None = None
) -> str:
    """Write a file that appears under its name whole or not at all; exact.

    Links are not followed: a link of that name is replaced.

    Args:
        path: Where to.
        header: From `header_for`.
        blocks: The payload, which is not kept.
        temporary: Where it lies until it is whole, in the same folder.

    Returns:
        The checksum.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    temporary = temporary or path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _own_flags()
    file = os.open(temporary, flags, 0o600)
    try:
        try:
            digest = hashlib.sha256(header)
            _write(file, header)
            for block in blocks:
                digest.update(block)
                _write(file, block)
            checksum = digest.hexdigest()
            os.lseek(file, 0, os.SEEK_SET)
            _write(file, header.replace(NO_SUM.encode(), checksum.encode(), 1))
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)
    return checksum


class SealedFile:
    """A file that is being read: its header at once, its payload in order.

    Only one who has read all of it, and called `check`, may trust any of it.
    """

    def __init__(
        self, path: Path, form: Form, *, n_bytes: int | None = None, checksum: str | None = None
    ) -> None:
        """Open a file and read its header. No more memory is taken than that is long.

        Args:
            path: The file; a link is refused.
            form: What kind of file it must be.
            n_bytes: How long it must be, if that is known.
            checksum: What it must be, if that is known; else what the file says of itself.

        Raises:
            ArchiveError: It is gone, or no such file.
        """
        self.path, self._form = path, form
        try:
            # Not to wait for a writer, should a pipe be in its place.
            flags = os.O_RDONLY | _own_flags() | getattr(os, "O_NONBLOCK", 0)
            self._file = io.FileIO(os.open(path, flags))
        except OSError as error:
            self.refuse(f"it cannot be opened ({error.strerror})", error)
        try:
            self._begin(n_bytes, checksum)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, n_bytes: int | None, checksum: str | None) -> None:
        facts = os.fstat(self._file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            self.refuse("it is no regular file")
        if n_bytes is not None and facts.st_size != n_bytes:
            self.refuse(f"it has {facts.st_size} bytes where {n_bytes} were written")
        start = self._read_start()
        n_header = int.from_bytes(start, "little")
        if n_header > min(MAX_HEADER_BYTES, facts.st_size - len(start)):
            self.refuse(f"it claims a header of {n_header} bytes")
        header = bytearray(n_header)
        self._fill(memoryview(header))
        self.n_payload = self.n_left = facts.st_size - len(start) - n_header
        """Bytes after the header; and those of them that were not read yet."""
        self.table, self.about = self._parsed(bytes(header))
        self._checksum = str(self.about.get("sha256")) if checksum is None else checksum
        if not _SUM.fullmatch(self._checksum):
            self.refuse("it has no checksum")
        blank = bytes(header).replace(self._checksum.encode(), NO_SUM.encode(), 1)
        self._digest = hashlib.sha256(start + blank)

    def __enter__(self) -> SealedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def refuse(self, why: str, error: BaseException | None = None) -> NoReturn:
        """Say that this file is not taken.

        Raises:
            ArchiveError: Always.
        """
        self._form.refuse(self.path, why, error)

    def shapes(self) -> list[Shape]:
        """The tensors that the header names, in order; they fill the payload exactly.

        Raises:
            ArchiveError: They do not, or the header is none.
        """
        found: list[Shape] = []
        end = 0
        try:
            for name, place in self.table.items():
                sizes = place["shape"]
                if not all(type(size) is int and size >= 0 for size in sizes):
                    self.refuse(f"tensor {name!r} claims the shape {sizes}")
                shape = Shape(name, DTYPES[place["dtype"]], tuple(sizes))
                start, end = end, end + shape.n_bytes
                if place["data_offsets"] != [start, end]:
                    self.refuse(f"tensor {name!r} does not lie where its shape says")
                found.append(shape)
        except (TypeError, KeyError, ValueError) as error:
            self.refuse("its header is no header of an archive", error)
        if end != self.n_payload:
            self.refuse(f"its header describes {end} bytes of {self.n_payload}")
        return found

    def read_into(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes that come next.

        Raises:
            ArchiveError: There are not so many.
        """
        for block in blocks_of(tensor):
            self._fill(block)
            self._digest.update(block)
            self.n_left -= len(block)

    def skip(self, n_bytes: int) -> None:
        """Pass over the bytes that come next; they count for the checksum.

        Raises:
            ArchiveError: There are not so many.
        """
        scrap = torch.empty(min(n_bytes, BLOCK_BYTES), dtype=torch.uint8)
        while n_bytes > 0:
            part = scrap[: min(n_bytes, len(scrap))]
            self.read_into(part)
            n_bytes -= len(part)

    def check(self) -> None:
        """Compare the checksum, once all was read.

        Raises:
            ArchiveError: It differs.
        """
        if self._digest.hexdigest() != self._checksum:
            self.refuse("its bytes are not the ones that were written (sha256 differs)")

    def _parsed(self, header: bytes) -> tuple[dict[str, Any], dict[str, str]]:
        try:
            table = json.loads(header)
            found = table.pop("__metadata__")
            if found["format"] != self._form.name:
                self.refuse(f"its format is {found['format']!r}, not {self._form.name!r}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.refuse("its header is no header of an archive", error)
        return table, found

    def _read_start(self) -> bytes:
        try:
            return self._file.read(LENGTH_BYTES)
        except OSError as error:
            self.refuse(f"it cannot be read ({error.strerror})", error)

    def _fill(self, block: memoryview) -> None:
        while block:
            try:
                n_read = self._file.readinto(block)
            except OSError as error:
                self.refuse(f"it cannot be read ({error.strerror})", error)
            if not n_read:
                self.refuse("it ends early")
            block = block[n_read:]


def _write(file: int, block: bytes | memoryview) -> None:
    rest = memoryview(block)
    while rest:
        n_written = os.write(file, rest)
        if n_written == 0:
            msg = "nothing more can be written"
            raise OSError(msg)
        rest = rest[n_written:]


def _own_flags() -> int:
    """No links, no children, no translated line ends; as far as the system knows these."""
    return sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))


def _sync_folder(folder: Path) -> None:
    """Make a new name last; systems that cannot do it keep the file all the same."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
