"""Storages of layers that are alike and of layers that differ: rows, views, copies, bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sidequest_langchain.kv.layout import LayerShape, bytes_per_token
from sidequest_langchain.kv.storage import Storage
from tests.kv.growing import CPU, storage_bytes

ALIKE = LayerShape(n_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float32, device=CPU)
LAYOUTS = {
    "alike": (ALIKE,) * 3,
    "one layer": (ALIKE,),
    "V is wider": (replace(ALIKE, value_dim=6),) * 3,
    "heads differ": (ALIKE, replace(ALIKE, n_kv_heads=1), ALIKE),
    "dtypes differ": (ALIKE, ALIKE, replace(ALIKE, dtype=torch.float64)),
}
N_STORAGES = {"alike": 1, "one layer": 1, "V is wider": 6, "heads differ": 6, "dtypes differ": 6}


def filled(layout, capacity):
    """A storage whose every number says where it is."""
    storage = Storage.of(layout, capacity)
    for i, tensor in enumerate((*storage.keys, *storage.values)):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10_000 * i)
    return storage


def holds(storage, source, first, n_rows):
    mine, theirs = (*storage.keys, *storage.values), (*source.keys, *source.values)
    return all(
        torch.equal(a[:, :n_rows], b[:, first : first + n_rows])
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.fixture(params=LAYOUTS)
def name(request):
    return request.param


def test_has_the_shape_of_its_layers(name):
    layout, storage = LAYOUTS[name], Storage.of(LAYOUTS[name], 5)
    assert storage.capacity == 5
    for layer, k, v in zip(layout, storage.keys, storage.values, strict=True):
        assert k.shape == (layer.n_kv_heads, 5, layer.key_dim)
        assert v.shape == (layer.n_kv_heads, 5, layer.value_dim)
        assert (k.dtype, v.dtype) == (layer.dtype, layer.dtype)
        assert k.is_contiguous()
        assert v.is_contiguous()


def test_counts_every_byte_once_and_allocates_once_where_layers_are_alike(name):
    storage = filled(LAYOUTS[name], 5)
    tensors = [*storage.keys, *storage.values]
    assert storage.n_bytes == storage_bytes(tensors) == 5 * bytes_per_token(LAYOUTS[name])
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == N_STORAGES[name]


@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 3), (2, 5), (1, 2), (4, 4)])
def test_views_are_the_rows_themselves(name, first, last):
    storage = filled(LAYOUTS[name], 5)
    keys, values = storage.views(first, last)
    for view, whole in zip((*keys, *values), (*storage.keys, *storage.values), strict=True):
        assert torch.equal(view, whole[:, first:last])
        view.fill_(-1)
        assert (whole[:, first:last] == -1).all()


@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 3), (2, 5), (3, 3)])
def test_a_copy_has_the_rows_and_nothing_of_the_old_storage(name, first, last):
    storage = filled(LAYOUTS[name], 5)
    copy = storage.copy(first, last)
    assert holds(copy, storage, first, last - first)
    assert copy.capacity == last - first
    assert copy.n_bytes == (last - first) * bytes_per_token(LAYOUTS[name])
    old = {t.untyped_storage().data_ptr() for t in (*storage.keys, *storage.values)}
    new = {t.untyped_storage().data_ptr() for t in (*copy.keys, *copy.values)}
    assert not old & new


@pytest.mark.parametrize(("n_rows", "capacity"), [(5, 9), (3, 3), (2, 4), (0, 0), (0, 7)])
def test_resizing_keeps_the_rows_that_count(name, n_rows, capacity):
    storage = filled(LAYOUTS[name], 5)
    resized = storage.resized(n_rows, capacity)
    assert holds(resized, storage, 0, n_rows)
    assert resized.capacity == capacity
    assert resized.n_bytes == capacity * bytes_per_token(LAYOUTS[name])
    assert storage.capacity == 5


def test_no_layers_need_no_storage():
    storage = Storage.of((), 4)
    assert (storage.keys, storage.values, storage.n_bytes) == ([], [], 0)
