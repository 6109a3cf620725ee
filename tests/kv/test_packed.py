"""Packed rows: how far off they are, how many bytes they take, what is refused."""

from __future__ import annotations

import pytest
import torch

from sidequest_langchain.kv.packed import GROUP, PackedBlock, packed_bytes
from tests.kv.packing import DTYPES, LAYOUTS, alike, assert_same, rows_of


def oracle(numbers, bits, dim, group):
    """Numbers on grids of `group` rows (keys, dim 1) or of one row (values, dim 2), one by one."""
    out = numbers.clone()
    n_heads, n_rows, n_channels = numbers.shape
    if dim == 1:
        cells = [
            (h, slice(r, r + group), c)
            for h in range(n_heads)
            for r in range(0, n_rows, group)
            for c in range(n_channels)
        ]
    else:
        cells = [(h, r, slice(None)) for h in range(n_heads) for r in range(n_rows)]
    for cell in cells:
        x = numbers[cell].float()
        scale = (x.max() - x.min()) / (2**bits - 1)
        step = scale if scale > 0 else torch.tensor(1.0)
        out[cell] = (torch.round((x - x.min()) / step) * scale + x.min()).to(numbers.dtype)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n_rows", [1, 63, 64, 65, 200])
def test_load_is_quantisation_done_cell_by_cell(layout, bits, n_rows):
    keys, values = rows_of(LAYOUTS[layout], n_rows)
    block = PackedBlock.pack(keys, values, range(n_rows), bits=bits)
    for layer in range(len(keys)):
        k, v = block.load(layer)
        assert torch.equal(k, oracle(keys[layer], bits, 1, GROUP))
        assert torch.equal(v, oracle(values[layer], bits, 2, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_half_a_step_at_most(dtype, bits):
    keys, values = rows_of(alike(dtype=dtype), 130)
    block = PackedBlock.pack(keys, values, range(130), bits=bits)
    last_digit = {torch.float32: 1e-5, torch.float16: 2**-6, torch.bfloat16: 2**-3}[dtype]
    for layer in range(3):
        k, v = block.load(layer)
        for start in range(0, 130, GROUP):
            x, y = (t[:, start : start + GROUP].float() for t in (keys[layer], k))
            step = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / (2**bits - 1)
            assert ((x - y).abs() <= step / 2 + last_digit).all()
        x, y = values[layer].float(), v.float()
        step = (x.amax(2, keepdim=True) - x.amin(2, keepdim=True)) / (2**bits - 1)
        assert ((x - y).abs() <= step / 2 + last_digit).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_are_exact(dtype, bits):
    keys, values = rows_of(alike(1, dtype=dtype), 1, scale=1000)
    keys = [keys[0].expand(-1, 70, -1)]
    values = [values[0][..., :1].expand(-1, 70, 16)]
    block = PackedBlock.pack(keys, values, range(70), bits=bits)
    assert_same(block, 0, slice(None), (keys[0], values[0]))


def test_large_half_precision_keys_stay_finite():
    top = torch.finfo(torch.float16).max
    keys = torch.tensor([-top, top, 0.0, 1.0], dtype=torch.float16).expand(1, 4, 4).mT
    block = PackedBlock.pack([keys], [keys.contiguous()], range(4), bits=8)
    for found in block.load(0):
        assert found.isfinite().all()
        assert found.max() == top
        assert found.min() == -top


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("bits", "dtype", "share"),
    [
        (8, torch.float32, 0.30),
        (8, torch.float16, 0.56),
        (8, torch.bfloat16, 0.56),
        (4, torch.float32, 0.17),
        (4, torch.float16, 0.32),
        (4, torch.bfloat16, 0.32),
    ],
)
def test_bytes_at_the_storages(dim, bits, dtype, share):
    layout = alike(4, dim=dim, dtype=dtype)
    keys, values = rows_of(layout, 256)
    dense = sum(t.untyped_storage().nbytes() for t in (*keys, *values))
    block = PackedBlock.pack(keys, values, range(256), bits=bits)
    own = {t.untyped_storage().data_ptr(): t for n, t in block.tensors().items() if n != "header"}
    assert block.n_bytes == sum(t.untyped_storage().nbytes() for t in own.values())
    assert block.n_bytes <= share * dense


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("exempt", [(), (1,)])
def test_bytes_are_foretold(layout, bits, exempt):
    keys, values = rows_of(LAYOUTS[layout], 70)
    block = PackedBlock.pack(keys, values, range(70), bits=bits, exempt=exempt)
    assert packed_bytes(70, LAYOUTS[layout], bits, exempt) == block.n_bytes


def test_few_rows_are_foretold_to_cost_more_than_they_did():
    layout = alike(dim=64)
    assert packed_bytes(1, layout, 8) > sum(s.bytes_per_token for s in layout)


def test_keys_with_two_huge_channels_keep_their_logits():
    """Cases like Qwen2.5's: per row, two channels x200 would drown the other ones."""
    keys, values = rows_of(alike(1, dim=64), 256, scale=1.0)
    keys[0][:, :, [3, 40]] *= 200
    keys[0][:, :, 3] += 500  # and a bias, as those models have
    queries = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(5))
    queries[..., [3, 40]] /= 200  # trained together: all channels count
    block = PackedBlock.pack(keys, values, range(256), bits=8)
    exact = queries @ keys[0].mT
    error = (queries @ block.load(0)[0].mT - exact).norm() / exact.norm()
    assert error < 0.01
    # What the per-row scheme would do to the same keys: the test can tell them apart.
    per_row = oracle(keys[0], 8, 2, 1)
    assert (queries @ per_row.mT - exact).norm() / exact.norm() > 0.05


