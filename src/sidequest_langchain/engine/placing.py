"""Where tokens end in a text that they spell.

It must not know how a text is encoded, templates or messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_SLACK = 16
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""


def ends_by_offsets(
    backend: Any, text: str, ids: Sequence[int], prefixes: Iterable[str]
) -> list[int] | None:
    """As `ends_by_bytes`, by the offsets that a Rust backend tells.

    Args:
        backend: It, if there is one.
        text: The text that was encoded.
        ids: What it was encoded to.
        prefixes: Texts of which one may have been put in front; its ids were dropped.

    Returns:
        `None` if the backend encodes the text otherwise.
    """
    for prefix in prefixes if backend is not None else ():
        found = backend.encode(prefix + text, add_special_tokens=False)
        n_more = len(found.ids) - len(ids)
        if n_more >= 0 and list(found.ids[n_more:]) == list(ids) and (n_more == 0 or prefix):
            return [max(0, end - len(prefix)) for _, end in found.offsets[n_more:]]
    return None


def ends_by_bytes(text: str, spelled: Iterable[bytes]) -> list[int]:
    """Where each token ends in `text`, in characters; a character begun counts as reached.

    A token that is not the text's next part (a space put in front, a character that a normaliser
    changed) is looked for a little further on; one that is not found adds nothing.

    Args:
        text: Half of a surrogate pair in it is taken for one character.
        spelled: The bytes of each token.
    """
    raw = text.encode("utf-8", "surrogatepass")
    at, n_missed, n_chars = 0, 0, 0
    ends = []
    for piece in spelled:
        last = at
        if raw.startswith(piece, at):
            at += len(piece)
            n_missed = 0
        else:
            core = piece.strip()
            found = raw.find(core, at, at + len(piece) + n_missed + _SLACK) if core else -1
            at = found + len(core) if found >= 0 else at
            n_missed = 0 if found >= 0 else n_missed + len(piece)
        n_chars += len(raw[last:at].translate(None, _CONTINUATION))
        ends.append(n_chars)
    return ends
