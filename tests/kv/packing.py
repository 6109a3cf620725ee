"""What tests of packed rows share: layouts, rows of a large range, and how a load is compared."""

from __future__ import annotations

import torch

from sidequest_langchain.kv.layout import LayerShape

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


def rows_of(layout, n_rows, *, seed=0, scale=10.0):
    """K and V of every layer, normal numbers of a large range."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for dim in ("key_dim", "value_dim"):
        made.append(
            [
                torch.randn(s.n_kv_heads, n_rows, getattr(s, dim), generator=generator)
                .mul(scale)
                .to(s.dtype)
                for s in layout
            ]
        )
    return made


def alike(n_layers=3, *, heads=2, dim=16, dtype=torch.float32):
    shape = LayerShape(n_kv_heads=heads, key_dim=dim, value_dim=dim, dtype=dtype, device=CPU)
    return (shape,) * n_layers


def shape_of(heads, key_dim, value_dim, dtype=torch.float32):
    return LayerShape(
        n_kv_heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype, device=CPU
    )


LAYOUTS = {
    "alike": alike(),
    "value of another length": (shape_of(2, 12, 7),) * 2,
    "an odd one out": (shape_of(2, 8, 8), shape_of(1, 16, 16), shape_of(2, 8, 8)),
    "two dtypes": (shape_of(2, 8, 8), shape_of(2, 8, 8, torch.bfloat16)),
    "one channel": (shape_of(1, 1, 1), shape_of(1, 1, 2)),
}


def assert_same(block, layer, rows, expected):
    """Rows of a block, whichever way they are loaded, are these rows of the expected tensors."""
    for found, whole in zip(block.load(layer), expected, strict=True):
        assert torch.equal(found, whole[:, rows])
        assert found.dtype == whole.dtype
