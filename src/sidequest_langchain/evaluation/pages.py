"""Puts what a command measured into a page of the docs, between two marks."""

from __future__ import annotations

from pathlib import Path

from sidequest_langchain.errors import ConfigError


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind the figures of this name."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises:
        ConfigError: The page has no such marks.
        OSError: It cannot be read or written.
    """
    content = page.read_text(encoding="utf-8")
    first, last = marks(name)
    before, begin, rest = content.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        msg = f"{page} has no place for figures; put {first} and {last} where they shall stand"
        raise ConfigError(msg)
    page.write_text(f"{before}{first}\n\n{text.rstrip()}\n\n{last}{after}", encoding="utf-8")
