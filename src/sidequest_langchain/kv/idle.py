"""Leaves that nothing runs on, least recently used first; it must not know why one is let go."""

from __future__ import annotations

import heapq

from sidequest_langchain.kv.segment import Segment


class IdleLeaves:
    """A queue that finds the oldest idle leaf of `n` in `O(log n)`.

    It is told of every segment that becomes an idle leaf, not of those that cease to be one or
    are used again: that is looked at when they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(last use as noted, segment id); some of segments that are gone."""
        self._noted: dict[int, Segment] = {}

    def __contains__(self, segment: Segment) -> bool:
        return segment.segment_id in self._noted

    def note(self, segment: Segment) -> None:
        """Take in a segment if it is an idle leaf; changes nothing else."""
        if segment.is_idle_leaf and segment.segment_id not in self._noted:
            self._push(segment)

    def forget(self, segment: Segment) -> None:
        """Drop a segment that is freed, so that its object does not stay."""
        self._noted.pop(segment.segment_id, None)
        if len(self._heap) > 2 * len(self._noted) + 64:
            self._heap = [item for item in self._heap if item[1] in self._noted]
            heapq.heapify(self._heap)

    def pop(self) -> Segment | None:
        """Take out the least recently used idle leaf, if there is one."""
        while self._heap:
            last_used, segment_id = heapq.heappop(self._heap)
            segment = self._noted.pop(segment_id, None)
            if segment is None or not segment.is_idle_leaf:
                continue  # it comes back when it is an idle leaf again
            if segment.last_used == last_used:
                return segment
            self._push(segment)
        return None

    def _push(self, segment: Segment) -> None:
        self._noted[segment.segment_id] = segment
        heapq.heappush(self._heap, (segment.last_used, segment.segment_id))
