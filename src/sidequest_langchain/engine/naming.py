"""How users name paths, and what they are told of segments."""

from __future__ import annotations

from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kv.receipts import SegmentInfo
from sidequest_langchain.kv.segment import Segment
from sidequest_langchain.labels import PathSelector


def named(path: object, thread_id: str | None) -> PathSelector:
    """What a user means by the name of a path.

    Raises:
        ConfigError: It is no string.
    """
    if not isinstance(path, str):
        msg = (
            f"a path is named by a string (a branch, a task, a namespace or a message's id), found "
            f"{type(path).__name__}; for a message, give message.id"
        )
        raise ConfigError(msg)
    return PathSelector(path_id=path, thread_id=thread_id)


def info_of(segment: Segment) -> SegmentInfo:
    """What is told of a segment."""
    parent = segment.parent
    stack, n_readers = [segment], 0
    while stack:
        at = stack.pop()
        n_readers += at.n_pins + sum(1 for p in at.paths if p.is_running)
        stack.extend(at.children)
    return SegmentInfo(
        segment_id=segment.segment_id,
        parent_id=parent.segment_id if parent is not None and parent.parent is not None else None,
        scope=segment.scope,
        start=segment.start,
        n_tokens=segment.n_tokens,
        n_bytes=segment.n_bytes,
        n_readers=n_readers,
        labels=tuple(p.label for p in sorted(segment.paths, key=lambda p: p.serial)),
        n_archived=0 if segment.residency is None else segment.residency.n_archived,
    )
