"""Which thought each resident segment of the KV cache belongs to; it must not know tensors.

A segment belongs to the thought that all branches through it descend from: the trunk to the
root, a turn that two children share to their parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidequest_langchain.kv.receipts import SegmentInfo

from .thought import ROOT, Thought, thought_id


def resident_bytes(segments: Sequence[SegmentInfo], nodes: Mapping[str, Thought]) -> dict[str, int]:
    """Bytes resident of each thought; they add up to those of all segments.

    Args:
        segments: What `KVSegments.segments` gives: parents first.
        nodes: The tree of thoughts.
    """
    through: dict[int, list[tuple[str, ...]]] = {}
    for segment in reversed(segments):
        routes = through.setdefault(segment.segment_id, [])
        routes += [nodes[b].route for label in segment.labels if (b := label.branch or "") in nodes]
        if segment.parent_id is not None:
            through.setdefault(segment.parent_id, []).extend(routes)
    found: dict[str, int] = {}
    for segment in segments:
        routes = through[segment.segment_id]
        owner = thought_id(_common_head(routes)) if routes else ROOT
        found[owner] = found.get(owner, 0) + segment.n_bytes
    return found


def _common_head(routes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    head = routes[0]
    for route in routes[1:]:
        while route[: len(head)] != head:
            head = head[:-1]
    return head
