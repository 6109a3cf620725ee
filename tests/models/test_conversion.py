"""The real converter on a tiny file of known weights: not a bit may change."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch

from sidequest_langchain.errors import ModelFilesError, UnsupportedModelError
from sidequest_langchain.models import conversion, gguf_file
from sidequest_langchain.models.conversion import convert_gguf
from sidequest_langchain.models.gguf_file import from_gguf
from sidequest_langchain.models.loading import load
from sidequest_langchain.models.progress import silent
from tests.models.fakes import copying_convert, files_below
from tests.models.tiny_gguf import write_tiny_gguf
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which `tiny.gguf`, beside it, was converted once."""
    folder = tmp_path_factory.mktemp("converted")
    write_tiny_gguf(folder / "tiny.gguf", tiny_model("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIDEQUEST_HOME", str(folder / "home"))
        from_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture
def tiny_gguf(converted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIDEQUEST_HOME", str(converted / "home"))
    return converted / "tiny.gguf"


def test_weights_tokenizer_and_template_are_those_of_the_file(tiny_gguf):
    loaded = load(str(tiny_gguf), progress=silent)

    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    text = "Plan a trip to 城市, then 你好 🙂"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    assert loaded.tokenizer.chat_template == byte_tokenizer().chat_template
    assert loaded.tokenizer.eos_token == byte_tokenizer().eos_token
    assert loaded.name == "tiny"
    assert loaded.digest is not None


def test_nothing_is_left_but_the_model_and_a_note(tiny_gguf, converted):
    found = files_below(converted / "home")
    notes = {name for name in found if name.startswith("gguf-seen/")}
    names = {name.split("/")[-1] for name in found - notes}
    assert len(notes) == 1
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "sidequest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_second_time_nothing_is_read_or_converted(tiny_gguf, monkeypatch):
    monkeypatch.setattr(gguf_file, "file_sha256", lambda *_: pytest.fail("it was read again"))

    from_gguf(tiny_gguf, convert=_never_convert)


def test_the_same_bytes_elsewhere_are_not_converted_again(tiny_gguf, tmp_path):
    shutil.copyfile(tiny_gguf, tmp_path / "tiny.gguf")

    assert from_gguf(tmp_path / "tiny.gguf", convert=_never_convert) == from_gguf(tiny_gguf)


def test_changed_bytes_are_converted_anew(home, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF1")
    first = from_gguf(file, convert=copying_convert)
    file.write_bytes(b"GGUF22")

    second = from_gguf(file, convert=copying_convert)

    assert first != second
    assert (second / "model.safetensors").read_bytes() == b"GGUF22"


def test_a_damaged_conversion_is_made_anew(home, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF1")
    place = from_gguf(file, convert=copying_convert)
    (place / "model.safetensors").write_bytes(b"")

    from_gguf(file, convert=copying_convert)

    assert (place / "model.safetensors").read_bytes() == b"GGUF1"


class TestRefused:
    def test_no_gguf_file(self, home, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")

        with pytest.raises(ModelFilesError, match="is no GGUF file"):
            from_gguf(tmp_path / "x.gguf")

        assert not [name for name in files_below(home) if "gguf-seen" not in name]

    def test_truncated_file(self, home, tiny_gguf, tmp_path):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(tiny_gguf.read_bytes()[:-2000])
        (tmp_path / "out").mkdir()

        with pytest.raises(ModelFilesError, match=r"could not convert cut\.gguf.*may be damaged"):
            convert_gguf(cut, tmp_path / "out", lambda doing: None)

    def test_architecture_that_transformers_cannot_read(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "whistler")
        writer.add_name("x")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        (tmp_path / "out").mkdir()

        with pytest.raises(UnsupportedModelError, match="whistler is not supported"):
            convert_gguf(tmp_path / "x.gguf", tmp_path / "out", lambda doing: None)

    def test_one_shard_of_several(self, home, tmp_path):
        shard = tmp_path / "big-00001-of-00003.gguf"
        shard.write_bytes(b"GGUF")

        with pytest.raises(ModelFilesError, match="one shard of several"):
            from_gguf(shard, convert=_never_convert)

    def test_full_disk_in_the_worker(self, tmp_path, monkeypatch):
        (tmp_path / "x.gguf").write_bytes(b"GGUF")

        def run_child(arguments, log, **given):
            log.write_text('chatter\nsidequest-answer: {"failure": "disk", "message": "full"}\n')
            return 1

        monkeypatch.setattr(conversion, "run_child", run_child)

        with pytest.raises(ModelFilesError, match="no space left"):
            convert_gguf(tmp_path / "x.gguf", tmp_path, lambda doing: None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk"),
        (RuntimeError('I/O error: Os { code: 28, kind: StorageFull, message: "No space'), "disk"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"), "memory"),
        (ValueError("GGUF model with architecture x is not supported yet."), "unsupported"),
        (ValueError("Unrecognized configuration class"), "unsupported"),
        (ValueError("tensor has wrong shape"), "other"),
    ],
)
def test_the_worker_sorts_its_failures(error, kind):
    from sidequest_langchain.models import gguf_worker

    assert gguf_worker._kind(error) == kind


def _never_convert(blob: Path, folder: Path, on_stage: object) -> None:
    pytest.fail("nothing was to be converted")
