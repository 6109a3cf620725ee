"""The resident tree as text, for terminals and notebooks. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sidequest_langchain.kv.receipts import SegmentInfo
from sidequest_langchain.labels import StepLabel


def draw(segments: Sequence[SegmentInfo]) -> str:
    """Draw segments as a tree: tokens and bytes of each, and the paths that end in it.

    Args:
        segments: What `KVSegments.segments` gives: parents first.
    """
    known = {segment.segment_id for segment in segments}
    children: dict[int | None, list[SegmentInfo]] = {}
    for segment in segments:
        parent = segment.parent_id if segment.parent_id in known else None
        children.setdefault(parent, []).append(segment)
    total = sum(segment.n_bytes for segment in segments)
    n_tokens = sum(segment.n_tokens for segment in segments)
    lines = [f"{n_tokens:,} tokens, {readable_bytes(total)} resident"]
    _add(lines, children, None, "")
    return "\n".join(lines)


def _add(
    lines: list[str],
    children: dict[int | None, list[SegmentInfo]],
    parent: int | None,
    indent: str,
) -> None:
    here = sorted(children.get(parent, ()), key=lambda segment: segment.segment_id)
    for i, segment in enumerate(here):
        is_last = i == len(here) - 1
        lines.append(f"{indent}{'└─' if is_last else '├─'} {_line(segment)}")
        _add(lines, children, segment.segment_id, indent + ("   " if is_last else "│  "))


def _line(segment: SegmentInfo) -> str:
    size = f"#{segment.segment_id}  {segment.n_tokens} tokens  {readable_bytes(segment.n_bytes)}"
    names = list(dict.fromkeys(_name(label) for label in segment.labels))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{size}  {shown}".rstrip()


def _name(label: StepLabel) -> str:
    if label.branch is not None:
        return f"{label.node}:{label.branch}" if label.node else label.branch
    return label.node or label.call_id[:11]


def readable_bytes(n_bytes: float) -> str:
    """Bytes with a unit that keeps the number short."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
