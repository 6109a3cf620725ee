"""The file of one saved thread: many tensors and an index of them, sealed.

It must not know a tree: what it holds are named tensors and JSON. The header stays short however
many tensors there are, since those of one dtype lie in one after another:

    index      JSON: names, dtypes and shapes of all tensors, and what the caller adds
    small.*    tensors that a reader wants before the others
    rows.*     the others, wide elements first
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from sidequest_langchain.errors import SavedThreadError
from sidequest_langchain.kv.sealed_file import SealedFile, write_sealed
from sidequest_langchain.kv.sealed_form import DTYPES, NAMES, Form, Shape, blocks_of, header_for

FORM = Form(
    name="sidequest-thread-1", noun="saved thread", was_not="loaded", error=SavedThreadError
)
ALIGNED = 8
"""Bytes to a multiple of which every group of tensors is filled up."""
STALE_S = 600.0
"""Seconds without a write after which an unfinished file is taken for a dead process's."""


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor to write."""

    shape: Shape
    load: Callable[[], Tensor]
    """Gives it when its turn comes; called once."""
    is_small: bool = False
    """Whether a reader wants it before the others."""


def file_of(folder: Path, thread_id: str) -> Path:
    """Where a thread is saved: named by a hash, so that no id leads out of the folder."""
    name = hashlib.sha256(thread_id.encode("utf-8", "surrogatepass")).hexdigest()
    return folder / f"{name}.safetensors"


def write_thread(
    path: Path, items: Iterable[Item], facts: Mapping[str, Any], about: Mapping[str, str]
) -> int:
    """Write a thread's file, whole or not at all; exact. An older one is replaced.

    Args:
        path: From `file_of`; its folder is made (`0700`) if it is not there.
        items: The tensors; one at a time is asked for.
        facts: JSON to go with them.
        about: Strings for the header.

    Returns:
        Bytes of the file.

    Raises:
        OSError: It could not be written; nothing is left of it, and an older file stays.
        ValueError: A dtype has no place in a file.
    """
    small: dict[torch.dtype, list[Item]] = {}
    large: dict[torch.dtype, list[Item]] = {}
    for item in items:
        (small if item.is_small else large).setdefault(item.shape.dtype, []).append(item)
    groups = [
        (kind, dtype, found[dtype])
        for kind, found in (("small", small), ("rows", large))
        for dtype in sorted(found, key=lambda dtype: -dtype.itemsize)
    ]
    tensors = [
        [kind, item.shape.name, NAMES.get(dtype, str(dtype)), list(item.shape.sizes)]
        for kind, dtype, found in groups
        for item in found
    ]
    text = json.dumps({"tensors": tensors, **facts}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    shapes = [Shape("index", torch.uint8, (len(text),))] + [
        Shape(f"{kind}.{NAMES.get(dtype, dtype)}", dtype, (_n_filled(dtype, found),))
        for kind, dtype, found in groups
    ]
    header = header_for(FORM, shapes, about)

    def blocks() -> Iterator[memoryview]:
        yield memoryview(text)
        for _, _, found in groups:
            n_bytes = 0
            found.reverse()
            while found:  # so that what was written can go
                item = found.pop()
                yield from blocks_of(item.load())
                n_bytes += item.shape.n_bytes
            yield memoryview(bytes(-n_bytes % ALIGNED))

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_unfinished(path)
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    write_sealed(path, header, blocks(), temporary=temporary)
    return len(header) + sum(shape.n_bytes for shape in shapes)


def remove_unfinished(path: Path, *, older_than_s: float = STALE_S) -> None:
    """Remove what processes left that ended while they wrote this thread's file.

    Args:
        path: From `file_of`.
        older_than_s: Seconds since the last write; another process may be writing just now.
    """
    pattern = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for entry in os.scandir(path.parent):
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age > older_than_s:
                        os.unlink(entry.path)


class ThreadFile:
    """A thread's file that is being read. Trust nothing of it before `finish`."""

    def __init__(self, path: Path) -> None:
        """Open it, and read its index and its small tensors.

        Raises:
            SavedThreadError: It is gone, or no such file.
        """
        self._file = SealedFile(path, FORM)
        try:
            self._begin()
        except BaseException:
            self._file.__exit__(None, None, None)
            raise

    def _begin(self) -> None:
        groups = self._file.shapes()
        first = groups[0] if groups else None
        if first is None or (first.name, first.dtype) != ("index", torch.uint8):
            self._file.refuse("it has no index")
        raw = torch.empty(first.sizes, dtype=torch.uint8)
        self._file.read_into(raw)
        try:
            self.facts: dict[str, Any] = json.loads(raw.numpy().tobytes())
            tensors = [
                (kind, Shape(name, DTYPES[dtype], tuple(map(_size, sizes))))
                for kind, name, dtype, sizes in self.facts["tensors"]
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._file.refuse("its index is none", error)
        small = [shape for kind, shape in tensors if kind == "small"]
        self.shapes = [shape for kind, shape in tensors if kind != "small"]
        """The tensors that are not small, in their order."""
        found = [
            Shape(f"{kind}.{NAMES[dtype]}", dtype, (_filled(dtype, [s.n_bytes for _, s in same]),))
            for (kind, dtype), same in (
                (key, list(group)) for key, group in groupby(tensors, lambda t: (t[0], t[1].dtype))
            )
        ]
        if found != groups[1:] or len({s.name for _, s in tensors}) != len(tensors):
            self._file.refuse("its index describes other tensors than it has")
        self.small = dict(self._read(small, lambda shape: True))
        """Tensors that were wanted first."""

    def __enter__(self) -> ThreadFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)

    @property
    def about(self) -> Mapping[str, str]:
        """Strings of the header."""
        return self._file.about

    def rows(self, wanted: Callable[[Shape], bool]) -> Iterator[tuple[str, Tensor]]:
        """The other tensors that are wanted, in new CPU memory, one at a time. Once.

        Raises:
            SavedThreadError: The file is damaged.
        """
        yield from self._read(self.shapes, wanted)

    def finish(self) -> None:
        """Compare the checksum, after reading whatever was not read yet.

        Raises:
            SavedThreadError: The file is damaged.
        """
        self._file.skip(self._file.n_left)
        self._file.check()

    def refuse(
        self, why: str, error: BaseException | None = None, *, field: str | None = None
    ) -> NoReturn:
        """Say that this file is not taken.

        Args:
            why: What is wrong with it.
            error: What was raised at it.
            field: What differs from the model that runs now.

        Raises:
            SavedThreadError: Always.
        """
        try:
            self._file.refuse(why, error)
        except SavedThreadError as refusal:
            refusal.field = field
            raise

    def _read(
        self, shapes: Sequence[Shape], wanted: Callable[[Shape], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        for _, group in groupby(shapes, lambda shape: shape.dtype):
            n_bytes = 0
            for shape in group:
                n_bytes += shape.n_bytes
                if wanted(shape):
                    try:
                        tensor = torch.empty(shape.sizes, dtype=shape.dtype)
                    except (TypeError, OverflowError) as error:  # no rows, and endless sizes
                        self._file.refuse("it claims a shape that no tensor has", error)
                    self._file.read_into(tensor)
                    yield shape.name, tensor
                else:
                    self._file.skip(shape.n_bytes)
            self._file.skip(-n_bytes % ALIGNED)


def _size(size: object) -> int:
    if type(size) is not int or size < 0:
        msg = f"a tensor has no size {size!r}"
        raise ValueError(msg)
    return size


def _n_filled(dtype: torch.dtype, items: Sequence[Item]) -> int:
    return _filled(dtype, [item.shape.n_bytes for item in items])


def _filled(dtype: torch.dtype, n_bytes: Sequence[int]) -> int:
    """Elements of a group of tensors, filled up."""
    total = sum(n_bytes)
    return (total + -total % ALIGNED) // dtype.itemsize
