"""Linear layers with int8 weights on a CPU: what is computed, and with which kernel.

Weights are int8 per output channel. Activations are not cut down to int8, which loses models with
outlier channels: each token's vector is the sum of three integer vectors (`models/slicing`), about
as good as fp32 next to the vector's largest value. All go through one integer product, whose sums
over the channels are exact: a token's output does not depend on its batch-mates or on chunks, and
on the processor by less than fp32's does. It must not know models.

With two vectors a value at the edge of two steps, which the order of additions in attention pushes
over it, moves the logits by 0.03; with three, by less than fp32 itself moves them.

Paper: LLM.int8(), arXiv:2208.07339, §3 (vector-wise scales; why outliers matter).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from sidequest_langchain.models.slicing import (
    FEW,
    N_SLICES,
    WIDE,
    Slicing,
    of_few,
    prepacked,
    product,
    slicing_here,
)

BLOCK_BYTES = 2**23
"""Of products at a time: larger fresh memory comes from the system page by page, every time."""

FEWEST_LEFT_OUT = 8
"""Tokens that must be left out of a product for it to be worth looking for them."""

_WANTED: ContextVar[Tensor | None] = ContextVar("sidequest_wanted", default=None)
"""Indices of the tokens whose output is needed, `[W]`; `None` is all."""


@contextmanager
def only_wanted(n_tokens: int, wanted: Sequence[int]) -> Iterator[None]:
    """Let layers after the last attention compute the wanted tokens only, in this thread.

    Exact for these; the others' output is 0. A prefill wants one token of hundreds, and what the
    last layer makes of the others nobody reads.

    Args:
        n_tokens: Tokens of the pass.
        wanted: Indices of those that logits are wanted of.
    """
    is_worth_it = n_tokens - len(wanted) >= FEWEST_LEFT_OUT
    token = _WANTED.set(torch.tensor(wanted, dtype=torch.long) if is_worth_it else None)
    try:
        yield
    finally:
        _WANTED.reset(token)


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as int8, one scale an output channel. Lossy: rounds to 255 levels.

    Args:
        weight: `[N, K]`, a float dtype.

    Returns:
        int8 `[N, K]` within -127..127, and fp32 scales `[N]`; their product is near `weight`.
    """
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return (weight / scales.unsqueeze(1)).round_().to(torch.int8), scales


class Int8Product:
    """`x @ W.T + b` for the stacked weights of one or several layers.

    Raises:
        RuntimeError: This build of torch lacks the kernel.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        slicing: Slicing | None = None,
    ) -> None:
        self.slicing = slicing_here() if slicing is None else slicing
        self.sizes = [weight.shape[0] for weight in weights]
        self.in_features = weights[0].shape[1]
        quantised = [quantise_rows(weight) for weight in weights]
        codes = torch.cat([codes for codes, _ in quantised])
        self._scales = torch.cat([scales for _, scales in quantised])
        self._packed = prepacked(codes)
        self._zeros = torch.zeros(len(codes), dtype=torch.int32)
        self._n_rows = max(32, BLOCK_BYTES // (N_SLICES * 4 * max(codes.shape)))
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            parts = [
                torch.zeros(n) if bias is None else bias.detach().float()
                for n, bias in zip(self.sizes, biases, strict=True)
            ]
            self._bias = torch.cat(parts)
        self._few_bias = None if self._bias is None else self._bias.numpy()
        self.n_bytes = codes.nbytes + self._scales.nbytes + self._zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs of all layers side by side, fp32 `[T, N]`, for `x` `[T, K]`."""
        if not len(x):
            return x.new_empty(0, sum(self.sizes))
        if len(x) <= self._n_rows:
            return self._block(x)
        out = x.new_empty(len(x), sum(self.sizes))
        for part, into in zip(
            torch.split(x, self._n_rows), torch.split(out, self._n_rows), strict=True
        ):
            self._block(part, into)
        return out

    def tell(self, codes: Tensor) -> list[Tensor]:
        """What tells these weights from others, the same on every processor.

        Args:
            codes: Bytes of at most 127, `[S, K]`: no processor saturates.

        Returns:
            Their whole-numbered sums, the scales, and the bias if there is one.
        """
        sums = product(codes, self._packed, torch.ones_like(self._scales), self._zeros)
        return [sums, self._scales, *([] if self._bias is None else [self._bias])]

    def _block(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) <= FEW and out is None and self.slicing == WIDE:
            return of_few(x, self._multiply, self._few_bias)
        codes, worth = self.slicing.split(x)
        found = torch.mul(self.slicing.join(self._multiply(codes)), worth, out=out)
        return found if self._bias is None else found.add_(self._bias)

    def _multiply(self, codes: Tensor) -> Tensor:
        return product(codes, self._packed, self._scales, self._zeros)


class Int8Group:
    """Layers that read the same input (queries, keys and values): one product for all of them."""

    def __init__(self, product: Int8Product, *, is_after_attention: bool = False) -> None:
        """Make a group.

        Args:
            product: The layers' weights.
            is_after_attention: No attention reads what comes of their output: see `only_wanted`.
        """
        self.product = product
        self._is_after_attention = is_after_attention
        self._last: tuple[Tensor, list[Tensor | None]] | None = None

    def output(self, index: int, x: Tensor) -> Tensor:
        """Output of one layer, `[..., N]`; the others' are kept until they ask with the same `x`.

        The same tensor object, that is: who changes `x` in place between two layers of a group
        gets the first's view of it. transformers' models do not.
        """
        if x.numel() == 0:  # no token wants logits in this step
            return x.new_empty(*x.shape[:-1], self.product.sizes[index])
        last = self._last  # one read: another thread may run the same model
        if last is None or last[0] is not x or last[1][index] is None:
            rows = x.reshape(-1, x.shape[-1])
            wanted = _WANTED.get() if self._is_after_attention else None
            if wanted is None:
                out = self.product(rows).view(*x.shape[:-1], -1)
            else:
                out = x.new_zeros(*x.shape[:-1], sum(self.product.sizes))
                if len(wanted):
                    out.view(len(rows), -1)[wanted] = self.product(rows[wanted])
            last = (x, list(torch.split(out, self.product.sizes, dim=-1)))
            self._last = last
        parts = last[1]
        found, parts[index] = parts[index], None
        assert found is not None
        if not any(part is not None for part in parts):
            self._last = None
        return found


class Int8Linear(nn.Module):
    """Stands in for an `nn.Linear` whose weights an `Int8Group` holds. For inference only."""

    def __init__(self, group: Int8Group, index: int) -> None:
        super().__init__()
        self.in_features = group.product.in_features
        self.out_features = group.product.sizes[index]
        self._group, self._index = group, index

    def forward(self, x: Tensor) -> Tensor:
        """`x @ W.T + b`, fp32 `[..., N]` for fp32 `[..., K]`."""
        return self._group.output(self._index, x)

    def extra_repr(self) -> str:
        """What `repr` says in the brackets."""
        return f"in_features={self.in_features}, out_features={self.out_features}, weights=int8"
