"""One archive file: bit for bit there and back, whole or not at all, trusted only if unharmed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv import archive_file
from sidequest_langchain.kv.archive_file import (
    header_of,
    payload_bytes,
    read_archive,
    write_archive,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
ABOUT = {"ticket": "t1", "fingerprint": '{"model": "m"}', "meta": "{}"}


def bits_of(dtype, shape, seed=0):
    """A tensor of random bits, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)


def same_bits(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def written(folder, tensors, about=ABOUT):
    """A file, and what is asked of it."""
    path = folder / "copy.safetensors"
    header = header_of(tensors, about)
    checksum = write_archive(path, tensors, header)
    n_bytes = len(header) + payload_bytes(tensors)
    assert path.stat().st_size == n_bytes
    return path, {"n_bytes": n_bytes, "checksum": checksum, "about": about}


ROWS = {"keys": bits_of(torch.float32, (2, 30, 8)), "values": bits_of(torch.bfloat16, (2, 30, 8))}


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


# ---- damage


def rewritten(path, change):
    """The same file with another header, its length made right."""
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    change(header)
    text = json.dumps(header).encode().ljust(n_header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n_header :])
    return path.stat().st_size


@pytest.mark.parametrize("place", [0, 3, 7, 8, 9, 60, 200, -1, -1000])
def test_any_other_byte_is_noticed(tmp_path, place):
    path, asked = written(tmp_path, ROWS)
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArchiveError, match=r"copy\.safetensors was not restored"):
        read_archive(path, **asked)


def test_every_byte_of_the_file_is_covered(tmp_path):
    path, asked = written(tmp_path, {"rows": bits_of(torch.int8, (40,))})
    raw = path.read_bytes()
    for place in range(len(raw)):
        other = bytearray(raw)
        other[place] ^= 0x20
        path.write_bytes(other)
        with pytest.raises(ArchiveError):
            read_archive(path, **asked)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: b"", "has 0 bytes where"),
        (lambda raw: raw[:-1], "bytes where"),
        (lambda raw: raw[: len(raw) // 2], "bytes where"),
        (lambda raw: raw + b"\0", "bytes where"),
        (lambda raw: (2**40).to_bytes(8, "little") + raw[8:], "claims a header of 1099511627776"),
        (lambda raw: b"\xff" * 8 + raw[8:], "claims a header of"),
        (lambda raw: bytes(8) + raw[8:], "no header of an archive"),
        (lambda raw: raw[:8] + b"\xff" * 100 + raw[108:], "no header of an archive"),
        (lambda raw: raw[:8] + b"[" * 300 + raw[308:], "no header of an archive"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "sha256 differs"),
    ],
)
def test_the_message_says_what_is_wrong(tmp_path, change, why):
    path, asked = written(tmp_path, ROWS)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArchiveError, match=why):
        read_archive(path, **asked)


def huge(header):
    header["keys"]["shape"] = [2**20, 2**20, 2**10]


def negative(header):
    header["keys"]["shape"] = [-2, -30, 8]


def empty_and_huge(header):
    header["values"]["shape"] = [0, 2**70]
    header["values"]["data_offsets"] = [header["keys"]["data_offsets"][1]] * 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda h: h["__metadata__"].update(fingerprint="other"), "its fingerprint is 'other'"),
        (lambda h: h["__metadata__"].update(ticket="t2"), "its ticket is 't2' where 't1'"),
        (lambda h: h["__metadata__"].update(format="v9"), "its format is 'v9'"),
        (lambda h: h.pop("__metadata__"), "no header of an archive"),
        (lambda h: h.update(__metadata__=[]), "no header of an archive"),
        (huge, "does not lie where its shape says"),
        (negative, "claims the shape"),
        (empty_and_huge, "does not lie where|claims a shape|describes"),
        (lambda h: h["keys"].update(dtype="F8"), "no header of an archive"),
        (lambda h: h["keys"].update(dtype="I32"), "sha256 differs"),
        (lambda h: h["keys"].update(shape=[30, 2, 8]), "sha256 differs"),
        (lambda h: h["keys"].update(data_offsets=[8, 8 + 1920]), "does not lie where"),
        (lambda h: h.pop("values"), "describes"),
        (lambda h: h.update(more=1), "no header of an archive"),
    ],
)
def test_a_header_of_something_else_is_refused(tmp_path, change, why):
    path, asked = written(tmp_path, ROWS)
    asked["n_bytes"] = rewritten(path, change)
    with pytest.raises(ArchiveError, match=why):
        read_archive(path, **asked)


def test_deep_nesting_ends_in_the_same_error(tmp_path):
    path = tmp_path / "copy.safetensors"
    text = b"[" * 500_000 + b"]" * 500_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ArchiveError, match="no header of an archive"):
        read_archive(path, n_bytes=path.stat().st_size, checksum="0" * 64, about={})


def test_no_claim_takes_more_memory_than_the_file(tmp_path):
    path, asked = written(tmp_path, ROWS)
    raw = path.read_bytes()
    claims = [rewritten(path, huge)]
    path.write_bytes((2**40).to_bytes(8, "little") + raw[8:])
    claims.append(len(raw))
    tracemalloc.start()
    for n_bytes in claims:
        with pytest.raises(ArchiveError):
            read_archive(path, **{**asked, "n_bytes": n_bytes})
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_nothing_is_unpickled(tmp_path, way):
    path, marker = tmp_path / "copy.safetensors", tmp_path / "marker"
    if way == "pickle":
        path.write_bytes(pickle.dumps(Trap(str(marker))))
    else:
        torch.save({"rows": Trap(str(marker))}, path)
    with pytest.raises(ArchiveError):
        read_archive(path, n_bytes=path.stat().st_size, checksum="0" * 64, about=ABOUT)
    assert not marker.exists()


def test_a_file_of_another_writer_is_refused(tmp_path):
    path = tmp_path / "copy.safetensors"
    save_file({"keys": torch.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ArchiveError, match="its format is 'pt'"):
        read_archive(path, n_bytes=path.stat().st_size, checksum="0" * 64, about={})


def test_an_intact_file_of_another_time_is_refused(tmp_path):
    """Its own checksum is right; it is not the one of what was asked for."""
    path, asked = written(tmp_path, ROWS)
    path.unlink()
    other = {**ROWS, "keys": ROWS["keys"].flip(1)}
    written(tmp_path, other)
    with pytest.raises(ArchiveError, match="sha256 differs"):
        read_archive(path, **asked)


def test_gone_and_special_files_are_refused(tmp_path):
    path, asked = written(tmp_path, ROWS)
    kept = path.rename(tmp_path / "elsewhere")
    with pytest.raises(ArchiveError, match="cannot be opened"):
        read_archive(path, **asked)
    path.symlink_to(kept)
    with pytest.raises(ArchiveError, match="cannot be opened"):
        read_archive(path, **asked)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArchiveError, match=r"no regular file|cannot be opened"):
        read_archive(path, **asked)


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

    monkeypatch.setattr(archive_file.os, name, call)


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
    monkeypatch.setattr(archive_file.os, "write", lambda f, block: real(f, block[:100]))
    path, asked = written(tmp_path, ROWS)
    found, _ = read_archive(path, **asked)
    assert all(same_bits(found[name], ROWS[name]) for name in ROWS)


def test_a_disk_that_takes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_file.os, "write", lambda f, block: 0)
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
