"""Makes one model directory from one `.gguf` file that is here, and lets it appear at once.

It must not know where the file came from.
"""

from __future__ import annotations

import logging
import time
from importlib.metadata import version
from pathlib import Path

from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models.conversion import Convert
from sidequest_langchain.models.failures import file_errors, in_units
from sidequest_langchain.models.home import publish
from sidequest_langchain.models.manifest import Origin, damage, make_manifest, read_manifest
from sidequest_langchain.models.progress import Report, Stage

logger = logging.getLogger(__name__)


def make_model(
    blob: Path, place: Path, scratch: Path, origin: Origin, convert: Convert, progress: Report
) -> None:
    """Convert `blob` in `scratch` and move the result to `place`, whole or not at all.

    Args:
        blob: The `.gguf` file, already checked.
        place: Where the directory shall appear; what stands there is replaced.
        scratch: A folder of the same file system.
        origin: What the manifest says about the bytes.
        convert: Does the conversion.
        progress: Hears the progress.

    Raises:
        ModelError: The conversion or the disk failed; `place` is as it was.
    """
    made, began_s = scratch / "model", time.monotonic()
    with file_errors(f"write {origin.name}", made):
        made.mkdir()
        convert(blob, made, lambda doing: progress(Stage(text=f"  {doing}")))
        progress(Stage(text="  checking what was written"))
        manifest = make_manifest(made, origin, converter=f"transformers {version('transformers')}")
    if not {"config.json", "tokenizer.json"} <= manifest.files.keys():
        msg = f"could not convert {blob.name}: found only {', '.join(manifest.files) or 'nothing'}"
        raise ModelFilesError(msg)
    publish(made, place)
    logger.info(
        "converted %s in %.0f s: %s at %s",
        origin.name,
        time.monotonic() - began_s,
        in_units(manifest.total_bytes),
        place,
    )


def is_made(place: Path, sha256: str) -> bool:
    """Whether a model directory made from these bytes is there.

    Raises:
        ModelFilesError: One is there, but damaged.
    """
    if not place.exists():
        return False
    manifest = read_manifest(place)
    if manifest is not None and manifest.sha256 != sha256:
        return False  # made by a release that pinned other bytes
    found = "its manifest is missing" if manifest is None else damage(place, manifest)
    if found is not None:
        msg = f"the files of {place.name} at {place} are damaged: {found}"
        raise ModelFilesError(msg)
    return True
