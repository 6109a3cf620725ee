"""What rows of K/V depend on, told so that another process can compare: by values, not by address.

It must not know what is done with it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from sidequest_langchain.engine.adapter import ModelAdapter
from sidequest_langchain.engine.managing import fingerprint
from sidequest_langchain.engine.tokenizer import ChatTokenizer, Template
from sidequest_langchain.errors import CacheError
from sidequest_langchain.kv.sealed_form import blocks_of
from sidequest_langchain.models.int8 import Int8Linear, Int8Product

_STRANGE_TO_ROWS = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
)
"""Of a configuration: where it lies and who wrote it. The dtype has a field of its own."""
_PROBE_ROWS = 4


class LastingFingerprint:
    """The lasting fingerprint of one model and its tokenizer. Thread-safe.

    All weights are read once, and again only when they were written to.
    """

    def __init__(self, adapter: ModelAdapter, tokenizer: ChatTokenizer) -> None:
        self._adapter, self._tokenizer = adapter, tokenizer
        self._lock = threading.Lock()
        self._at_start = fingerprint(adapter, tokenizer)
        self._known: tuple[Mapping[str, str], dict[str, str]] | None = None

    @property
    def has_changed(self) -> bool:
        """Whether weights were written to, or an adapter was switched, since this was made."""
        return fingerprint(self._adapter, self._tokenizer) != self._at_start

    def fields(self, template: Template | None = None) -> dict[str, str]:
        """What rows depend on, by name; the first ones are the easiest to understand.

        Args:
            template: The chat template in use, if it is not the tokenizer's own.

        Raises:
            CacheError: Weights are offloaded, so that they cannot be read.
        """
        now = fingerprint(self._adapter, self._tokenizer)
        with self._lock:
            if self._known is None or self._known[0] != now:
                self._known = now, self._compute(now)
            fields = self._known[1]
        own = self._tokenizer._template
        return {**fields, "template": _sum(json.dumps(template or own, sort_keys=True))}

    def _compute(self, now: Mapping[str, str]) -> dict[str, str]:
        model = self._adapter.model
        return {
            "model": now["model"],
            "dtype": now["dtype"].removeprefix("torch."),
            "quantization": _quantisation(model),
            "adapters": now["adapters"],
            "tokenizer": _tokenizer_sum(self._tokenizer),
            "config": _config_sum(model.config.to_dict()),
            "weights": weights_sum(model),
        }


def weights_sum(model: PreTrainedModel) -> str:
    """A sum of the values of all weights and buffers; any change of one of them shows.

    Guards against mistakes, not against someone who makes weights of a wanted sum.

    Raises:
        CacheError: Weights are not in memory.
    """
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            msg = (
                f"the weights {name} are offloaded: what a saved thread depends on cannot be told; "
                "threads can be saved and loaded only where all weights are in memory"
            )
            raise CacheError(msg)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for block in blocks_of(tensor):
            digest.update(zlib.crc32(block).to_bytes(4, "little"))
    for product in _products(model):
        digest.update(_product_sum(product))
    return digest.hexdigest()[:32]


def _products(model: PreTrainedModel) -> list[Int8Product]:
    layers = [m._group.product for m in model.modules() if isinstance(m, Int8Linear)]
    return list(dict.fromkeys(layers))


@torch.no_grad()
def _product_sum(product: Int8Product) -> bytes:
    """Of packed weights, which cannot be read back: what they make of a few odd bytes, exactly."""
    n = product.in_features
    rows = torch.arange(_PROBE_ROWS * n, dtype=torch.int64).view(_PROBE_ROWS, n)
    codes = ((rows * 7919 + rows // n * 104729) % 2003 % 128).to(torch.uint8)
    found = [block for tensor in product.tell(codes) for block in blocks_of(tensor)]
    return b"".join(zlib.crc32(block).to_bytes(4, "little") for block in found)


def _quantisation(model: PreTrainedModel) -> str:
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        return "int8"
    method = getattr(model, "quantization_method", None)
    return "none" if method is None else str(getattr(method, "value", method))


def _config_sum(config: Mapping[str, Any]) -> str:
    kept = {
        name: value
        for name, value in config.items()
        if name not in _STRANGE_TO_ROWS and not name.startswith("_attn")
    }
    return _sum(json.dumps(kept, sort_keys=True, default=str))


def _tokenizer_sum(tokenizer: ChatTokenizer) -> str:
    backend = tokenizer._backend
    if backend is not None:
        return _sum(str(backend.to_str()))
    vocabulary = sorted(tokenizer._tokenizer.get_vocab().items())
    return _sum(json.dumps([vocabulary, sorted(tokenizer.special_tokens)]))


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
