"""Activations as sums of integer slices, and which slices a processor's int8 product can take.

It must not know weights nor layers.

The split of an operand into integer slices: Ootomo et al., arXiv:2306.11975, §3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ZERO = 64
"""What stands for 0 in a slice: the kernel takes unsigned bytes."""

N_SLICES = 3

_LEAST = np.float32(1e-30)
"""What a row of zeros is divided by."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Slicing:
    """Three slices, each `base` times as fine as the one before."""

    base: int
    steps: int
    """A row's largest value, in steps of the finest slice."""

    @property
    def middle(self) -> int:
        """What stands for 0 in all slices together."""
        return ZERO * (self.base**2 + self.base + 1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Activations as stacked integer matrices. Lossy: rounds to 1 / `steps` of a row's peak.

        Args:
            x: fp32 `[T, K]`.

        Returns:
            Bytes `[3 T, K]`, the finest slice first, each with `ZERO` added; and what a step of
            each row is worth, fp32 `[T, 1]`.
        """
        peak = x.abs().amax(-1, keepdim=True).clamp_min_(float(_LEAST))
        worth = peak * (1 / self.steps)
        if self == WIDE:
            # At 1.5 * 2^23 a step of fp32 is 1: the sum's bytes are the slices.
            steps = (x.contiguous() * (peak.reciprocal() * self.steps)).add_(_MAGIC)
            parts = steps.view(torch.uint8).view(*x.shape, 4)[..., :N_SLICES].permute(2, 0, 1)
            codes = torch.empty(parts.shape, dtype=torch.uint8)
            return codes.copy_(parts).view(-1, x.shape[1]), worth
        # Truncated: the half makes it round.
        whole = (x * (peak.reciprocal() * self.steps)).add_(self.middle + 0.5).to(torch.int32)
        slices = [(whole >> shift).to(torch.uint8) for shift in (0, 7, 14)]
        # Joined as bytes: fresh memory for long prompts costs more than the arithmetic.
        return torch.cat(slices).bitwise_and_(self.base - 1), worth

    def join(self, slices: Tensor) -> Tensor:
        """What stacked slices without their `ZERO`, `[3 T, N]`, stand for.

        Returns:
            `[T, N]`, in steps.
        """
        fine, middle, coarse = slices.chunk(N_SLICES)
        return torch.add(torch.add(fine, middle, alpha=self.base), coarse, alpha=self.base**2)


WIDE = Slicing(256, 2**22 - 1 - ZERO * 257)
"""Two whole bytes and seven bits above them: 23 bits, as many as fp32 has."""

NARROW = Slicing(128, (ZERO - 1) * 128**2)
"""Seven bits each. The sum of two products stays below 2^15, so that processors without VNNI,
which add pairs in 16 bits, do not saturate."""


_MAGIC = float(3 * 2**22 + WIDE.middle - ZERO * WIDE.base**2)

FEW = 16
"""Rows up to which a call costs more than the arithmetic. NumPy's cost half of PyTorch's."""


def of_few(x: Tensor, multiply: Callable[[Tensor], Tensor], bias: Floats | None) -> Tensor:
    """A product of a few rows by `WIDE` slices: the same numbers, bit for bit, in fewer calls.

    Args:
        x: fp32 `[T, K]`.
        multiply: Sums of codes `[3 T, K]`, fp32 `[3 T, N]`, in steps.
        bias: `[N]`.

    Returns:
        fp32 `[T, N]`.
    """
    rows: Floats = x.detach().contiguous().numpy()
    peak = np.abs(rows).max(-1, keepdims=True)
    np.maximum(peak, _LEAST, out=peak)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so, silently
        return _of_few(rows, peak, multiply, bias)


def _of_few(
    rows: Floats, peak: Floats, multiply: Callable[[Tensor], Tensor], bias: Floats | None
) -> Tensor:
    steps = rows * (np.reciprocal(peak) * np.float32(WIDE.steps))
    steps += np.float32(_MAGIC)
    parts = steps.view(np.uint8).reshape(*rows.shape, 4)[..., :N_SLICES].transpose(2, 0, 1)
    codes = np.ascontiguousarray(parts).reshape(-1, rows.shape[1])
    found: Floats = multiply(torch.from_numpy(codes)).numpy()
    fine, middle, total = found.reshape(N_SLICES, len(rows), -1)
    middle *= np.float32(WIDE.base)
    middle += fine
    total *= np.float32(WIDE.base**2)
    total += middle
    total *= peak * np.float32(1 / WIDE.steps)
    if bias is not None:
        total += bias
    return torch.from_numpy(total)


@functools.cache
def slicing_here() -> Slicing:
    """The finest slices that this processor adds up without saturating; tried once.

    Raises:
        RuntimeError: This build of torch lacks the kernel.
    """
    codes = torch.full((1, 256), 255, dtype=torch.uint8)
    weights = torch.full((32, 256), 127, dtype=torch.int8)
    got = product(codes, prepacked(weights), torch.ones(32), torch.zeros(32, dtype=torch.int32))
    return WIDE if bool((got == (255 - ZERO) * 127 * 256).all()) else NARROW


def prepacked(codes: Tensor) -> Tensor:
    """int8 weights `[N, K]` as the kernel wants them."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes, [N_SLICES, codes.shape[1]])
    return packed


def product(codes: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Sums over the channels, of slices less their `ZERO`; whole numbers times `scales`, fp32.

    Args:
        codes: Bytes, `[S, K]`.
        packed: Of `prepacked`, for `[N, K]`.
        scales: fp32 `[N]`.
        zeros: int32 `[N]`, all 0.
    """
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO, packed, scales, zeros,
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return out
