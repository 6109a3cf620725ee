"""What the tree tells the outside: plain frozen facts, no tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sidequest_langchain.labels import StepLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """One resident segment."""

    segment_id: int
    parent_id: int | None
    """`None` for a segment that starts a path."""
    scope: str
    start: int
    """Position of its first token."""
    n_tokens: int
    n_bytes: int
    """Bytes of its storage, capacity included."""
    n_readers: int
    """Running generations that pin it, its descendants' included."""
    labels: tuple[StepLabel, ...]
    """The paths whose tip it is."""
    n_archived: int = 0
    """Tokens whose rows are in a slower tier only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """What is resident, and the counters since the engine started."""

    n_bytes: int
    n_tokens: int
    n_segments: int
    n_paths: int
    peak_bytes: int
    """Most bytes allocated at once since the start or the last `reset_peak()`: those resident, and
    the copies that are there for a moment while a segment grows or is cut, thinned or joined."""
    peak_resident_bytes: int
    """The most that `n_bytes` was, copies of a moment left out: a budget bounds this."""
    n_prompt_tokens: int
    n_reused_tokens: int
    n_prefilled_tokens: int
    n_generated_tokens: int
    n_released_bytes: int
    n_steps: int
    """Forward passes run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReceipt:
    """What one release did. Exact: the text is the truth, a later use recomputes it."""

    path: str
    """What was asked to be released."""
    reason: str
    freed_bytes: int
    freed_tokens: int
    segments: tuple[int, ...]
    """Ids of the segments freed."""
    n_paths: int
    """Paths that answered to `path`; 0 says that nothing was known by that name."""
    is_known: bool
    """Whether anything was known by that name; if not, nothing was done."""
    n_deferred: int
    """Paths still read by a running generation; they go when it ends."""
    exact: bool = True

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReceipt:
    """What saving one thread did. Exact: the rows are as they were, packed ones packed."""

    thread_id: str
    file: Path | None
    """Where it is; `None` if nothing of the thread was resident: then nothing was written, and an
    older file stays."""
    n_segments: int
    n_paths: int
    n_tokens: int
    """Tokens of the segments; those that paths share count once."""
    n_replies: int
    """Replies whose generated ids were saved, so that they are encoded the same again."""
    n_bytes: int
    """Bytes of the file."""
    n_held_bytes: int
    """The most that was kept only to be written: rows that the cache let go of meanwhile."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON-ready values."""
        return {**asdict(self), "file": None if self.file is None else str(self.file)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReceipt:
    """What loading one thread did. Exact: what is left out is computed when it is wanted."""

    thread_id: str
    file: Path
    n_segments: int
    """Segments whose rows came from the file."""
    n_paths: int
    n_tokens: int
    """Tokens whose rows came from the file."""
    n_shared_tokens: int
    """Tokens of the file that were resident already."""
    n_left_out_tokens: int
    """Tokens of the file for which the budget had no room, or whose archived copies no tier of
    this process could take."""
    n_replies: int
    n_bytes: int
    """By which the cache grew."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON-ready values."""
        return {**asdict(self), "file": str(self.file)}
