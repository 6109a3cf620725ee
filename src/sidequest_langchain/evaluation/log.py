"""Results as lines of JSON in a file: a run that was cut goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sidequest_langchain.errors import ConfigError

Row = dict[str, Any]


class ResultLog:
    """Rows by their key; each is on disk before the next one is measured."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Open a log, and read what an earlier run left in it.

        Args:
            path: `None` keeps rows in memory only.
            settings: What all rows have in common; the first line of the file.

        Raises:
            ConfigError: The file is of a run with other settings, or no such log.
            OSError: It cannot be read or written.
        """
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is None:
            return
        found = _lines(path) if path.exists() else []
        if found and found[0] != dict(settings):
            msg = (
                f"{path} holds results of other settings ({found[0]}); give another --out, or "
                f"these settings again: {dict(settings)}"
            )
            raise ConfigError(msg)
        self._rows = {row["key"]: row for row in found[1:]}
        # What a cut left of its last line goes; the rest is as it was.
        kept = [dict(settings), *self._rows.values()]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def get(self, key: str) -> Row | None:
        """The row of a key, if it was measured."""
        return self._rows.get(key)

    def add(self, key: str, row: Row) -> None:
        """Keep a row, on disk first."""
        row = {"key": key, **row}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._rows[key] = row

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))


def _lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for n, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and ("key" in row) == (n > 0):
            rows.append(row)
        elif n < len(lines) - 1 or n == 0:
            msg = f"{path} is no log of `sidequest eval` (line {n + 1}); give another --out"
            raise ConfigError(msg)
    return rows
