"""Puts what a command measured into a page of the docs, between two marks."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, name: str, lines: list[str]) -> None:
    """Replace what stands between `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises:
        ValueError: The page has no such marks.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        msg = f"{page} has no marks {begin} and {end}; put them where the figures are to stand"
        raise ValueError(msg)
    body = "\n".join(lines)
    page.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}", encoding="utf-8")
