"""Models with int8 weights: what becomes of them, and when they stay dense."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from sidequest_langchain.errors import ConfigError, ModelError
from sidequest_langchain.models import loading, quantising
from sidequest_langchain.models.int8 import Int8Linear
from sidequest_langchain.models.loading import load
from sidequest_langchain.models.quantising import QuantisationError, quantise_weights
from tests.models.test_loading import saved  # noqa: F401
from tests.support.tiny import tiny_model

IDS = [3 + 7 * i % 90 for i in range(40)]


def linears(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | Int8Linear)]


def logits(model: nn.Module, ids: list[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


class TestQuantised:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt_neox"])
    def test_every_linear_layer_is_replaced_and_says_nearly_the_same(self, family):
        model = tiny_model(family)
        before, n = logits(model), len(linears(model))
        done = quantise_weights(model, IDS, most_kl=1.0)

        assert done.n_layers == n
        assert all(type(layer) is Int8Linear for layer in linears(model))
        spread = float(before.std())
        assert float((logits(model) - before).abs().mean()) < 0.1 * spread
        assert not torch.equal(logits(model), before)

    def test_only_what_stands_behind_the_last_attention_may_leave_tokens_out(self):
        model = tiny_model("llama")
        quantise_weights(model, IDS, most_kl=1.0)
        last = f"layers.{len(model.model.layers) - 1}."
        found = {
            name.partition(last)[2]
            for name, m in model.named_modules()
            if isinstance(m, Int8Linear) and m._group._is_after_attention
        }

        names = {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
        assert found == names

    def test_a_router_stays_dense(self):
        model = tiny_model("qwen3_moe")
        quantise_weights(model, IDS, most_kl=1.0)

        left = {
            name.rsplit(".", 1)[-1] for name, m in model.named_modules() if type(m) is nn.Linear
        }
        assert left <= {"gate"}

    def test_the_dense_weights_are_let_go(self):
        model = tiny_model("llama")
        dense = [weakref.ref(layer) for layer in linears(model)]
        places = {name: p.data_ptr() for name, p in model.named_parameters()}
        done = quantise_weights(model, IDS, most_kl=1.0)
        gc.collect()

        assert all(layer() is None for layer in dense)
        # What stays dense is a copy: a view would keep the whole mapped file of a checkpoint.
        assert all(p.data_ptr() != places[name] for name, p in model.named_parameters())
        assert done.n_bytes == sum(m.out_features * (m.in_features + 8) for m in linears(model))

    def test_the_divergence_is_that_of_the_words(self):
        model = tiny_model("llama")
        before = torch.log_softmax(logits(model), -1)
        done = quantise_weights(model, IDS, most_kl=1.0)
        after = torch.log_softmax(logits(model), -1)

        assert done.kl == pytest.approx(
            float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-3
        )
        assert done.kl > 0

    def test_a_short_context_is_probed_as_far_as_it_goes(self):
        model = tiny_model("gpt2", max_position_embeddings=32)

        assert len(IDS) > 32
        assert quantise_weights(model, IDS, most_kl=1.0).kl < 1.0

    def test_a_model_that_says_something_else_stays_as_it_was(self):
        model = tiny_model("llama")
        before, layers = logits(model), linears(model)

        with pytest.raises(QuantisationError, match="divergence"):
            quantise_weights(model, IDS, most_kl=1e-9)

        assert torch.equal(logits(model), before)
        assert all(a is b for a, b in zip(linears(model), layers, strict=True))

    def test_a_kernel_that_is_wrong_is_noticed(self, monkeypatch):
        real = quantising.Int8Product.__call__
        monkeypatch.setattr(
            quantising.Int8Product, "__call__", lambda self, x: real(self, x) * 1.0001
        )
        quantising._check_kernel.cache_clear()
        try:
            with pytest.raises(QuantisationError, match="not exact"):
                quantise_weights(tiny_model("llama"), IDS)
        finally:
            quantising._check_kernel.cache_clear()

    def test_a_build_without_the_kernel_is_noticed(self, monkeypatch):
        def missing(*given: object) -> None:
            msg = "'_OpNamespace' 'onednn' object has no attribute 'qlinear_prepack'"
            raise AttributeError(msg)

        monkeypatch.setattr(quantising, "Int8Product", missing)
        quantising._check_kernel.cache_clear()
        try:
            with pytest.raises(QuantisationError, match="no int8 product"):
                quantise_weights(tiny_model("llama"), IDS)
        finally:
            quantising._check_kernel.cache_clear()


@pytest.mark.usefixtures("saved")
class TestLoading:
    @pytest.fixture(autouse=True)
    def _lenient(self, monkeypatch):
        """Random weights say something else with any rounding: what is tested here is the way."""
        monkeypatch.setattr(
            loading, "quantise_weights", lambda model, ids: quantise_weights(model, ids, most_kl=9)
        )

    @pytest.mark.parametrize(
        ("given", "is_int8"),
        [
            ({}, False),
            ({"quantization": "none"}, False),
            ({"quantization": "auto"}, True),
            ({"quantization": "int8"}, True),
            ({"quantization": "auto", "dtype": "float32"}, False),
            ({"quantization": "int8", "dtype": "float32"}, True),
            ({"quantization": "auto", "dtype": "bfloat16"}, False),
        ],
    )
    def test_when_weights_become_int8(self, saved, given, is_int8):  # noqa: F811
        loaded = load(str(saved), device="cpu", **given)

        assert (loaded.quantised is not None) == is_int8
        assert any(type(m) is Int8Linear for m in loaded.model.modules()) == is_int8
        if is_int8:
            assert loaded.quantised.n_layers == len(linears(loaded.model))

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"quantization": "int4"}, "one of auto, int8, none"),
            ({"quantization": "int8", "dtype": "bfloat16"}, "float32 models on a CPU"),
            ({"quantization": "int8", "device": "auto", "device_map": {"": "cpu"}}, "device map"),
        ],
    )
    def test_what_cannot_be_had_is_refused_before_loading(self, saved, given, said):  # noqa: F811
        with pytest.raises(ConfigError, match=said):
            load(str(saved), **{"device": "cpu", **given})

    def test_auto_falls_back_and_says_why(self, saved, monkeypatch, caplog):  # noqa: F811
        monkeypatch.setattr(
            loading, "quantise_weights", lambda model, ids: quantise_weights(model, ids, most_kl=0)
        )
        with caplog.at_level(logging.WARNING):
            loaded = load(str(saved), device="cpu", quantization="auto")

        assert loaded.quantised is None
        assert "dense weights: its words change" in caplog.text
        with pytest.raises(ModelError, match="quantization='none'"):
            load(str(saved), device="cpu", quantization="int8")
