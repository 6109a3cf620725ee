"""Loading from a directory: ready to read from, or one clear error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sidequest_langchain.errors import (
    ConfigError,
    ModelError,
    ModelFilesError,
    UnsupportedModelError,
)
from sidequest_langchain.models import placement, versions
from sidequest_langchain.models.loading import load
from sidequest_langchain.models.placement import choose_placement
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16, as most checkpoints are."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


class TestLoaded:
    def test_is_ready_to_read_from(self, saved):
        loaded = load(str(saved), device="cpu")

        assert not loaded.model.training
        assert not any(weight.requires_grad for weight in loaded.model.parameters())
        assert (loaded.name, loaded.revision, loaded.digest) == ("tiny-llama", None, None)
        assert loaded.tokenizer.chat_template == byte_tokenizer().chat_template

    def test_says_what_the_saved_model_says(self, saved):
        loaded = load(str(saved), device="cpu")

        expected = tiny_model("llama")
        for weight in expected.parameters():
            weight.data = weight.data.bfloat16().float()
        ids = torch.arange(5, 40)[None]
        with torch.no_grad():
            assert torch.equal(loaded.model(ids).logits, expected(ids).logits)

    @pytest.mark.parametrize(
        ("asked", "found"),
        [
            ("auto", torch.float32),
            ("float32", torch.float32),
            ("bfloat16", torch.bfloat16),
            ("torch.float16", torch.float16),
        ],
    )
    def test_dtype_on_a_cpu(self, saved, asked, found):
        assert load(str(saved), dtype=asked, device="cpu").model.dtype is found

    def test_a_device_map_is_honoured(self, saved):
        spread = {"model": "cpu", "lm_head": "disk"}

        loaded = load(str(saved), device_map=spread)

        assert loaded.model.hf_device_map == spread
        ids = torch.arange(5, 40)[None]
        with torch.no_grad():
            whole = load(str(saved), device="cpu").model
            assert torch.equal(loaded.model(ids).logits, whole(ids).logits)

    def test_the_libraries_settings_are_put_back(self, saved):
        log = transformers.utils.logging
        log.enable_progress_bar()
        log.set_verbosity_warning()

        load(str(saved), device="cpu")

        assert log.is_progress_bar_enabled()
        assert log.get_verbosity() == log.WARNING

    def test_the_libraries_print_nothing(self, saved, capfd):
        load(str(saved), device="cpu")

        said = capfd.readouterr()
        assert said.out + said.err == ""


class TestRefusedBeforeWeights:
    """Only config.json is there: weights cannot have been looked for."""

    @pytest.mark.parametrize(
        ("config", "match"),
        [
            (
                {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
                "T5ForConditionalGeneration cannot be served.*encoder-decoder",
            ),
            (
                {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
                "BartForConditionalGeneration cannot be served.*encoder-decoder",
            ),
            (
                {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config"}},
                "strange cannot be served.*code of its own, which is never run",
            ),
            ({"model_type": "strange"}, r"transformers 5\..* does not know .* 'strange'"),
            ({"model_type": "vit", "architectures": ["ViTModel"]}, "no causal language model"),
        ],
    )
    def test_by_name(self, tmp_path, config, match):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "strange.py").write_text("raise SystemExit('it was run')")

        with pytest.raises(UnsupportedModelError, match=match):
            load(str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("{", "cannot be read"),
            ("[]", "names no model_type"),
            ("{}", "names no model_type"),
            ('{"model_type": "llama", "num_attention_heads": 0}', "refused by transformers"),
        ],
    )
    def test_damaged_config(self, tmp_path, text, match):
        (tmp_path / "config.json").write_text(text)

        with pytest.raises(ModelFilesError, match=match):
            load(str(tmp_path))


class TestDamaged:
    def test_truncated_weights(self, folder):
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])

        with pytest.raises(ModelFilesError, match="could not load tiny-llama at"):
            load(str(folder), device="cpu")

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()

        with pytest.raises(ModelFilesError, match="could not load tiny-llama at"):
            load(str(folder), device="cpu")

    def test_a_weight_that_is_missing_is_never_made_up(self, folder):
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

        with pytest.raises(ModelFilesError, match=r"lacks 1 weights \(model\.layers\.1\.mlp\.up"):
            load(str(folder), device="cpu")

    def test_no_tokenizer(self, folder):
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()

        with pytest.raises(ModelFilesError, match="tokenizer"):
            load(str(folder), device="cpu")

    def test_a_directory_made_here_is_held_against_its_manifest(self, folder):
        files = {"model.safetensors": {"size": 1, "sha256": "0"}}
        facts = {"name": "x", "sha256": "0", "source": "x", "converter": "x", "files": files}
        (folder / "sidequest.json").write_text(json.dumps({"format": 1, **facts}))

        with pytest.raises(ModelFilesError, match=r"damaged: model\.safetensors has"):
            load(str(folder), device="cpu")


class TestPlacement:
    """Decided without the devices: what is there is pretended."""

    @pytest.fixture
    def cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def _choose(self, **given):
        facts = {"dtype": "auto", "device": "auto", "device_map": None, "was_unpacked": False}
        chosen = choose_placement(**{**facts, **given})
        return chosen.dtype, chosen.device and str(chosen.device)

    def test_cuda_first_as_the_checkpoint_was_saved(self, cuda):
        assert self._choose() == (None, "cuda")

    def test_unpacked_weights_are_bfloat16_there(self, cuda):
        assert self._choose(was_unpacked=True) == (torch.bfloat16, "cuda")

    def test_mps_where_there_is_no_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)

        assert self._choose() == (None, "mps")

    def test_a_cpu_computes_in_float32(self, cuda):
        assert self._choose(device="cpu", was_unpacked=True) == (torch.float32, "cpu")

    def test_a_map_decides_instead_of_a_device(self, cuda):
        assert self._choose(device_map="auto") == (None, None)
        assert self._choose(device_map={"a": 0, "b": "cpu"}) == (None, None)
        assert self._choose(device_map={"": "cpu"}) == (torch.float32, None)

    def test_a_map_without_any_accelerator(self, monkeypatch):
        monkeypatch.setattr(placement, "_best_device", lambda: torch.device("cpu"))

        assert self._choose(device_map="auto") == (torch.float32, None)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"dtype": "int8"}, "dtype is 'auto', 'float32', .*found 'int8'"),
            ({"device": "gpu"}, "device is 'auto', .*found 'gpu'"),
            ({"device": "cuda:7"}, "'cuda:7', but torch sees . CUDA devices"),
            ({"device": "cpu", "device_map": "auto"}, "contradict"),
        ],
    )
    def test_refused(self, given, match):
        with pytest.raises(ConfigError, match=match):
            self._choose(**given)

    def test_mps_that_is_not_there(self, monkeypatch):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

        with pytest.raises(ConfigError, match="no MPS device"):
            self._choose(device="mps")

    def test_is_refused_before_anything_is_fetched(self, home):
        with pytest.raises(ConfigError, match="dtype"):
            load("smollm2-135m", dtype="int8", progress=lambda stage: pytest.fail("it began"))


class TestVersions:
    @pytest.mark.parametrize("installed", ["4.57.1", "5.23.9", "6.0.0"])
    def test_another_transformers_is_refused(self, saved, monkeypatch, installed):
        monkeypatch.setattr(versions, "version", lambda name: installed)

        with pytest.raises(ModelError, match=rf"transformers {installed} .*>=5\.24,<5\.25"):
            load(str(saved))

    def test_a_development_build_of_this_one_is_accepted(self, monkeypatch):
        monkeypatch.setattr(versions, "version", lambda name: "5.24.1.dev0")

        versions.check_transformers()

    def test_what_is_checked_is_what_the_package_asks_for(self):
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()

        lower, upper = versions._wanted().split(",")
        assert f'"transformers{lower},{upper}"' in text


@pytest.mark.real
def test_the_small_real_model_answers(real_smollm):
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = real_smollm.tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    output = real_smollm.model.generate(**inputs, max_new_tokens=12, do_sample=False)

    answer = output[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in real_smollm.tokenizer.decode(answer, skip_special_tokens=True)
