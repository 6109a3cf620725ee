"""What a model's files say of it, read without loading it: how much it holds, how it is asked.

It must not know torch, and fetches nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidequest_langchain.models.catalogue import CATALOGUE
from sidequest_langchain.models.home import model_folder

_MOVING_ROPE = ("dynamic", "longrope")
"""What these models hold is only known to who loads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What can be told without loading a model; `None` is not known."""

    context_length: int | None = None
    """Tokens it can hold."""
    chat_template: str | None = None
    """The text of its template, or of all of them."""


def glance(reference: str) -> Glance:
    """Look at the files of a catalogue name or a local directory, if they are on this machine."""
    try:
        folder = model_folder(reference) if reference in CATALOGUE else Path(reference).expanduser()
        if not (folder / "config.json").is_file():
            return Glance()
        return Glance(
            context_length=_context_length(_read(folder / "config.json")),
            chat_template=_template(folder),
        )
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home directory
        return Glance()


def _context_length(config: dict[str, Any]) -> int | None:
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in _MOVING_ROPE:
        return None
    most = text.get("max_position_embeddings")
    return most if isinstance(most, int) else None


def _template(folder: Path) -> str | None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.jinja"))]
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and not texts:
        given = _read(settings).get("chat_template")
        texts = [given] if isinstance(given, str) else [json.dumps(given)] if given else []
    return "\n".join(texts) or None


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
