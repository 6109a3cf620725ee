"""How a tokenizer spells text in bytes: what a token adds, and whether it leaves a character open.

It must not know templates, messages or generation.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_MOST_OPEN_TOKENS = 3
"""An incomplete UTF-8 sequence has at most three bytes, so at most three tokens."""


class Spelling(Enum):
    """The three ways in which tokens carry bytes."""

    BYTES = "bytes"
    """Byte-level: each letter of a token stands for one byte (GPT-2, Llama 3, Qwen)."""
    FALLBACK = "fallback"
    """Characters, and `<0xE4>` for bytes: a run of byte tokens is decoded as a whole."""
    TEXT = "text"
    """Whole characters, as far as can be told."""


def spelling_of(backend: Any) -> Spelling:
    """The spelling of a fast tokenizer's backend, told by its decoder; `TEXT` without one."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return Spelling.TEXT
    kinds = set(_kinds(json.loads(decoder.__getstate__())))
    if "ByteLevel" in kinds:
        return Spelling.BYTES
    return Spelling.FALLBACK if "ByteFallback" in kinds else Spelling.TEXT


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def token_bytes(token: str, spelling: Spelling) -> bytes:
    """The bytes that `token`, as the vocabulary writes it, adds to a text."""
    if spelling is Spelling.BYTES:
        letters = _byte_letters()
        if all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
        return token.encode()
    if is_byte_token(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def is_byte_token(token: str) -> bool:
    """Whether `token` stands for one byte, as `<0xE4>` does."""
    return _BYTE_TOKEN.match(token) is not None


def leaves_open(tokens: Sequence[str], spelling: Spelling, decode: Callable[[], str]) -> bool:
    """Whether a next token could change the text of `tokens`, which begin at a character.

    A real U+FFFD is not open: what counts are the bytes, never the decoded text, as long as
    the spelling shows them.
    """
    if spelling is Spelling.FALLBACK:
        return is_byte_token(tokens[-1])
    if spelling is Spelling.TEXT:
        return len(tokens) <= _MOST_OPEN_TOKENS and decode().endswith(REPLACEMENT)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(token_bytes(token, spelling) for token in tokens))
    return decoder.getstate()[0] != b""


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest is moved up to 256 + i."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}
