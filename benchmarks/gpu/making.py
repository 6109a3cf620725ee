"""Models of real shapes with random weights, made on the device: nothing is fetched.

With the usual initialisation attention is almost uniform, and a wrong prefix or mask would not
change a greedy token. Here every matrix has a large spread and nothing is left at its neutral
value.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

_SHAPES = {
    "qwen2-0.5b": (
        "Qwen2",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "llama-1b": (
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "tiny": (
        "Qwen2",
        {
            "vocab_size": 416,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
GAIN = 1.5
"""Standard deviation of a matrix is this over the root of its inputs."""


def made(shape: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model of one of the shapes; the same weights for every dtype, up to rounding.

    Args:
        shape: `qwen2-0.5b`, `llama-1b` or `tiny`.
        dtype: Of its weights.
        device: Where they are drawn and stay.
        seed: Of the weights.
    """
    name, sizes = _SHAPES[shape]
    config = getattr(transformers, f"{name}Config")(
        **sizes, max_position_embeddings=16_384, tie_word_embeddings=False
    )
    config._attn_implementation = "sdpa"
    with torch.device(device), _no_init():
        model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(torch.float32)
    _spread(model, torch.Generator(device).manual_seed(seed))
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(dtype).eval().requires_grad_(requires_grad=False)


def _no_init() -> object:
    """Weights are drawn by `_spread`; to initialise them too would cost seconds on a host."""
    return no_init_weights()


@torch.no_grad()
def _spread(model: nn.Module, generator: torch.Generator) -> None:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, weight in model.named_parameters():
        draw = partial(weight.normal_, generator=generator)
        if name.endswith("bias"):
            draw(0.0, 0.3)
        elif weight.dim() == 1:
            draw(1.0, 0.2)
        elif id(weight) in tables:
            draw(0.0, 1.0)
        else:
            draw(0.0, GAIN / math.sqrt(weight.shape[-1]))


def tokenizer_for(model: PreTrainedModel) -> PreTrainedTokenizerFast:
    """A tokenizer whose every id is a word of its own."""
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", unk_token="w0")


def prompt(n_tokens: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Token ids without a pattern; those of two seeds differ from the first one on."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, n_vocab, (n_tokens,), generator=generator).tolist()
    ids[0] = 1 + seed % (n_vocab - 1)
    return ids
