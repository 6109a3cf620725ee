"""What a converted model directory should hold: written when it is made, read at every load.

It must not know where models come from, or how they are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_NAME = "sidequest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file, as it was when the model was made."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The bytes that a model directory is made from."""

    name: str
    """What the user calls the model."""
    sha256: str
    """Of the `.gguf` file."""
    source: str
    """Packages, or the file, that the bytes came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Origin):
    """A converted model: what it was made from, by what, and its files."""

    converter: str
    """The version of transformers that converted it."""
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Size of the whole directory."""
        return sum(record.size for record in self.files.values())


def make_manifest(folder: Path, origin: Origin, *, converter: str) -> Manifest:
    """Record the files of a folder as they are now, and write the manifest into it."""
    files = {
        path.relative_to(folder).as_posix(): FileRecord(
            size=path.stat().st_size, sha256=file_sha256(path)
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    made = Manifest(**asdict(origin), converter=converter, files=files)
    text = json.dumps({"format": _FORMAT, **asdict(made)}, indent=2)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    return made


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; `None` if it has none that can be read."""
    try:
        found = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if found.pop("format") != _FORMAT:
            return None
        files = {name: FileRecord(**record) for name, record in found.pop("files").items()}
        return Manifest(**found, files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with a folder at a glance: names and sizes. `None` if nothing is."""
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes where {record.size} were written"
    return None


def deep_damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with a folder when every byte is read. `None` if nothing is."""
    found = damage(folder, manifest)
    if found is not None:
        return found
    for name, record in manifest.files.items():
        if file_sha256(folder / name) != record.sha256:
            return f"the bytes of {name} are not the ones that were written (sha256 differs)"
    return None


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file; `on_bytes` hears how many bytes were read so far."""
    digest, n_read = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            n_read += len(block)
            if on_bytes is not None:
                on_bytes(n_read)
    return digest.hexdigest()
