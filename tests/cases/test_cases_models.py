"""Models that come in odd states or must be refused, given as loaded objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import UnsupportedModelError
from tests.support.tiny import REFUSED, tiny_model
from tests.support.tok import VOCAB_SIZE, byte_tokenizer

MakeChat = Callable[..., Any]
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
RECURRENT = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 16},
    "recurrent_gemma": {"head_dim": 16, "lru_width": 64},
}


def refused(weights: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        SideQuestChatModel.from_model(weights, byte_tokenizer())
    assert isinstance(caught.value, ValueError)
    assert not any(t.name == "sidequest-engine" for t in threading.enumerate())
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_when_the_chat_model_is_made(name: str):
    weights = REFUSED[name]()
    assert type(weights).__name__ in refused(weights)


@pytest.mark.parametrize("kind", RECURRENT)
def test_any_recurrent_layer_is_refused_by_its_type(kind: str):
    config = AutoConfig.for_model(kind, **{**SMALL, **RECURRENT[kind]})
    with init_empty_weights():
        weights = AutoModelForCausalLM.from_config(config)
    message = refused(weights)
    assert type(weights).__name__ in message
    assert "no token axis" in message


def test_weights_that_are_not_there_are_named():
    config = tiny_model("llama").config
    with init_empty_weights():
        weights = AutoModelForCausalLM.from_config(config)
    assert "model.embed_tokens.weight" in refused(weights)


@pytest.mark.parametrize("is_dispatched", [False, True])
def test_a_model_is_never_moved(
    make_chat: MakeChat, monkeypatch: pytest.MonkeyPatch, is_dispatched: bool
):
    weights = tiny_model("llama")
    if is_dispatched:
        weights = dispatch_model(weights, device_map={"": "cpu"}, force_hooks=True)
    right = make_chat().expected("Plan")
    places = {name: p.data_ptr() for name, p in weights.named_parameters()}

    def move(*_: Any, **__: Any) -> None:
        raise AssertionError

    for name in ("to", "cpu", "cuda", "half", "float", "bfloat16"):
        monkeypatch.setattr(torch.nn.Module, name, move)
    one = make_chat(model=weights)
    for _ in range(2):
        assert one.answered(one.chat.invoke("Plan")) == right
    assert {name: p.data_ptr() for name, p in weights.named_parameters()} == places


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_layers_with_a_window_keep_every_row_and_can_be_gone_back_in(
    make_chat: MakeChat, family: str
):
    """Branches from before and behind the window, and the same question three times."""
    one = make_chat(model=tiny_model(family), max_tokens=6)
    long = "The plan of the day is to fly from Paris to Rome, then to Oslo and back to Lisbon"
    prompts = [long[:n] for n in (10, 30, len(long))] + [long[:40] + " score", long[:9] + "END"]
    for prompt in [*prompts, *[long] * 2, *prompts]:
        reply = one.chat.invoke(prompt)
        assert one.answered(reply) == one.expected(prompt, 6)
    one.resident()
    layout = {
        tuple(t.shape[1] for t in (*s.keys, *s.values))
        for s in one.chat.engine._core.tree.segments()
    }
    assert all(len(set(lengths)) == 1 for lengths in layout), "every layer holds as many rows"


def test_a_model_trained_on_between_two_calls_is_served_in_eval_and_goes_on_training(
    make_chat: MakeChat,
):
    weights = tiny_model("llama", attention_dropout=0.5).requires_grad_()
    one = make_chat(model=weights)
    right = one.expected("Plan")
    for _ in range(2):
        weights.train()
        reply = one.chat.invoke("Plan")
        assert one.answered(reply) == right
        one.chat.kv.clear()
        weights.train()
        loss = weights(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
        loss.backward()
        assert weights.model.layers[0].self_attn.q_proj.weight.grad is not None
        weights.zero_grad()
