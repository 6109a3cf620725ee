"""What happens to packed rows later changes no row that is left."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidequest_langchain.kv.packed import PackedBlock, packed_bytes
from tests.kv.packing import DTYPES, LAYOUTS, alike, assert_same, rows_of


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


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    bits=st.sampled_from([8, 4]),
    exempt=st.sampled_from([(), (1,)]),
    data=st.data(),
)
def test_no_joining_changes_a_row(layout, bits, exempt, data):
    """Blocks that were cut and thinned, one after another or through each other, joined twice."""
    parts, wanted = [], {}
    step, stride = data.draw(st.sampled_from([(300, 1), (1, 3)]))
    for n in range(3):
        rows = rows_of(LAYOUTS[layout], n_rows := data.draw(st.integers(1, 150)), seed=n)
        offsets = range(n, n + stride * n_rows, stride)
        block = PackedBlock.pack(*rows, offsets, bits=bits, exempt=exempt)
        if data.draw(st.booleans()):
            block = block.without(data.draw(st.sets(st.integers(0, n_rows - 1)))) or block
        if block.n_rows > 1 and data.draw(st.booleans()):
            at = data.draw(st.integers(1, block.n_rows - 1))
            block = block.split(at)[data.draw(st.integers(0, 1))]
        shift = n * step * 3 // stride * (step > 1)
        parts.append((block, shift))
        for row, offset in enumerate(block.offsets):
            wanted[offset + shift] = block, row
    first = PackedBlock.joined(*zip(*parts[:2], strict=True))
    for joined in (
        PackedBlock.joined(*zip(*parts, strict=True)),
        PackedBlock.joined([first, parts[2][0]], [0, parts[2][1]]),
    ):
        assert joined.offsets == tuple(sorted(wanted))
        assert joined.n_bytes <= sum(b.n_bytes for b, _ in parts) + 8 * len(wanted)
        check_joined(joined, wanted, len(rows[0]))
        some = sorted(data.draw(st.sets(st.integers(0, joined.n_rows - 1))))
        if (left := joined.without(some)) is not None:
            check_joined(left, wanted, len(rows[0]))
        if joined.n_rows > 1:
            at = data.draw(st.integers(1, joined.n_rows - 1))
            for part in joined.split(at):
                check_joined(part, wanted, len(rows[0]))


def check_joined(joined, wanted, n_layers):
    for layer in range(n_layers):
        loads = {id(b): b.load(layer) for b, _ in wanted.values()}
        for i, found in enumerate(joined.load(layer)):
            rows = [loads[id(b)][i][:, row] for b, row in (wanted[at] for at in joined.offsets)]
            assert torch.equal(found, torch.stack(rows, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_groups_are_joined_without_a_byte_more(dtype):
    layout = alike(dtype=dtype, dim=64)
    blocks = [
        PackedBlock.pack(*rows_of(layout, n, seed=n), range(n), bits=8) for n in (64, 192, 70)
    ]
    cut = blocks[0].split(10)[1]
    joined = PackedBlock.joined([cut, *blocks[1:]], [0, 64, 256])
    assert joined.n_bytes == cut.n_bytes + sum(b.n_bytes for b in blocks[1:])
    parts = zip([cut, *blocks[1:]], [0, 64, 256], strict=True)
    at_offset = {at + by: (b, row) for b, by in parts for row, at in enumerate(b.offsets)}
    check_joined(joined, at_offset, 3)
    # Where a group ends early, rows say in which they are.
    ragged = PackedBlock.joined(blocks[::-1], [0, 70, 262])
    assert ragged.n_bytes == sum(b.n_bytes for b in blocks) + 4 * ragged.n_rows
    own = {t.untyped_storage().data_ptr() for n, t in joined.tensors().items() if n != "header"}
    assert not own & {t.untyped_storage().data_ptr() for b in blocks for t in b.tensors().values()}


@pytest.mark.parametrize(
    "ragged", [lambda b: b.split(10)[1], lambda b: b.without(range(20, 30))], ids=["cut", "thinned"]
)
def test_what_is_ragged_stays_so_behind_whole_groups(ragged):
    whole = PackedBlock.pack(*rows_of(alike(), 128), range(128), bits=8)
    part = ragged(PackedBlock.pack(*rows_of(alike(), 100, seed=1), range(100), bits=8))
    joined = PackedBlock.joined([whole, part], [0, 128])
    wanted = {at: (whole, at) for at in range(128)}
    wanted |= {128 + at: (part, row) for row, at in enumerate(part.offsets)}
    check_joined(joined, wanted, 3)


def test_blocks_that_differ_are_not_joined():
    rows = rows_of(alike(), 10)
    plain, others = (
        PackedBlock.pack(*rows, range(10), bits=8),
        [
            PackedBlock.pack(*rows, range(10), bits=4),
            PackedBlock.pack(*rows, range(10), bits=8, exempt=(0,)),
            PackedBlock.pack(*rows_of(alike(dim=8), 10), range(10), bits=8),
            PackedBlock.pack(*rows_of(alike(dtype=torch.float16), 10), range(10), bits=8),
        ],
    )
    for other in others:
        with pytest.raises(ValueError, match="one kind"):
            PackedBlock.joined([plain, other], [0, 10])
    with pytest.raises(ValueError, match="one kind"):
        PackedBlock.joined([], [])
    with pytest.raises(ValueError, match="one offset"):
        PackedBlock.joined([plain, plain], [0, 9])


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
