"""One file of the archive: the tensors of one copy, sealed. It must not know tiers or segments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sidequest_langchain.kv.sealed_file import SealedFile, write_sealed
from sidequest_langchain.kv.sealed_form import Form, Shape, blocks_of, header_for, in_order

FORM = Form(name="sidequest-archive-1", noun="archived copy", was_not="restored")

Contents = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and strings."""


def header_of(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """The length and the header of a file, its checksum still blank.

    Raises:
        ValueError: A dtype or a name has no place in a file, or the strings are too long.
    """
    return header_for(FORM, _shapes(tensors), about)


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(t.numel() * t.dtype.itemsize for t in tensors.values())


def write_archive(path: Path, tensors: Mapping[str, Tensor], header: bytes) -> str:
    """Write a file that appears under its name whole or not at all; exact.

    The tensors may lie anywhere: a part of one at a time is copied to the CPU, nothing of one
    that is there already and contiguous. Links are not followed: a link of that name is replaced.

    Args:
        path: Where to.
        tensors: What to write.
        header: From `header_of` the same tensors.

    Returns:
        The checksum.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    blocks = (block for s in _shapes(tensors) for block in blocks_of(tensors[s.name]))
    return write_sealed(path, header, blocks)


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
    with SealedFile(path, FORM, n_bytes=n_bytes, checksum=checksum) as file:
        for name, wanted in about.items():
            if file.about.get(name) != wanted:
                found = file.about.get(name)
                file.refuse(f"its {name} is {found!r} where {wanted!r} is expected")
        try:
            tensors = {s.name: torch.empty(s.sizes, dtype=s.dtype) for s in file.shapes()}
        except (RuntimeError, TypeError, OverflowError) as error:  # no rows, and endless sizes
            file.refuse("it claims a shape that no tensor has", error)
        for tensor in tensors.values():
            file.read_into(tensor)
        file.check()
        return tensors, file.about


def _shapes(tensors: Mapping[str, Tensor]) -> list[Shape]:
    return list(in_order(Shape.of(name, tensor) for name, tensor in tensors.items()))
