"""Packed rows: how far off, how many bytes, and that what happens later changes no row."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.kv.layout import LayerShape
from sidequest_langchain.kv.packed import GROUP, PackedBlock, packed_bytes

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


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    bits=st.sampled_from([8, 4]),
    n_rows=st.integers(1, 200),
    data=st.data(),
)
def test_no_cut_changes_a_row_that_is_left(layout, bits, n_rows, data):
    keys, values = rows_of(LAYOUTS[layout], n_rows)
    offsets = [3 * i + 1 for i in range(n_rows)]
    whole = PackedBlock.pack(keys, values, offsets, bits=bits)
    expected = [whole.load(layer) for layer in range(len(keys))]
    block, left = whole, list(range(n_rows))
    for _ in range(data.draw(st.integers(0, 4))):
        verb = data.draw(st.sampled_from(["head", "tail", "without", "round trip"]))
        if verb == "round trip":
            tensors = {name: t.clone() for name, t in block.tensors().items()}
            block = PackedBlock.from_tensors(tensors, block.offsets, LAYOUTS[layout])
        elif verb == "without":
            dropped = data.draw(st.sets(st.integers(0, len(left) - 1)))
            again = block.without(dropped)
            left = [row for i, row in enumerate(left) if i not in dropped]
            if again is None:
                assert not left
                return
            block = again
        elif len(left) > 1:
            at = data.draw(st.integers(1, len(left) - 1))
            head, tail = block.split(at)
            is_head = verb == "head"
            block, left = (head, left[:at]) if is_head else (tail, left[at:])
    assert block.offsets == tuple(3 * row + 1 for row in left)
    assert block.n_rows == len(left)
    first = data.draw(st.integers(0, len(left) - 1))
    last = data.draw(st.integers(first + 1, len(left)))
    for layer, rows in enumerate(expected):
        assert_same(block, layer, left, rows)
        for found, once in zip(block.load(layer, first, last), rows, strict=True):
            assert torch.equal(found, once[:, left[first:last]])
            assert found.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_have_storages_of_their_own_and_their_own_size(dtype):
    layout = alike(dtype=dtype, dim=64)
    keys, values = rows_of(layout, 192)
    block = PackedBlock.pack(keys, values, range(192), bits=8)
    head, tail = block.split(64)
    assert head.n_bytes == packed_bytes(64, layout, 8)
    assert tail.n_bytes == packed_bytes(128, layout, 8)
    thinner = block.without(range(64, 191))
    assert thinner is not None
    # A group keeps its line of the grid as long as it has a row, and rows say in which they are.
    assert thinner.n_bytes == packed_bytes(65, layout, 8) + 65 * 4
    pointers = [
        {t.untyped_storage().data_ptr() for n, t in b.tensors().items() if n != "header"}
        for b in (block, head, tail, thinner)
    ]
    for one, other in itertools.combinations(pointers, 2):
        assert not one & other


def test_moved_takes_the_same_tensors_elsewhere():
    keys, values = rows_of(alike(), 10)
    block = PackedBlock.pack(keys, values, range(20, 30), bits=8)
    moved = block.moved(-20)
    assert moved.offsets == tuple(range(10))
    assert moved.n_bytes == block.n_bytes
    assert torch.equal(moved.load(1)[0], block.load(1)[0])
    assert moved.tensors()["0.codes"].data_ptr() == block.tensors()["0.codes"].data_ptr()


def test_packing_takes_views_and_leaves_them_alone():
    keys, values = rows_of(alike(1), 140)
    before = [t.clone() for t in (keys[0], values[0])]
    ways = (
        ([keys[0][:, ::2]], [values[0][:, ::2]]),
        ([keys[0][:, ::2].contiguous()], [values[0][:, ::2].contiguous()]),
    )
    blocks = [PackedBlock.pack(k, v, range(70), bits=8) for k, v in ways]
    for one, other in zip(blocks[0].load(0), blocks[1].load(0), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(keys[0], before[0])
    assert torch.equal(values[0], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_loaded_may_be_written(dtype):
    """Blocks are shared by segments: a load is not a view of them."""
    keys, values = rows_of(alike(1, dtype=dtype), 10)
    block = PackedBlock.pack(keys, values, range(10), bits=8)
    once = [t.clone() for t in block.load(0)]
    for tensor in block.load(0):
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(block.load(0), once, strict=True))


def test_no_gradient_comes_along():
    keys, values = rows_of(alike(1), 10)
    keys[0].requires_grad_()
    block = PackedBlock.pack(keys, values, range(10), bits=8, exempt=())
    assert not any(t.requires_grad for t in block.tensors().values())
    with torch.inference_mode():
        assert torch.equal(block.load(0)[0], block.load(0)[0])


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