@pytest.mark.parametrize("bits", [8, 4])
def test_exempt_layers_stay_as_they_were(bits):
    layout = LAYOUTS["an odd one out"]
    keys, values = rows_of(layout, 70)
    block = PackedBlock.pack(keys, values, range(70), bits=bits, exempt={0, 1})
    for layer in (0, 1):
        assert_same(block, layer, slice(None), (keys[layer], values[layer]))
    assert not torch.equal(block.load(2)[0], keys[2])
    left = block.without({5})
    assert left is not None
    assert_same(left, 0, [r for r in range(70) if r != 5], (keys[0], values[0]))
    assert_same(block.split(20)[1], 1, slice(20, None), (keys[1], values[1]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"bits": 3}, "not to 3"),
        ({"offsets": range(9)}, "9 offsets for \\[10\\] rows"),
        ({"offsets": [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]}, "ascend"),
    ],
)
def test_what_does_not_fit_is_refused(change, what):
    keys, values = rows_of(alike(), 10)
    with pytest.raises(ValueError, match=what):
        PackedBlock.pack(keys, values, **{"offsets": range(10), "bits": 8, **change})


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_are_no_numbers_are_refused(poison, which):
    rows = rows_of(alike(), 70)
    rows[which][2][1, 66, 3] = poison
    with pytest.raises(ValueError, match="NaN or infinity"):
        PackedBlock.pack(*rows, range(70), bits=8)


def test_empty_parts_are_refused():
    block = PackedBlock.pack(*rows_of(alike(), 10), range(10), bits=8)
    for at in (0, 10, -1, 11):
        with pytest.raises(ValueError, match=f"split at row {at}"):
            block.split(at)
    with pytest.raises(ValueError, match="no row 10"):
        block.without({3, 10})
    assert block.without(range(10)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("header"),
        lambda t: t.pop("0.codes"),
        lambda t: t.update({"0.more": torch.zeros(1)}),
        lambda t: t.update(header=t["header"][:-1]),
        lambda t: t.update(header=t["header"][:2]),
    ],
)
def test_tensors_of_something_else_are_refused(damage):
    block = PackedBlock.pack(*rows_of(alike(), 10), range(10), bits=8)
    tensors = block.tensors()
    damage(tensors)
    with pytest.raises(ValueError, match="no packed block"):
        PackedBlock.from_tensors(tensors, range(10))


def test_tensors_of_other_rows_are_refused():
    block = PackedBlock.pack(*rows_of(alike(), 10), range(10), bits=8)
    with pytest.raises(ValueError, match="10 rows where 9"):
        PackedBlock.from_tensors(block.tensors(), range(9))
