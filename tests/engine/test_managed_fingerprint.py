"""What rows depend on is told apart: weights, however they change, and everything else (B64)."""

from __future__ import annotations

import pytest
import torch

from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.managing import fingerprint
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


def written_to(model):
    with torch.no_grad():
        next(model.parameters()).add_(0.001)


def loaded_again(model):
    model.load_state_dict(tiny_model("llama", seed=1).state_dict())


def one_replaced(model):
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)


def scaled(model):
    model.config.rope_parameters["rope_theta"] = 5e5


def adapted(model):
    model.active_adapters = lambda: ["other"]


@pytest.mark.parametrize("change", [written_to, loaded_again, one_replaced, scaled, adapted])
def test_a_change_shows(change):
    adapter = ModelAdapter(tiny_model("llama"))
    tokenizer = ChatTokenizer(byte_tokenizer())
    before = fingerprint(adapter, tokenizer)
    adapter.plain_logits([1, 2, 3])
    assert fingerprint(adapter, tokenizer) == before, "a pass changes nothing"
    change(adapter.model)
    after = fingerprint(adapter, tokenizer)
    assert after != before
    assert after.keys() == before.keys()
    adapter.close()


def test_other_models_and_dtypes():
    found = set()
    for model in (tiny_model("llama"), tiny_model("qwen2"), tiny_model("llama").half()):
        adapter = ModelAdapter(model)
        found.add(tuple(sorted(fingerprint(adapter, None).items())))
        adapter.close()
    assert len(found) == 3
