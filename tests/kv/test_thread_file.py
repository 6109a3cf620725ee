"""The file of a saved thread: bit for bit there and back; whole, or refused, or not there."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
import weakref

import pytest
import torch
from safetensors.torch import load_file

from sidequest_langchain.errors import SavedThreadError
from sidequest_langchain.kv import sealed_file
from sidequest_langchain.kv.sealed_form import Shape, header_for
from sidequest_langchain.kv.thread_file import (
    FORM,
    Item,
    ThreadFile,
    file_of,
    remove_unfinished,
    write_thread,
)
from tests.kv.archiving import DTYPES, bits_of, same_bits

ABOUT = {"model": "m1"}
SMALL = {"0.ids": bits_of(torch.int32, (7,)), "0.kinds": bits_of(torch.uint8, (7,))}
LARGE = {
    **{f"0.{dtype}": bits_of(dtype, (3, 5)) for dtype in DTYPES},
    "1.rows": bits_of(torch.bfloat16, (2, 3, 7)),
    "2.rows": bits_of(torch.bfloat16, (2, 0, 7)),
    "3.codes": bits_of(torch.uint8, (11,)),
}


def items(small=SMALL, large=LARGE):
    found = [Item(Shape.of(n, t), lambda t=t: t, is_small=True) for n, t in small.items()]
    return found + [Item(Shape.of(n, t), lambda t=t: t) for n, t in large.items()]


def written(folder, facts=None, **tensors):
    path = file_of(folder, "t")
    n_bytes = write_thread(path, items(**tensors), facts or {}, ABOUT)
    assert path.stat().st_size == n_bytes
    return path


def read(path, wanted=lambda shape: True):
    with ThreadFile(path) as file:
        large = dict(file.rows(wanted))
        file.finish()
        return file, large


def refused(path, why):
    with pytest.raises(SavedThreadError, match=why) as caught:
        read(path)
    assert "was not loaded" in str(caught.value)
    assert caught.value.field is None


def test_what_was_written_comes_back_bit_for_bit(tmp_path):
    facts = {"thread": "t", "paths": [{"tip": 0}], "text": "城市 \udcff"}
    path = written(tmp_path, facts)
    file, large = read(path)
    assert large.keys() == LARGE.keys()
    assert all(same_bits(large[name], LARGE[name]) for name in LARGE)
    assert all(same_bits(file.small[name], SMALL[name]) for name in SMALL)
    assert facts.items() <= file.facts.items()
    assert ABOUT.items() <= file.about.items()


def test_the_file_is_one_of_safetensors_and_little_more_than_its_tensors(tmp_path):
    large = {f"{n}.rows": bits_of(torch.float16, (2, 3, 8), seed=n) for n in range(500)}
    path = written(tmp_path, small={}, large=large)
    theirs = load_file(path)
    flat = torch.cat([t.view(-1) for t in large.values()])
    assert same_bits(theirs["rows.F16"][: len(flat)], flat)
    n_payload = sum(t.nbytes for t in large.values())
    assert path.stat().st_size < n_payload + 64 * 1024
    n_header = int.from_bytes(path.read_bytes()[:8], "little")
    assert n_header < 1024, "however many tensors there are"


def test_elements_lie_at_multiples_of_their_width(tmp_path):
    path = written(tmp_path)
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    header.pop("__metadata__")
    assert n_header % 8 == 0
    assert all(place["data_offsets"][0] % 8 == 0 for place in header.values())


def test_views_are_written_as_they_look(tmp_path):
    rows = torch.randn(4, 6, 5)
    views = {"a": rows[:, 2:5], "b": rows.mT, "c": rows[:, ::2]}
    _, large = read(written(tmp_path, small={}, large=views))
    assert all(same_bits(large[name], view.contiguous()) for name, view in views.items())


def test_what_is_not_wanted_is_passed_over(tmp_path):
    path = written(tmp_path)
    _, large = read(path, lambda shape: shape.name in ("1.rows", "0.torch.int8"))
    assert large.keys() == {"1.rows", "0.torch.int8"}
    assert same_bits(large["1.rows"], LARGE["1.rows"])


def test_tensors_are_let_go_of_as_they_are_written(tmp_path):
    alive = []

    def load(n):
        assert all(gone() is None for gone in alive[:-1]), "two at a time"
        tensor = torch.full((1000,), float(n))
        alive.append(weakref.ref(tensor))
        return tensor

    found = [Item(Shape(f"{n}", torch.float32, (1000,)), lambda n=n: load(n)) for n in range(5)]
    write_thread(file_of(tmp_path, "t"), found, {}, {})
    assert len(alive) == 5


# ---- names


NAMES = ["../x", "/etc/x", "a/../../x", "a\\..\\b", "~", "", ".", "nul\0x", "x" * 5000, "\ud800"]


def test_no_id_leads_out_of_the_folder_and_no_two_share_a_file(tmp_path):
    names = [*NAMES, "x", "X", "\u00e9", "e\u0301"]
    files = {file_of(tmp_path, name) for name in names}
    assert len(files) == len(names)
    assert {path.parent for path in files} == {tmp_path}
    assert all(len(path.name) < 100 and path.name.isascii() for path in files)


def test_links_are_neither_written_through_nor_read(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = file_of(folder, "t")
    path.symlink_to(outside)
    refused(path, "cannot be opened")
    written(folder)
    assert outside.read_text() == "precious"
    assert not path.is_symlink()
    path.rename(outside)
    path.symlink_to(outside)
    refused(path, "cannot be opened")


def test_only_its_owner_may_read_it(tmp_path):
    path = written(tmp_path / "new" / "folder")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


# ---- damage


def test_every_byte_of_the_file_is_covered(tmp_path):
    path = written(tmp_path, small=SMALL, large={"0.rows": bits_of(torch.float32, (3, 4))})
    raw = path.read_bytes()
    for place in range(len(raw)):
        other = bytearray(raw)
        other[place] ^= 0x20
        path.write_bytes(other)
        with pytest.raises(SavedThreadError):
            read(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: b"", "claims a header|no header"),
        (lambda raw: raw[:-1], "describes"),
        (lambda raw: raw[: len(raw) // 2], "describes|header"),
        (lambda raw: raw + b"\0", "describes"),
        (lambda raw: (2**40).to_bytes(8, "little") + raw[8:], "claims a header of 1099511627776"),
        (lambda raw: b"\xff" * 8 + raw[8:], "claims a header of"),
        (lambda raw: bytes(8) + raw[8:], "no header"),
        (lambda raw: raw[:8] + b"[" * 300 + raw[308:], "no header"),
        (lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:], "sha256 differs"),
        (lambda raw: raw.replace(b"sidequest-thread-1", b"sidequest-thread-9"), "its format"),
        (lambda raw: raw.replace(b'"sha256"', b'"sha999"'), "no checksum"),
    ],
)
def test_the_message_says_what_is_wrong(tmp_path, change, why):
    path = written(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    refused(path, why)


def test_a_file_that_is_gone_or_is_none(tmp_path):
    refused(tmp_path / "none.safetensors", "cannot be opened .No such file")
    (tmp_path / "folder.safetensors").mkdir()
    refused(tmp_path / "folder.safetensors", "no regular file|cannot be")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", "no regular file")


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_nothing_is_unpickled(tmp_path, way):
    path, marker = file_of(tmp_path, "t"), tmp_path / "marker"
    if way == "pickle":
        path.write_bytes(pickle.dumps(Trap(str(marker))))
    else:
        torch.save({"rows": Trap(str(marker))}, path)
    refused(path, "header")
    assert not marker.exists()


def sealed(path, index, *, groups=()):
    """A file whose checksum is right, whatever its index says."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    shapes = [Shape("index", torch.uint8, (len(text),)), *groups]
    header = header_for(FORM, shapes, ABOUT)
    blocks = [memoryview(text), *(memoryview(bytes(s.n_bytes)) for s in groups)]
    sealed_file.write_sealed(path, header, blocks)


