"""Whether the installed transformers is one that this package was made for.

Reads the installed packages' metadata only: transformers itself is not imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from sidequest_langchain.errors import ModelError

SUPPORTED_TRANSFORMERS = SpecifierSet(">=5.24,<5.25")
"""Releases whose attention interface and GGUF loader are the ones used here."""


def check_transformers() -> None:
    """Refuse a transformers release that this package was not made for.

    Raises:
        ModelError: transformers is absent, too old or too new.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        msg = f"transformers is not installed; run: pip install 'transformers{_wanted()}'"
        raise ModelError(msg) from None
    if not SUPPORTED_TRANSFORMERS.contains(installed, prereleases=True):
        msg = (
            f"transformers {installed} is installed, but sidequest-langchain works with "
            f"transformers {_wanted()}; run: pip install 'transformers{_wanted()}'"
        )
        raise ModelError(msg)


def _wanted() -> str:
    """The supported range, lower bound first."""
    return ",".join(sorted((str(part) for part in SUPPORTED_TRANSFORMERS), reverse=True))
