"""Some rows of a part: loading them is choosing from all of the part, in every layer, each time."""

from __future__ import annotations

import random

import pytest
import torch

from sidequest_langchain.kv import parts
from sidequest_langchain.kv.layout import LayerShape
from sidequest_langchain.kv.packed import PackedBlock
from sidequest_langchain.kv.parts import ChosenRows, StoredRows, without_offsets
from sidequest_langchain.kv.storage import Storage
from tests.kv.growing import CPU, LAYOUT

EVEN = (LayerShape(n_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float32, device=CPU),) * 3
FORMS = ["uneven", "in one", "by layer", "packed"]
N_ROWS = 70


@pytest.fixture(params=[512, 16, 5, 1], ids="pieces of {}".format)
def load_rows(request, monkeypatch):
    monkeypatch.setattr(parts, "LOAD_ROWS", request.param)
    return request.param


def part_of(form):
    """Rows 3 to 73 of 80, or a packed block of 70; and its layers."""
    g = torch.Generator().manual_seed(1)
    layout = LAYOUT if form == "uneven" else EVEN
    keys, values = (
        [
            torch.randn(s.n_kv_heads, 80, dim, generator=g).to(s.dtype)
            for s, dim in zip(layout, dims, strict=True)
        ]
        for dims in ([s.key_dim for s in layout], [s.value_dim for s in layout])
    )
    if form == "packed":
        rows = [[t[:, :N_ROWS] for t in tensors] for tensors in (keys, values)]
        return PackedBlock.pack(*rows, range(N_ROWS), bits=8), len(layout)
    storage = Storage.of(layout, 80)
    storage.write(range(80), keys, values)
    if form == "by layer":
        storage = storage.by_layer(80)
    return StoredRows(storage, 3, N_ROWS, None), len(layout)


def choices(seed):
    """Rows to choose: random ones, all, none in a row, one, both ends, none."""
    rng = random.Random(seed)
    some = sorted(rng.sample(range(N_ROWS), rng.randint(2, N_ROWS - 1)))
    return {
        "some": some,
        "all": list(range(N_ROWS)),
        "every second": list(range(1, N_ROWS, 2)),
        "in a row": list(range(20, 50)),
        "one": [rng.randrange(N_ROWS)],
        "both ends": [0, N_ROWS - 1],
        "none": [],
    }


def ranges(rng, n):
    """All, the first, the last, none, and some in between."""
    found = [(0, n), (0, min(1, n)), (max(0, n - 1), n), (0, 0), (n, n)]
    for _ in range(3):
        a, b = sorted((rng.randint(0, n), rng.randint(0, n)))
        found += [(a, b), (0, b), (a, n)]
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", choices(0))
def test_loads_what_choosing_from_the_whole_part_gives(form, name, load_rows):
    for seed in range(3):
        rng = random.Random(seed)
        rows = choices(seed)[name]
        part, n_layers = part_of(form)
        chosen = ChosenRows(part, rows)
        assert (chosen.n_rows, list(chosen.offsets)) == (len(rows), rows)
        asked = ranges(rng, len(rows))
        rng.shuffle(asked)
        for layer in [*range(n_layers), *reversed(range(n_layers))]:
            whole = part.load(layer, 0, N_ROWS)
            for first, last in asked:
                at = torch.tensor(rows[first:last], dtype=torch.long)
                found = chosen.load(layer, first, last)
                assert [t.shape[1] for t in found] == [last - first] * 2
                assert all(
                    torch.equal(t, of.index_select(1, at))
                    for t, of in zip(found, whole, strict=True)
                )


@pytest.mark.parametrize("form", FORMS)
def test_no_load_is_longer_than_may_be_at_once(form, load_rows, monkeypatch):
    part, n_layers = part_of(form)
    longest = []
    kind, load = type(part), type(part).load

    def loading(self, layer, first=0, last=None):
        longest.append(last - first)
        return load(self, layer, first, last)

    monkeypatch.setattr(kind, "load", loading)
    chosen = ChosenRows(part, choices(5)["some"])
    for _ in range(2):
        for layer in range(n_layers):
            chosen.load(layer, 0, chosen.n_rows)
    assert 0 < max(longest) <= load_rows


def test_what_is_chosen_of_chosen_rows():
    """Hidden rows of which a what-if takes more."""
    part, n_layers = part_of("in one")
    half = without_offsets(part, frozenset(range(0, N_ROWS, 2)))
    rest = without_offsets(half, frozenset(range(40)))
    assert list(rest.offsets) == list(range(41, N_ROWS, 2))
    assert without_offsets(rest, frozenset(range(N_ROWS))) is None
    for layer in [*range(n_layers), *range(n_layers)]:
        whole = part.load(layer, 0, N_ROWS)
        for first, last in [(0, rest.n_rows), (1, 4), (rest.n_rows - 1, rest.n_rows)]:
            at = torch.tensor(rest.offsets[first:last])
            for t, of in zip(rest.load(layer, first, last), whole, strict=True):
                assert torch.equal(t, of.index_select(1, at))


def test_it_reads_what_the_part_holds_now():
    """Which rows to read is remembered; what they are is not."""
    part, n_layers = part_of("in one")
    chosen = ChosenRows(part, [1, 2, 30])
    for layer in range(n_layers):
        chosen.load(layer, 0, 3)
    for layer in range(n_layers):
        k, v = part.load(layer, 30, 31)
        k.fill_(7.0)
        v.fill_(8.0)
    for layer in range(n_layers):
        k, v = chosen.load(layer, 0, 3)
        assert (k[:, 2] == 7).all()
        assert (v[:, 2] == 8).all()
        assert not (k[:, :2] == 7).any()
