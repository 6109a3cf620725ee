"""One file of the archive: tensors in safetensors form with a checksum over every byte.

It must not know tiers or segments. Nothing in a file is trusted before its checksum was compared,
and nothing is ever unpickled.

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
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from sidequest_langchain.errors import ArchiveError

FORMAT = "sidequest-archive-1"
MAX_HEADER_BYTES = 2**20
_BLOCK_BYTES = 2**20
_LENGTH_BYTES = 8
_NO_SUM = "0" * 64

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

Contents = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and strings."""


def header_of(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """The length and the header of a file, its checksum still blank.

    Raises:
        ValueError: A dtype or a name has no place in a file, or the strings are too long.
    """
    table: dict[str, Any] = {"__metadata__": {"format": FORMAT, "sha256": _NO_SUM, **about}}
    end = 0
    for name, tensor in _in_order(tensors):
        if tensor.dtype not in _NAMES or name == "__metadata__":
            msg = f"tensor {name!r} of {tensor.dtype} has no place in an archive"
            raise ValueError(msg)
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        place = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        table[name] = {**place, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        msg = f"{len(text)} bytes of names and strings; an archive takes {MAX_HEADER_BYTES}"
        raise ValueError(msg)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(t.numel() * t.dtype.itemsize for t in tensors.values())


def write_archive(path: Path, tensors: Mapping[str, Tensor], header: bytes) -> str:
    """Write a file that appears under its name whole or not at all; exact.

    The tensors may lie anywhere: one at a time is copied to the CPU, none that is there already
    and contiguous. Links are not followed: a link of that name is replaced.

    Args:
        path: Where to.
        tensors: What to write.
        header: From `header_of` the same tensors.

    Returns:
        The checksum.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    temporary = path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _own_flags()
    file = os.open(temporary, flags, 0o600)
    try:
        try:
            digest = hashlib.sha256(header)
            _write(file, header)
            for _, tensor in _in_order(tensors):
                for block in _blocks(tensor):
                    digest.update(block)
                    _write(file, block)
            checksum = digest.hexdigest()
            os.lseek(file, 0, os.SEEK_SET)
            _write(file, header.replace(_NO_SUM.encode(), checksum.encode(), 1))
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


def read_archive(path: Path, *, n_bytes: int, checksum: str, about: Mapping[str, str]) -> Contents:
    """Read a file back, bit for bit, into new CPU tensors.

    No more memory is taken than the file is long, whatever it says of itself.

    Args:
        path: The file.
        n_bytes: How long it was when it was written.
        checksum: What `write_archive` returned.
        about: Strings that it must hold.

    Raises:
        ArchiveError: It is gone, damaged, or another one; the message says what is wrong.
    """
    try:
        # Not to wait for a writer, should a pipe be in its place.
        flags = os.O_RDONLY | _own_flags() | getattr(os, "O_NONBLOCK", 0)
        file = io.FileIO(os.open(path, flags))
    except OSError as error:
        _refuse(path, f"it cannot be opened ({error.strerror})", error)
    with file:
        try:
            return _read(path, file, n_bytes, checksum, about)
        except OSError as error:
            _refuse(path, f"it cannot be read ({error.strerror})", error)


def _read(
    path: Path, file: io.FileIO, n_bytes: int, checksum: str, about: Mapping[str, str]
) -> Contents:
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode):
        _refuse(path, "it is no regular file")
    if facts.st_size != n_bytes:
        _refuse(path, f"it has {facts.st_size} bytes where {n_bytes} were written")
    start = file.read(_LENGTH_BYTES)
    n_header = int.from_bytes(start, "little")
    if n_header > min(MAX_HEADER_BYTES, n_bytes - len(start)):
        _refuse(path, f"it claims a header of {n_header} bytes")
    header = bytearray(n_header)
    _fill(path, file, memoryview(header))
    table, found = _parsed(path, bytes(header))
    for name, wanted in about.items():
        if found.get(name) != wanted:
            _refuse(path, f"its {name} is {found.get(name)!r} where {wanted!r} is expected")
    tensors = _placed(path, table, n_bytes - len(start) - n_header)
    blank = bytes(header).replace(checksum.encode(), _NO_SUM.encode(), 1)
    digest = hashlib.sha256(start + blank)
    for tensor in tensors.values():
        for block in _blocks(tensor):
            _fill(path, file, block)
            digest.update(block)
    if digest.hexdigest() != checksum:
        _refuse(path, "its bytes are not the ones that were written (sha256 differs)")
    return tensors, found


def _parsed(path: Path, header: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        table = json.loads(header)
        found = table.pop("__metadata__")
        if found["format"] != FORMAT:
            _refuse(path, f"its format is {found['format']!r}, not {FORMAT!r}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _refuse(path, "its header is no header of an archive", error)
    return table, found


def _placed(path: Path, table: Mapping[str, Any], n_payload: int) -> dict[str, Tensor]:
    """Empty tensors as the header describes them, if they fill the payload exactly."""
    shapes: dict[str, tuple[list[int], torch.dtype]] = {}
    end = 0
    try:
        for name, place in table.items():
            shape, dtype = place["shape"], _DTYPES[place["dtype"]]
            if not all(type(size) is int and size >= 0 for size in shape):
                _refuse(path, f"tensor {name!r} claims the shape {shape}")
            start, end = end, end + math.prod(shape) * dtype.itemsize
            if place["data_offsets"] != [start, end]:
                _refuse(path, f"tensor {name!r} does not lie where its shape says")
            shapes[name] = (shape, dtype)
    except (TypeError, KeyError, ValueError) as error:
        _refuse(path, "its header is no header of an archive", error)
    if end != n_payload:
        _refuse(path, f"its header describes {end} bytes of {n_payload}")
    try:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    except (RuntimeError, TypeError, OverflowError) as error:  # no rows, and sizes without end
        _refuse(path, "it claims a shape that no tensor has", error)


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Wide elements first, so that each lies at a multiple of its own width."""
    return sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a mebibyte at a time; of a contiguous CPU tensor, its own memory."""
    if tensor.numel() == 0:
        return
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    elements: Any = flat.numpy()  # a buffer, though its stubs do not say so before Python 3.12
    whole = memoryview(elements)
    for start in range(0, len(whole), _BLOCK_BYTES):
        yield whole[start : start + _BLOCK_BYTES]


def _write(file: int, block: bytes | memoryview) -> None:
    rest = memoryview(block)
    while rest:
        n_written = os.write(file, rest)
        if n_written == 0:
            msg = "nothing more can be written"
            raise OSError(msg)
        rest = rest[n_written:]


def _fill(path: Path, file: io.FileIO, block: memoryview) -> None:
    while block:
        n_read = file.readinto(block)
        if not n_read:
            _refuse(path, "it ends early")
        block = block[n_read:]


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


def _refuse(path: Path, why: str, error: BaseException | None = None) -> NoReturn:
    msg = f"the archived copy {path.name} was not restored: {why}"
    raise ArchiveError(msg) from error
