"""Which architectures can be served exactly, decided from the configuration by name.

What passes here is still put to the self-test at load.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from sidequest_langchain.errors import UnsupportedModelError

_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "hybrid", "chunked_attention")
"""Layer types whose state has no row per token, or whose mask is not a causal window."""

_MOVING_ROPE = ("dynamic", "longrope")
"""RoPE variants that turn the keys differently once a sequence passes a length."""


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse by name what cannot be served exactly over a segment tree.

    Raises:
        UnsupportedModelError: Encoder-decoder, recurrent or hybrid layers, latent attention,
            chunked attention, or weights that are not materialised.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        _refuse(name, "it is an encoder-decoder model; a causal decoder is needed")
    if getattr(config, "kv_lora_rank", None):
        _refuse(name, "its latent attention (MLA) keeps no keys and values by head")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    strange = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))
    if strange:
        _refuse(name, f"it has layers of type {', '.join(strange)}, whose state has no token axis")
    if not model.can_generate():
        _refuse(name, "it has no language-model head; load an AutoModelForCausalLM")
    for parameter, tensor in model.named_parameters():
        if tensor.is_meta and not hasattr(model, "hf_device_map"):
            _refuse(name, f"its weight {parameter} is not loaded (it lies on the meta device)")


def _refuse(name: str, why: str) -> None:
    msg = f"{name} cannot be served over a segment tree: {why}"
    raise UnsupportedModelError(msg)


def context_length(config: PreTrainedConfig) -> int:
    """Tokens that a model can hold.

    Where RoPE changes with the length of a sequence, cached keys are only valid below the
    length at which it changes: that is the limit then.
    """
    text = config.get_text_config()
    most: Any = getattr(text, "max_position_embeddings", None) or 2**20
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _MOVING_ROPE:
        original = rope.get("original_max_position_embeddings")
        most = original or getattr(text, "original_max_position_embeddings", None) or most
    return int(most)


def n_layers(config: PreTrainedConfig) -> int:
    """Decoder layers of a model."""
    return int(config.get_text_config().num_hidden_layers)
