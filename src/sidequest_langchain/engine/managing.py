"""What the managed cache needs from a model: its forward pass, its words, what rows depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.pacing import prefill_chunk_of
from sidequest_langchain.engine.tokenizer import ChatTokenizer
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.kv.tree import SegmentTree
from sidequest_langchain.policy.importance import predictor_for
from sidequest_langchain.policy.manager import Manager
from sidequest_langchain.policy.schedule import budget_in_bytes

MOST_BLOCK_ROWS = 256
"""Rows after which a running tip is sealed. What is copied at once, when rows of a segment go,
is no more than these."""


def manager_for(
    adapter: ModelAdapter,
    tree: SegmentTree,
    config: CacheConfig,
    tokenizer: ChatTokenizer | None,
    *,
    name: str = "",
) -> Manager | None:
    """The manager that settings ask for; `None` where all of it is exact.

    Args:
        adapter: Runs the model.
        tree: Managed.
        config: Settings.
        tokenizer: Of the model.
        name: Of the model: chooses what was learned about it.

    Raises:
        ConfigError: There is no policy of that name, or no such weights of a predictor; or the
            budget is a share of a memory that cannot be told.
        ArchiveError: Nothing can be written to the archive's folder.
    """
    budget_of(adapter, config)
    if not config.is_managed:
        return None
    return Manager(
        tree,
        config,
        forward=adapter.forward,
        decode=str if tokenizer is None else _words(tokenizer),
        block_rows=min(prefill_chunk_of(adapter, config), MOST_BLOCK_ROWS),
        token_weights={} if tokenizer is None else _weights(config, tokenizer),
        fingerprint=lambda: fingerprint(adapter, tokenizer),
        device_bytes=memory_of(adapter.device),
        predictor=predictor_for(config.predictor, name),
    )


def fingerprint(adapter: ModelAdapter, tokenizer: ChatTokenizer | None) -> Mapping[str, str]:
    """What rows of K/V depend on, within this process: another value means other rows.

    Weights count by where they are and how often they were written to, not by their values:
    that is enough while they are in memory, and takes no time.
    """
    model = adapter.model
    weights = [(p.data_ptr(), p._version) for p in model.parameters()]
    adapters = getattr(model, "active_adapters", None)
    try:
        active = adapters() if callable(adapters) else adapters
    except ValueError:  # transformers: no adapter was ever added
        active = None
    config = model.config.to_json_string(use_diff=False)
    return {
        "model": type(model).__name__,
        "config": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        "dtype": str(adapter.layout[0].dtype),
        "weights": hashlib.blake2b(json.dumps(weights).encode(), digest_size=16).hexdigest(),
        "adapters": str(active) + _switches(model),
        "tokenizer": "" if tokenizer is None else tokenizer.name,
    }


def _switches(model: nn.Module) -> str:
    """Which adapters act in each layer that has some, and whether they are off, as in PEFT."""
    found = [
        (name, str(module.active_adapters), module.disable_adapters)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)
    ]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest() if found else ""


def budget_of(adapter: ModelAdapter, config: CacheConfig) -> int | None:
    """Bytes that may stay resident, a share of the device's memory included; `None` is no limit.

    Raises:
        ConfigError: The budget is a share of a memory that cannot be told.
    """
    device_bytes = memory_of(adapter.device)
    if config.budget_share is not None and device_bytes is None:
        msg = (
            f"budget_share={config.budget_share} is a share of the device's memory, and that of "
            f"{adapter.device.type!r} cannot be told; give budget_bytes"
        )
        raise ConfigError(msg)
    return budget_in_bytes(config, device_bytes=device_bytes)


def memory_of(device: torch.device) -> int | None:
    """Bytes of a device's memory; `None` where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return None


def _words(tokenizer: ChatTokenizer) -> Callable[..., str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special=False)


def _weights(config: CacheConfig, tokenizer: ChatTokenizer) -> dict[int, float]:
    """The user's factors by token id; a text's factor is that of each of its tokens."""
    found: dict[int, float] = {}
    pairs: Any = config.protection.weights  # pairs, once the settings are checked
    for token, factor in pairs:
        ids = [token] if isinstance(token, int) else tokenizer.encode(token, control_tokens=False)
        for token_id in ids:
            found[token_id] = max(factor, found.get(token_id, factor))
    return found
