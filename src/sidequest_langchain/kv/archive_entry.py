"""One copy in the archive: how it is named, what it holds, which model it belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv.beside import Copies


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one copy in one archive."""

    key: str
    """Random; the name of its file, if it has one."""
    n_bytes: int
    """Bytes of its tensors."""


@dataclass(slots=True, eq=False)
class Entry:
    """What the archive knows of a copy; it is in memory or on disk, never in both."""

    meta: dict[str, str]
    fingerprint: str
    n_owners: int = 1
    copies: Copies = field(default_factory=Copies)
    """In CPU memory."""
    n_file_bytes: int = 0
    checksum: str = ""
    """On disk."""

    def about(self, key: str) -> dict[str, str]:
        """Strings that its file holds."""
        return {"ticket": key, "fingerprint": self.fingerprint, "meta": json.dumps(self.meta)}

    def check(self, wanted: str) -> None:
        """Refuse rows that depend on something else than what is there now.

        Raises:
            ArchiveError: Its fingerprint is another one; the first field that differs is named.
        """
        if self.fingerprint == wanted:
            return
        old, new = json.loads(self.fingerprint), json.loads(wanted)
        name = next(name for name in {**old, **new} if old.get(name) != new.get(name))
        msg = (
            f"the copy was made with {name} {old.get(name)!r}, but it is {new.get(name)!r} now; "
            "nothing was restored"
        )
        raise ArchiveError(msg)


def as_text(fingerprint: Mapping[str, str]) -> str:
    """A fingerprint as it is kept and compared."""
    return json.dumps(dict(fingerprint), sort_keys=True)
