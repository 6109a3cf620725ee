"""Who of the roster can take part here and now, and why the others cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sidequest_langchain.models.catalogue import CATALOGUE
from sidequest_langchain.models.home import kept_gguf
from sidequest_langchain.models.progress import Report
from sidequest_langchain.models.reference import obtain

from .contestant import Source
from .roster import ROSTER, Entry

EXTRA = "pip install 'sidequest-langchain[bench]'"


def source_of(model: str, progress: Report | None = None) -> Source:
    """The model's files, fetched first if they are not here.

    Raises:
        ModelError: The model cannot be had.
    """
    files = obtain(model, progress=progress)
    return Source(name=model, folder=str(files.folder), gguf=gguf_of(model))


def gguf_of(model: str) -> str | None:
    """The `.gguf` file of a model, if it is here; nothing is fetched."""
    path = kept_gguf(model) if model in CATALOGUE else Path(model)
    return str(path.absolute()) if path.suffix == ".gguf" and path.is_file() else None


def python_of(name: str) -> str:
    """The interpreter a contestant runs in."""
    return os.environ.get(_variable(name), sys.executable)


def why_absent(name: str, source: Source) -> str | None:
    """Why a contestant cannot take part, and what to do about it; `None`: it can."""
    entry = ROSTER[name]
    missing = [module for module in entry.needs or {} if not _has(name, entry, module)]
    if missing:
        packages = " ".join((entry.needs or {})[module] for module in missing)
        if entry.has_own_python:
            return (
                "not installed; it wants other versions than this package does: install "
                f"{packages} in an environment of its own and set {_variable(name)} to its python"
            )
        return f"{packages} is not installed; run: {EXTRA}"
    if entry.is_of_gguf and source.gguf is None:
        return f"the .gguf file is not here; run: sidequest pull {source.name} --keep-gguf"
    return None


def chosen(names: Sequence[str] | None) -> list[str]:
    """The contestants asked for, in the order of the roster; by default all."""
    return [name for name in ROSTER if names is None or name in names]


def _has(name: str, entry: Entry, module: str) -> bool:
    if entry.has_own_python and python_of(name) != sys.executable:
        code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
        try:
            return subprocess.run([python_of(name), "-c", code], check=False).returncode == 0
        except OSError:
            return False
    return find_spec(module) is not None


def _variable(name: str) -> str:
    return f"SIDEQUEST_BENCH_{name.upper().replace('-', '_')}_PYTHON"
