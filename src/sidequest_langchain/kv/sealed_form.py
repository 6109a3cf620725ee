"""What a sealed file is made of: its kind, its tensors' shapes, its header, its bytes.

It must not know how a file is opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from sidequest_langchain.errors import ArchiveError

MAX_HEADER_BYTES = 2**20
BLOCK_BYTES = 2**20
LENGTH_BYTES = 8
NO_SUM = "0" * 64

NAMES: dict[torch.dtype, str] = {
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
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A kind of file, and how it is spoken of when it is refused."""

    name: str
    noun: str
    was_not: str
    error: type[ArchiveError] = ArchiveError

    def refuse(self, path: Path, why: str, error: BaseException | None = None) -> NoReturn:
        """Say that a file is not taken.

        Raises:
            ArchiveError: Always; or the form's own kind of it.
        """
        msg = f"the {self.noun} {path.name} was not {self.was_not}: {why}"
        raise self.error(msg) from error


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor of a file, without its elements."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Shape:
        """That of a tensor that is there."""
        return cls(name, tensor.dtype, tuple(tensor.shape))


def header_for(form: Form, shapes: Iterable[Shape], about: Mapping[str, str]) -> bytes:
    """The length and the header of a file, its checksum still blank.

    Args:
        form: The kind of file.
        shapes: Of its tensors, in the order of their bytes.
        about: Strings to go with them.

    Raises:
        ValueError: A dtype or a name has no place in a file, or the strings are too long.
    """
    table: dict[str, Any] = {"__metadata__": {"format": form.name, "sha256": NO_SUM, **about}}
    end = 0
    for shape in shapes:
        if shape.dtype not in NAMES or shape.name == "__metadata__":
            msg = f"tensor {shape.name!r} of {shape.dtype} has no place in an archive"
            raise ValueError(msg)
        start, end = end, end + shape.n_bytes
        place = {"dtype": NAMES[shape.dtype], "shape": list(shape.sizes)}
        table[shape.name] = {**place, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        msg = f"{len(text)} bytes of names and strings; an archive takes {MAX_HEADER_BYTES}"
        raise ValueError(msg)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a mebibyte at a time; of a contiguous CPU tensor, its own memory.

    Of any other, one part of its first dimension at a time is copied.
    """
    if tensor.numel() == 0:
        return
    tensor = tensor.detach()
    if tensor.dim() > 1 and not (tensor.is_contiguous() and tensor.device.type == "cpu"):
        for part in tensor:
            yield from blocks_of(part)
        return
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    elements: Any = flat.numpy()  # a buffer, though its stubs do not say so before Python 3.12
    whole = memoryview(elements)
    for start in range(0, len(whole), BLOCK_BYTES):
        yield whole[start : start + BLOCK_BYTES]


def in_order(shapes: Iterable[Shape]) -> Sequence[Shape]:
    """Wide elements first, so that each lies at a multiple of its own width."""
    return sorted(shapes, key=lambda shape: -shape.dtype.itemsize)
