"""The Hub's client is replaced: what is asked of it, in which order, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from sidequest_langchain.errors import ModelFilesError, UnknownModelError, UnsupportedModelError
from sidequest_langchain.models.checkpoint import judge_checkpoint
from sidequest_langchain.models.hub import from_hub, wanted_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("README.md", "config.json", "model.safetensors", "tokenizer.json", "onnx/model.onnx")


class FakeHub:
    """Answers about one model and notes what is downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: tuple[str, ...] = FILES
        self.error: Exception | None = None
        self.downloads: list[list[str]] = []
        self.asked: list[str | None] = []

    def model_info(self, repo: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        self.asked.append(revision)
        if self.error is not None:
            raise self.error
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        return SimpleNamespace(sha=COMMIT, siblings=siblings)

    def snapshot_download(self, repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert revision == COMMIT
        self.downloads.append(allow_patterns)
        return str(self.folder)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    hub = FakeHub(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def _accept(folder: Path) -> None:
    assert (folder / "config.json").is_file()


def test_one_format_of_the_weights_pinned_to_the_commit(fake):
    snapshot = from_hub("owner/name", judge=_accept)

    assert snapshot.commit == COMMIT
    assert fake.asked == [None]
    assert fake.downloads == [
        ["config.json"],
        ["model.safetensors", "config.json", "tokenizer.json"],
    ]


def test_a_revision_is_passed_on(fake):
    from_hub("owner/name", "v2", judge=_accept)

    assert fake.asked == ["v2"]


def test_what_is_not_wanted_is_refused_before_its_weights_are_fetched(fake):
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (fake.folder / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))

    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        from_hub("owner/name", judge=judge_checkpoint)

    assert fake.downloads == [["config.json"]]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
        (["consolidated.safetensors", "model-1.safetensors"], ["model-1.safetensors"]),
        (["original/model.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["additional_chat_templates/x.jinja"], ["additional_chat_templates/x.jinja"]),
        (["chat_template.jinja", "tokenizer.model"], ["chat_template.jinja", "tokenizer.model"]),
        (["modeling_x.py", "x.gguf", "README.md"], []),
    ],
)
def test_which_files_are_wanted(files, wanted):
    assert wanted_files(files) == wanted


def test_gguf_files_only(fake):
    fake.files = ("README.md", "x.Q4_K_M.gguf")

    with pytest.raises(ModelFilesError, match=r"\.gguf files only.*x\.Q4_K_M\.gguf"):
        from_hub("owner/name", judge=_accept)


def _answer(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.org"))


def test_a_model_that_is_not_there(fake):
    fake.error = RepositoryNotFoundError("no", response=_answer(404))

    with pytest.raises(UnknownModelError, match=r"has no model 'owner/nam' .*HF_TOKEN"):
        from_hub("owner/nam", judge=_accept)


def test_a_gated_model(fake):
    fake.error = GatedRepoError("no", response=_answer(403))

    with pytest.raises(ModelFilesError, match="accept its terms"):
        from_hub("owner/name", judge=_accept)


def test_a_download_that_fails(fake, monkeypatch):
    def fail(*words: object, **given: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)

    with pytest.raises(ModelFilesError, match=r"could not download owner/name.*No space left"):
        from_hub("owner/name", judge=_accept)


def test_without_network_the_cache_serves(fake, monkeypatch, tmp_path):
    monkeypatch.undo()  # the real snapshot_download, over a cache made by hand
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    fake.error = ConnectionError("Name or service not known")
    repo = tmp_path / "cache" / "models--owner--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)

    found = from_hub("owner/name", judge=_accept)

    assert (found.folder, found.commit) == (snapshot, COMMIT)

    with pytest.raises(ModelFilesError, match=r"cannot be reached \(Name or service.*local cache"):
        from_hub("owner/other", judge=_accept)
