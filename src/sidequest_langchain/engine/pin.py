"""What users hold to keep paths resident; it must not know who else holds them."""

from __future__ import annotations

import contextlib
from types import TracebackType

from sidequest_langchain.engine.core import EngineCore
from sidequest_langchain.errors import EngineClosedError
from sidequest_langchain.kv.segment import Segment


class Pin:
    """Keeps paths resident until `unpin`, or the end of a `with` block."""

    def __init__(self, core: EngineCore, segments: list[Segment]) -> None:
        self._core = core
        self._segments = segments

    def unpin(self) -> None:
        """Let go; paths that were released meanwhile are freed now. Idempotent."""
        segments, self._segments = self._segments, []

        def unpin() -> None:
            for segment in segments:
                self._core.tree.unpin(segment)

        with contextlib.suppress(EngineClosedError):  # then there is nothing left to free
            self._core.call(unpin).result()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unpin()
