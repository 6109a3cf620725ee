"""Named arrays in a safetensors file, with strings beside them: written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sidequest_langchain.errors import ConfigError

Arrays = Mapping[str, npt.NDArray[Any]]


def write_arrays(path: Path, arrays: Arrays, meta: Mapping[str, str]) -> None:
    """Write contiguous arrays and strings; another process sees the old file or the new one."""
    content = save(dict(arrays), metadata=dict(meta))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_arrays(path: Path, what: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays and the strings of a file that `write_arrays` wrote.

    Args:
        path: The file.
        what: What it should be, for the message.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            meta = dict(file.metadata() or {})
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        msg = f"{what} cannot be read from {str(path)!r}: {error}"
        raise ConfigError(msg) from error
