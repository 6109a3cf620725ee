"""Makes a model directory from a `.gguf` file of the user's, once per content.

It must not know the catalogue, nor how a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path

from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models.conversion import Convert, convert_gguf
from sidequest_langchain.models.failures import file_errors, in_units
from sidequest_langchain.models.home import home, model_folder, sole_maker, staging
from sidequest_langchain.models.making import is_made, make_model
from sidequest_langchain.models.manifest import Origin, file_sha256
from sidequest_langchain.models.progress import Report, Stage, silent
from sidequest_langchain.models.versions import check_transformers

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def from_gguf(file: Path, *, progress: Report = silent, convert: Convert = convert_gguf) -> Path:
    """The model directory of a `.gguf` file, converted at the first call.

    Args:
        file: The file; it is read, never changed.
        progress: Hears the progress.
        convert: Converts a `.gguf` file.

    Returns:
        The directory.

    Raises:
        ModelError: The file is absent, damaged, one shard of several, or cannot be converted.
    """
    check_transformers()
    if _SHARD.search(file.stem):
        msg = f"{file.name} is one shard of several; join them first (llama-gguf-split --merge)"
        raise ModelFilesError(msg)
    with file_errors(f"read {file.name}", file):
        sha256 = _sha256_of(file.resolve(strict=True), progress)
    key = f"{re.sub(r'[^A-Za-z0-9._-]', '_', file.stem)}-{sha256[:12]}"
    place = model_folder(key)
    if _is_whole(place, sha256):
        return place
    with sole_maker(key, progress):
        if not _is_whole(place, sha256):
            size = in_units(file.stat().st_size)
            progress(Stage(text=f"converting {file.name} ({size}), once; about 2 min per GB"))
            origin = Origin(name=file.stem, sha256=sha256, source=str(file.absolute()))
            with staging(key) as scratch:
                make_model(file.absolute(), place, scratch, origin, convert, progress)
    return place


def _is_whole(place: Path, sha256: str) -> bool:
    try:
        return is_made(place, sha256)
    except ModelFilesError as error:
        logger.warning("making it anew: %s", error)
        return False


def _sha256_of(file: Path, progress: Report) -> str:
    """The sha256 of a file, remembered as long as its size and time of change stay."""
    facts = file.stat()
    stamp = {"path": str(file), "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
    path_id = hashlib.sha256(str(file).encode()).hexdigest()[:16]
    note = home() / "gguf-seen" / f"{path_id}.json"
    try:
        seen = json.loads(note.read_text(encoding="utf-8"))
        if seen.pop("sha256_of") == stamp:
            return str(seen["sha256"])
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # not seen before
    text = f"reading {file.name}"
    digest = file_sha256(
        file, lambda n: progress(Stage(text=text, done_bytes=n, total_bytes=facts.st_size))
    )
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"sha256_of": stamp, "sha256": digest}), encoding="utf-8")
    except OSError as error:  # a hint only: the next call hashes again
        logger.debug("could not remember the sha256 of %s: %s", file, error)
    return digest