F32 = Shape("rows.F32", torch.float32, (4,))


@pytest.mark.parametrize(
    ("index", "groups"),
    [
        (b"\xff\xff", ()),
        (b"[" * 300_000 + b"]" * 300_000, ()),
        ([], ()),
        ({}, ()),
        ({"tensors": [["rows", "a", "F9", [4]]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32", [5]]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32", [2**60, 2**60]]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32", [-2, -2]]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32", [0, 2**70]], ["rows", "b", "F32", [4]]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32", [2]], ["rows", "a", "F32", [2]]]}, (F32,)),
        ({"tensors": [["small", "a", "F32", [4]]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32", "4"]]}, (F32,)),
        ({"tensors": [["rows", "a", "F32"]]}, (F32,)),
    ],
)
def test_an_index_of_something_else_is_refused(tmp_path, index, groups):
    path = file_of(tmp_path, "t")
    sealed(path, index, groups=groups)
    refused(path, "its index|claims a shape")


def test_no_claim_takes_more_memory_than_the_file(tmp_path):
    path = file_of(tmp_path, "t")
    sealed(path, {"tensors": [["rows", "a", "F32", [2**40]]]}, groups=(F32,))
    tracemalloc.start()
    refused(path, "its index")
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(path, "claims a header")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


# ---- failing disks


@pytest.mark.parametrize("failure", ["write", "write later", "fsync", "replace", "lseek", "open"])
def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path, monkeypatch, failure):
    path = written(tmp_path, {"age": "old"})
    name, left = failure.removesuffix(" later"), [path.stat().st_size // 2]
    real = os.write

    def full(*args, **kwargs):
        if failure == "write later" and left[0] > 0:
            left[0] -= (n := real(args[0], args[1][: left[0]]))
            return n
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealed_file.os, name, full)
        with pytest.raises(OSError, match="No space left"):
            written(tmp_path, {"age": "new"})
    assert list(tmp_path.iterdir()) == [path]
    assert read(path)[0].facts["age"] == "old"


def test_a_process_killed_while_it_saves_leaves_the_older_file(tmp_path):
    path = written(tmp_path, {"age": "old"})
    code = f"""
        import os, time, sys
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from sidequest_langchain.kv import sealed_file
        from tests.kv.test_thread_file import written
        n = [0]
        def slow(file, block):
            n[0] += 1
            if n[0] == 3:
                print("half", flush=True)
                time.sleep(60)
            return os.write(file, block)
        sealed_file._write = slow
        written(Path({str(tmp_path)!r}), {{"age": "new"}})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert read(path)[0].facts["age"] == "old"
    [left] = [p for p in tmp_path.iterdir() if p != path]
    assert left.suffix == ".tmp"
    written(tmp_path, {"age": "newer"})
    assert left.exists(), "its writer may be alive"
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    other = tmp_path / f"{'0' * 64}.{'0' * 16}.tmp"
    other.touch()
    os.utime(other, (long_ago, long_ago))
    written(tmp_path, {"age": "newest"})
    assert set(tmp_path.iterdir()) == {path, other}, "another thread's is left to that thread"
    assert read(path)[0].facts["age"] == "newest"


def test_nothing_is_removed_where_there_is_no_folder(tmp_path):
    remove_unfinished(file_of(tmp_path / "none", "t"))
    assert list(tmp_path.iterdir()) == []
