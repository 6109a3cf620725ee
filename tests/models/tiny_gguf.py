"""Writes a tiny Llama of known weights as a `.gguf` file, unquantised, as llama.cpp would.

It must not know how such a file is converted.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from tests.support.templates import PLAIN
from tests.support.tiny import BOS_ID, END_ID
from tests.support.tok import CONTROL, byte_tokenizer


def write_tiny_gguf(path: Path, model: PreTrainedModel) -> None:
    """Write a Llama with the byte-level tokenizer of the tests."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        weights = tensor.numpy().astype(np.float32)
        if stem.endswith("q_proj"):
            weights = _interleaved(weights, config.num_attention_heads)
        if stem.endswith("k_proj"):
            weights = _interleaved(weights, config.num_key_value_heads)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = byte_tokenizer()
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in tokens]
    state = tokenizer.backend_tokenizer.__getstate__()
    merges = __import__("json").loads(state)["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(END_ID)
    writer.add_chat_template(PLAIN)


def _interleaved(weights: npt.NDArray[np.float32], n_heads: int) -> npt.NDArray[np.float32]:
    """The row order in which llama.cpp keeps the query and key weights of a Llama."""
    n_rows, n_columns = weights.shape
    halves = weights.reshape(n_heads, 2, n_rows // n_heads // 2, n_columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(n_rows, n_columns))
