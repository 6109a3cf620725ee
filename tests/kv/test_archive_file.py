"""One archive file: bit for bit there and back, whole or not at all."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sidequest_langchain.kv import sealed_file
from sidequest_langchain.kv.archive_file import (
    header_of,
    payload_bytes,
    read_archive,
    write_archive,
)
from tests.kv.archiving import ABOUT, DTYPES, ROWS, bits_of, same_bits, written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 0, 3), (), (1,), (3, 400_001)])
def test_round_trip_is_bit_identical(tmp_path, dtype, shape):
    tensors = {"rows": bits_of(dtype, shape), "others": bits_of(torch.uint8, (3,))}
    path, asked = written(tmp_path, tensors)
    found, about = read_archive(path, **asked)
    assert {name: about[name] for name in ABOUT} == ABOUT
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert path.stat().st_size <= payload_bytes(tensors) + 64 * 1024


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, ::2],
        lambda t: t.mT,
        lambda t: t[:, 1:4],
        lambda t: t[:1].expand(5, -1, -1),
        lambda t: t.clone().requires_grad_(),
    ],
)
def test_views_are_written_as_they_look(tmp_path, view):
    rows = torch.randn(2, 10, 4)
    path, asked = written(tmp_path, {"rows": view(rows)})
    found, _ = read_archive(path, **asked)
    assert same_bits(found["rows"], view(rows).detach())
    assert found["rows"].is_contiguous()


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4)),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=8).filter(lambda n: n not in ("format", "sha256")), st.text()),
)
def test_any_names_and_shapes_come_back(tmp_path_factory, shapes, about):
    tensors = {name: bits_of(dtype, shape) for name, (dtype, shape) in shapes.items()}
    path, asked = written(tmp_path_factory.mktemp("any"), tensors, about)
    found, strings = read_archive(path, **asked)
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert about.items() <= strings.items()


def test_the_file_is_one_of_safetensors(tmp_path):
    """Another reader of the format finds the same."""
    tensors = {str(dtype): bits_of(dtype, (3, 5)) for dtype in DTYPES}
    path, _ = written(tmp_path, tensors)
    theirs = load_file(path)
    assert all(same_bits(theirs[name], tensors[name]) for name in tensors)


def test_elements_lie_at_multiples_of_their_width(tmp_path):
    """Readers that map the file need that; names and the order of the tensors have no say."""
    tensors = {"a": bits_of(torch.int8, (3,)), "b": bits_of(torch.float32, (3,))}
    path, _ = written(tmp_path, {**tensors, "c": bits_of(torch.float64, (1,))})
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    assert n_header % 8 == 0
    starts = {name: header[name]["data_offsets"][0] for name in "abc"}
    assert starts == {"c": 0, "b": 8, "a": 20}


def test_only_its_owner_may_read_it(tmp_path):
    path, _ = written(tmp_path, ROWS)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_has_no_place_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        header_of({"rows": torch.zeros(1, dtype=torch.complex64)}, {})
    with pytest.raises(ValueError, match="__metadata__"):
        header_of({"__metadata__": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="an archive takes 1048576"):
        header_of({}, {"meta": "x" * 2**20})


# ---- failing disks


def failing(monkeypatch, name, *, after=0, code=errno.ENOSPC):
    """Let one call of the system fail; `write` after some bytes, half a block included."""
    real, left = getattr(os, name), [after]

    def call(*args, **kwargs):
        if name != "write":
            raise OSError(code, os.strerror(code))
        if left[0] <= 0:
            raise OSError(code, os.strerror(code))
        n_written = real(args[0], args[1][: left[0]])
        left[0] -= n_written
        return n_written

    monkeypatch.setattr(sealed_file.os, name, call)


HEADER = len(header_of(ROWS, ABOUT))
FAILURES = {
    "at once": ("write", 0),
    "in the header": ("write", 50),
    "after the header": ("write", HEADER),
    "half way": ("write", HEADER + payload_bytes(ROWS) // 2),
    "at the checksum": ("write", HEADER + payload_bytes(ROWS)),
    "in the checksum": ("write", HEADER + payload_bytes(ROWS) + 20),
    "at fsync": ("fsync", 0),
    "at replace": ("replace", 0),
    "at seeking": ("lseek", 0),
    "at opening": ("open", 0),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, failure):
    name, after = FAILURES[failure]
    failing(monkeypatch, name, after=after)
    before = {key: t.clone() for key, t in ROWS.items()}
    with pytest.raises(OSError, match="No space left"):
        write_archive(tmp_path / "copy.safetensors", ROWS, header_of(ROWS, ABOUT))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert all(same_bits(ROWS[key], before[key]) for key in ROWS)


def test_an_earlier_file_survives_a_failure(tmp_path, monkeypatch):
    path, asked = written(tmp_path, ROWS)
    failing(monkeypatch, "write", after=HEADER + 100)
    with pytest.raises(OSError, match="No space left"):
        write_archive(path, {"keys": ROWS["keys"]}, header_of({"keys": ROWS["keys"]}, ABOUT))
    monkeypatch.undo()
    found, _ = read_archive(path, **asked)
    assert same_bits(found["keys"], ROWS["keys"])


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(sealed_file.os, "write", lambda f, block: real(f, block[:100]))
    path, asked = written(tmp_path, ROWS)
    found, _ = read_archive(path, **asked)
    assert all(same_bits(found[name], ROWS[name]) for name in ROWS)


def test_a_disk_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed_file.os, "write", lambda f, block: 0)
    with pytest.raises(OSError, match="nothing more"):
        write_archive(tmp_path / "copy", ROWS, header_of(ROWS, ABOUT))
    assert list(tmp_path.iterdir()) == []


def test_links_are_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "copy.safetensors").symlink_to(outside)
    path, asked = written(inside, ROWS)
    assert outside.read_text() == "precious"
    assert not path.is_symlink()
    assert read_archive(path, **asked)
    path.unlink()
    (inside / "copy.safetensors.tmp").symlink_to(outside)
    with pytest.raises(OSError, match="File exists"):
        write_archive(path, ROWS, header_of(ROWS, ABOUT))
    assert outside.read_text() == "precious"
