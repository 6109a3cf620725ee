"""What tests of archives share: rows to put in, and a check of books against storages and files."""

from __future__ import annotations

import torch

from sidequest_langchain.kv.archive_file import header_of, payload_bytes, write_archive

FINGERPRINT = {"model": "m1", "dtype": "float32", "adapter": "none"}
KB = 1024


def rows(seed, n_bytes=4 * KB):
    return {"rows": torch.full((n_bytes // 4,), float(seed))}


def cpu_storages(archive):
    """Bytes in memory, at the storages."""
    found = {}
    for entry in archive._cpu.values():
        for tensor in entry.copies.tensors().values():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def files(archive):
    folder = archive._folder
    return list(folder.path.iterdir()) if folder is not None and folder.path.exists() else []


def check(archive):
    """Books agree with storages and files, and both caps hold."""
    assert archive.n_cpu_bytes == cpu_storages(archive) <= archive.cpu_bytes
    on_disk = sum(path.stat().st_size for path in files(archive))
    assert archive.n_disk_bytes == on_disk <= archive.disk_bytes
    assert len(files(archive)) == len(archive._disk)
    assert archive.n_entries == len(archive._cpu) + len(archive._disk)


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
