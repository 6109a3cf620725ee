"""Files that are damaged, foreign or hostile: one error that says why, no memory, no code run."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

from sidequest_langchain.errors import ArchiveError
from sidequest_langchain.kv.archive_file import (
    read_archive,
)
from tests.kv.archiving import ABOUT, ROWS, bits_of, written


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
    path.rmdir()
    os.mkfifo(path)  # nobody will ever write to it
    with pytest.raises(ArchiveError, match="no regular file"):
        read_archive(path, **asked)
