"""What `model=` may be, and what is said when it is nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from sidequest_langchain.errors import ConfigError, ModelFilesError, UnknownModelError
from sidequest_langchain.models import ensure, reference
from sidequest_langchain.models.catalogue import CATALOGUE, DEFAULT_MODEL
from sidequest_langchain.models.loading import load
from sidequest_langchain.models.progress import silent
from sidequest_langchain.models.pulling import pull
from sidequest_langchain.models.reference import obtain
from tests.models.fakes import copying_convert
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory as users have them."""
    place = tmp_path / "my-model"
    tiny_model("llama").save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every host that is looked up or called; none is reached."""
    called: list[str] = []

    def refuse(*words: object, **given: object) -> None:
        called.append(str(words))
        raise OSError("no network in this test")  # noqa: EM101

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return called


class TestNoNetwork:
    def test_a_local_directory_never_contacts_the_hub(self, home, folder, calls):
        load(str(folder), progress=silent)

        assert calls == []

    def test_a_catalogue_name_never_contacts_the_hub(self, home, entry, shop, calls, monkeypatch):
        monkeypatch.setitem(CATALOGUE, "tiny", entry)
        pull(entry, download=shop, convert=copying_convert)

        assert ensure("tiny", progress=silent) == home / "models" / "tiny"
        assert calls == []

    def test_a_hub_id_does_and_fails_fast_and_clearly(self, home, calls):
        with pytest.raises(ModelFilesError, match=r"'owner/name'.*cannot be reached.*catalogue"):
            load("owner/name")

        assert calls

    @pytest.mark.parametrize("name", ["gpt2", "./gpt2", "~/gpt2", "/gpt2/x/y", "gpt2.gguf", ""])
    def test_what_is_no_hub_id_never_contacts_the_hub(self, home, calls, name):
        with pytest.raises((UnknownModelError, ModelFilesError)):
            load(name)

        assert calls == []


class TestNames:
    @pytest.mark.parametrize(
        ("typed", "meant"),
        [
            ("qwen2.5-coder-0.5", "qwen2.5-coder-0.5b"),
            ("smollm2-135M", "smollm2-135m"),
            ("smolm-135m", "smollm2-135m"),
            ("Qwen2.5-Coder-1.5B", "qwen2.5-coder-1.5b"),
        ],
    )
    def test_a_slip_gets_the_nearest_name_and_all_of_them(self, home, typed, meant):
        with pytest.raises(UnknownModelError, match=f"did you mean '{meant}'") as caught:
            ensure(typed)

        assert all(name in str(caught.value) for name in CATALOGUE)

    def test_what_is_near_nothing_gets_no_guess(self, home):
        with pytest.raises(UnknownModelError) as caught:
            ensure("zzz")

        assert "did you mean" not in str(caught.value)
        assert DEFAULT_MODEL in str(caught.value)

    def test_a_catalogue_name_is_pulled_at_the_first_use(self, home, entry, monkeypatch):
        pulled = []
        monkeypatch.setitem(CATALOGUE, "tiny", entry)
        monkeypatch.setattr(reference, "pull", lambda entry, **_: pulled.append(entry.name))

        ensure("tiny", progress=silent)

        assert pulled == ["tiny"]

    def test_a_damaged_catalogue_model_is_not_replaced_unasked(
        self, home, entry, shop, monkeypatch
    ):
        monkeypatch.setitem(CATALOGUE, "tiny", entry)
        (pull(entry, download=shop, convert=copying_convert) / "config.json").write_text("{")

        with pytest.raises(ModelFilesError, match=r"damaged.*sidequest pull tiny"):
            ensure("tiny", progress=silent)

    def test_the_catalogue_knows_the_digest(self, home, entry, shop, monkeypatch):
        monkeypatch.setitem(CATALOGUE, "tiny", entry)
        pull(entry, download=shop, convert=copying_convert)

        files = obtain("tiny", progress=silent)

        assert (files.name, files.digest, files.revision) == ("tiny", entry.sha256, None)


class TestPaths:
    def test_directory(self, home, folder):
        files = obtain(str(folder))

        assert (files.folder, files.name, files.digest) == (folder, "my-model", None)

    def test_relative_directory_shaped_like_a_hub_id(self, home, folder, calls, monkeypatch):
        monkeypatch.chdir(folder.parent.parent)

        assert ensure(f"{folder.parent.name}/my-model") == folder
        assert calls == []

    def test_directory_without_config(self, home, tmp_path):
        (tmp_path / "readme.txt").write_text("")

        with pytest.raises(ModelFilesError, match=r"no config\.json.*readme\.txt"):
            ensure(str(tmp_path))

    def test_directory_of_a_gguf_file(self, home, tmp_path):
        (tmp_path / "x.gguf").write_text("")

        with pytest.raises(ModelFilesError, match=r"give the file itself: .*x\.gguf"):
            ensure(str(tmp_path))

    def test_directory_of_an_adapter(self, home, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")

        with pytest.raises(ModelFilesError, match="merge it into its base model"):
            ensure(str(tmp_path))

    def test_path_to_nothing(self, home, tmp_path):
        with pytest.raises(ModelFilesError, match="found nothing there"):
            ensure(str(tmp_path / "no" / "such"))

    def test_path_to_another_kind_of_file(self, home, tmp_path):
        (tmp_path / "x.bin").write_text("")

        with pytest.raises(ModelFilesError, match=r"a file that is no \.gguf"):
            ensure(str(tmp_path / "x.bin"))

    def test_a_revision_is_for_hub_ids(self, home, folder):
        with pytest.raises(ConfigError, match="revision='main' is for Hub ids only"):
            ensure(str(folder), revision="main")


def test_the_home_is_the_one_that_is_named(monkeypatch, tmp_path):
    from sidequest_langchain.models.home import home as home_folder

    monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path))
    assert home_folder() == tmp_path
    monkeypatch.setenv("SIDEQUEST_HOME", "~/elsewhere")
    assert home_folder() == Path("~/elsewhere").expanduser()
    monkeypatch.delenv("SIDEQUEST_HOME")
    assert home_folder().name == "sidequest-langchain"
