"""Copies of rows into CPU memory that run beside the computation, where the device allows it.

On CUDA a copy runs in a stream of its own into page-locked memory; the next step does not wait for
it, and who wants to read the copy does. Elsewhere a copy is there when the call returns. Exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], object]


class Side(Protocol):
    """Copies of one accelerator."""

    def begin(self) -> None:
        """What is computed so far is there before what is copied from now on."""

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in CPU memory, which is not to be read before the end is waited for.

        The source may be freed at once: its memory is used again after the copy.
        """

    def end(self) -> Wait:
        """Waits until all copies from `begin` on are there."""


class CudaSide:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """See `Side`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, tensor: Tensor) -> Tensor:
        """See `Side`. Page-locked memory is taken in powers of two by PyTorch's allocator."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            target.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return target

    def end(self) -> Wait:
        """See `Side`."""
        wait: Wait = self._stream.record_event().synchronize
        return wait


@functools.cache
def side_of(device: torch.device) -> Side | None:
    """The device's way to copy beside the computation; `None` where there is none."""
    return CudaSide(device) if device.type == "cuda" else None


@dataclass(slots=True, eq=False)
class Copies:
    """Contiguous copies on the CPU, perhaps still on their way."""

    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _waits: list[Wait] = field(default_factory=list)
    n_bytes: int = 0

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Copies:
        """Begin to copy. The tensors are not changed and may be freed afterwards.

        Raises:
            RuntimeError: There is no memory for it.
        """
        found: dict[str, Tensor] = {}
        sides: dict[torch.device, Side] = {}
        try:
            for name, tensor in tensors.items():
                side = side_of(tensor.device)
                if side is None:
                    # In storages of exactly their size.
                    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
                    found[name] = plain.copy_(tensor.detach())
                    continue
                if tensor.device not in sides:
                    side.begin()
                    sides[tensor.device] = side
                found[name] = side.copy(tensor.detach())
        finally:
            waits = [side.end() for side in sides.values()]
            if len(found) < len(tensors):  # nobody will wait for what was begun
                for wait in waits:
                    wait()
        return cls(found, waits, sum(t.nbytes for t in found.values()))

    def tensors(self) -> dict[str, Tensor]:
        """The copies; waits until they are there."""
        for wait in self._waits:
            wait()
        self._waits = []
        return dict(self._tensors)
