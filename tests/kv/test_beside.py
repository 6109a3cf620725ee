"""Copies that are still on their way: nobody waits to make one, whoever reads one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidequest_langchain.kv import beside
from sidequest_langchain.kv.beside import Copies, CudaSide
from tests.kv.archiving import KB, check, rows


class LateSide:
    """An accelerator whose copies arrive when somebody waits for them; its tensors lie here."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._late: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        self.log.append("begin")

    def copy(self, tensor: Tensor) -> Tensor:
        self.log.append("copy")
        target = torch.full(tensor.shape, 77, dtype=tensor.dtype)
        self._late.append((target, tensor.clone()))  # its memory may be used again at once
        return target

    def end(self):
        self.log.append("end")
        late, self._late = self._late, []

        def wait() -> None:
            self.log.append("wait")
            for target, source in late:
                target.copy_(source)

        return wait


@pytest.fixture
def side(monkeypatch):
    side = LateSide()
    monkeypatch.setattr(beside, "side_of", lambda device: side)
    return side


def test_to_make_a_copy_does_not_wait_and_to_read_it_does(side):
    source = {"a": torch.randn(3, 4), "b": torch.randn(2).to(torch.bfloat16)}
    before = {name: t.clone() for name, t in source.items()}
    copies = Copies.of(source)
    assert side.log == ["begin", "copy", "copy", "end"]
    assert copies.n_bytes == 3 * 4 * 4 + 2 * 2
    source["a"].zero_()
    for _ in range(2):
        assert all(torch.equal(copies.tensors()[name], t) for name, t in before.items())
    assert side.log.count("wait") == 1


@pytest.mark.parametrize("tiers", [{"cpu_bytes": 10 * KB}, {"cpu_bytes": 5 * KB}])
def test_an_archive_gives_and_spills_what_arrived(opened, side, tiers):
    archive = opened(disk_bytes=30 * KB, **tiers)
    tickets = [archive.put(rows(seed), {}) for seed in range(3)]
    assert len(archive._disk) >= 1
    side.log.clear()
    for seed, ticket in enumerate(tickets):
        assert torch.equal(archive.get(ticket)[0]["rows"], rows(seed)["rows"])
    check(archive)
    side.log.clear()
    archive.drop(tickets[2])
    archive.put(rows(9), {})
    assert "wait" not in side.log


def test_a_copy_that_fails_is_waited_for(side, monkeypatch):
    copy, n = LateSide.copy, []

    def fails(self, tensor):
        n.append(1)
        if len(n) == 2:
            msg = "no page-locked memory"
            raise RuntimeError(msg)
        return copy(self, tensor)

    monkeypatch.setattr(LateSide, "copy", fails)
    with pytest.raises(RuntimeError, match="page-locked"):
        Copies.of({"a": torch.ones(2), "b": torch.ones(2)})
    assert side.log == ["begin", "copy", "end", "wait"]


def test_elsewhere_a_copy_is_there_at_once():
    source = torch.randn(5, 8)[:, ::2]
    copies = Copies.of({"a": source})
    [found] = copies.tensors().values()
    assert torch.equal(found, source)
    assert found.untyped_storage().nbytes() == 5 * 4 * 4
    assert beside.side_of(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_copies_are_bit_identical():
    device = torch.device("cuda")
    assert isinstance(beside.side_of(torch.device("cuda", 0)), CudaSide)
    source = {str(i): torch.randn(64, 1024, device=device)[:, i:] for i in range(8)}
    before = {name: t.cpu() for name, t in source.items()}
    copies = Copies.of(source)
    source.clear()  # its memory is free
    torch.zeros(64, 8192, device=device)
    assert all(torch.equal(copies.tensors()[name], t) for name, t in before.items())
