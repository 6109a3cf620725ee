"""Judges a model directory by its config.json, before any weights are read or fetched.

It must not know where the directory came from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sidequest_langchain.errors import ModelFilesError, UnsupportedModelError


def judge_checkpoint(folder: Path) -> None:
    """Refuse what cannot be loaded as a causal language model, by name.

    Args:
        folder: A directory with config.json; the weights need not be there yet.

    Raises:
        UnsupportedModelError: Encoder-decoder, code of its own, unknown to this transformers,
            or no causal language model.
        ModelFilesError: config.json is absent or damaged.
    """
    facts = _facts(folder)
    kind = facts.get("model_type")
    name = (facts.get("architectures") or [kind])[0]
    if facts.get("is_encoder_decoder"):
        _refuse(name, "it is an encoder-decoder model; a causal decoder is needed")
    if kind not in CONFIG_MAPPING:
        if facts.get("auto_map"):
            _refuse(name, "it brings Python code of its own, which is never run here")
        known = f"transformers {transformers.__version__} does not know the model type {kind!r}"
        _refuse(name, f"{known}; a newer release may")
    config = _config(folder, name)
    if config.is_encoder_decoder:
        _refuse(name, "it is an encoder-decoder model; a causal decoder is needed")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse(name, "it is no causal language model")


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"{folder} has no config.json, so it is no model directory"
        raise ModelFilesError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}; fetch the model again"
        raise ModelFilesError(msg) from error
    if not isinstance(found, dict) or "model_type" not in found:
        msg = f"{path} names no model_type, so it is no configuration of a model"
        raise ModelFilesError(msg)
    return found


def _config(folder: Path, name: str) -> transformers.PreTrainedConfig:
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each configuration checks itself in its own way
        msg = f"the configuration of {name} in {folder} is refused by transformers: {error}"
        raise ModelFilesError(msg) from error
    assert isinstance(config, transformers.PreTrainedConfig)
    return config


def _refuse(name: str, why: str) -> None:
    msg = f"{name} cannot be served over a segment tree: {why}"
    raise UnsupportedModelError(msg)
