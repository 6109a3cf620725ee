"""Tiny models with random weights, one per family, made so that mistakes show.

The default initialisation makes attention almost uniform: a wrong prefix, mask or position
would not change the greedy token. Here every matrix has a large spread and every bias, norm
and sink is set off its neutral value (`tests/support/test_support.py` checks that it
shows). Head sizes and query groups differ between families. It must not know this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from tests.support.tok import BOS, END, VOCAB_SIZE, byte_tokenizer

_TOK = byte_tokenizer()
BOS_ID: int = _TOK.convert_tokens_to_ids(BOS)
END_ID: int = _TOK.convert_tokens_to_ids(END)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": END_ID,
    "pad_token_id": END_ID,
    "tie_word_embeddings": False,
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def _heads(n_heads: int, n_kv_heads: int, head_dim: int | None = None) -> dict[str, int]:
    given = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}
    return given if head_dim is None else {**given, "head_dim": head_dim}


_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    # 2 layers x (K, V) x 2 heads x 16 x 4 bytes = 512 bytes of KV per token
    "llama": ("Llama", _heads(4, 2, 16)),
    "qwen2": ("Qwen2", _heads(4, 1)),
    "qwen3": ("Qwen3", _heads(4, 4, 24)),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_heads(8, 2, 8),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # every layer is local: four of them reach 60 tokens back
    "mistral": (
        "Mistral",
        {**_heads(6, 2, 16), "num_hidden_layers": 4, "sliding_window": 16},
    ),
    "gemma2": (
        "Gemma2",
        {
            **_heads(4, 2, 20),
            "sliding_window": 8,
            "layer_types": [_LOCAL, _GLOBAL],
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 12.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **_heads(4, 1, 32),
            "num_hidden_layers": 3,
            "sliding_window": 12,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
            "query_pre_attn_scalar": 32,
        },
    ),
    "phi3": ("Phi3", _heads(8, 4)),
    "granite": (
        "Granite",
        {
            **_heads(4, 2),
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.8,
        },
    ),
    "olmo2": ("Olmo2", _heads(8, 2)),
    "cohere2": (
        "Cohere2",
        {
            **_heads(8, 4, 8),
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": [_LOCAL, _LOCAL, _GLOBAL],
            "logit_scale": 0.5,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_heads(8, 2, 16),
            "sliding_window": 8,
            "layer_types": [_LOCAL, _GLOBAL],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "gpt2": ("GPT2", {"num_attention_heads": 4}),
    "opt": (
        "OPT",
        {"num_attention_heads": 2, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    ),
    "starcoder2": ("Starcoder2", {**_heads(4, 2), "sliding_window": None}),
    "gpt_neox": ("GPTNeoX", {"num_attention_heads": 4, "rotary_pct": 0.5}),
}


def tiny_model(family: str = "llama", *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A model of `family` in fp32 on the CPU, in eval mode.

    Args:
        family: A key of `FAMILIES`.
        seed: Its weights; the global random state is neither read nor changed.
        config_overrides: Fields of the family's config, for example
            `max_position_embeddings=64`, `num_key_value_heads=1`, `num_hidden_layers=4`.
    """
    name, settings = _SETTINGS[family]
    return _built(name, {**settings, **config_overrides}, seed=seed)


def _family(family: str) -> Callable[..., PreTrainedModel]:
    def make(*, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
        return tiny_model(family, seed=seed, **config_overrides)

    return make


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {name: _family(name) for name in _SETTINGS}
"""Families that must work; `FAMILIES[name](seed=..., **config_overrides)`."""


def _built(name: str, settings: Mapping[str, Any], *, seed: int) -> PreTrainedModel:
    name, _, head = name.partition(":")
    config_type: type[PreTrainedConfig] = getattr(hf, f"{name}Config")
    model_name = name.removesuffix("Text") + (head or "ForCausalLM")
    model_type: type[PreTrainedModel] = getattr(hf, model_name, None) or getattr(
        hf, f"{name}{head or 'LMHeadModel'}"
    )
    config = config_type(**{**_COMMON, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type(config)
    # Gemma multiplies embeddings by sqrt(hidden_size); unchecked, they would drown attention.
    is_scaled = config.model_type.startswith("gemma")
    spread_weights(model, seed=seed, embedding_std=config.hidden_size**-0.5 if is_scaled else 1.0)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=END_ID
    )
    return model.eval().requires_grad_(requires_grad=False)


def spread_weights(
    model: nn.Module, *, seed: int, gain: float = 2.0, embedding_std: float = 1.0
) -> None:
    """Redraw every parameter of `model` in place, with a large spread.

    Matrices get a standard deviation of `gain / sqrt(fan_in)` (0.25 at 64 inputs),
    embeddings `embedding_std`, biases 0.3, sinks 1; norm weights keep their mean and get 0.2.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(parameter.mean() + 0.2 * noise)
            elif id(parameter) in embeddings:
                parameter.copy_(embedding_std * noise)
            else:
                parameter.copy_(noise * gain / math.sqrt(min(parameter.shape[-2:])))


def _refused(name: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    return lambda: _built(name, settings, seed=0)


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": _refused(
        "Qwen3Next",
        **_heads(4, 2, 16),
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "deepseek_v3": _refused(
        "DeepseekV3",
        **_heads(4, 4),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "falcon": _refused("Falcon", num_attention_heads=4, ffn_hidden_size=96),
    "bloom": _refused("Bloom", n_head=4),
    "mamba": _refused("Mamba", state_size=8),
    "t5": _refused(
        "T5:ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4
    ),
}
"""Architectures that must be refused by name: a hybrid with linear attention, MLA, two that
bypass the attention interface, a state-space model, an encoder-decoder."""
