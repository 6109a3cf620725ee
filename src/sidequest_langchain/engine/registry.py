"""Engines of this process: weights load once, lazily, and go with the last who holds them."""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import ChatTemplate, Engine
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.models.loading import LoadedModel, load
from sidequest_langchain.models.versions import check_transformers

_lock = threading.RLock()
_loaded: weakref.WeakValueDictionary[str, LoadedModel] = weakref.WeakValueDictionary()
_engines: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()


def engine_for(
    reference: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    quantization: str = "none",
    config: CacheConfig | None = None,
    chat_template: ChatTemplate = None,
) -> Engine:
    """The engine for a model, loaded at the first call with these arguments.

    Args:
        reference: A catalogue name, a local directory, a `.gguf` file or a Hub id.
        revision: Revision of a Hub id.
        dtype: Of the weights; `"auto"` is fp32 on a CPU and the checkpoint's own elsewhere.
        device: `"auto"` is the best there is.
        device_map: As in accelerate; each layer's K/V lies on its layer's device.
        quantization: See `load`.
        config: Cache settings; another config is another tree over the same weights.
        chat_template: Replaces the tokenizer's own.

    Raises:
        ModelError: The model cannot be had or cannot be served.
    """
    weights = json.dumps(
        [reference, revision, dtype, device, device_map, quantization], default=str
    )
    config = config or CacheConfig()
    with _lock:
        loaded = _loaded.get(weights)
        if loaded is None:
            loaded = load(
                reference,
                revision=revision,
                dtype=dtype,
                device=device,
                device_map=device_map,
                quantization=quantization,
            )
            _loaded[weights] = loaded
        return _engine(loaded, weights, loaded.name, config, chat_template)


def engine_over(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: CacheConfig | None = None,
    name: str = "",
    chat_template: ChatTemplate = None,
) -> Engine:
    """The engine over a model that the caller loaded; one for the same objects and settings.

    Raises:
        UnsupportedModelError: The architecture cannot be served exactly.
        ConfigError: What was given is no model, or no tokenizer.
        ModelError: This release of transformers is not supported.
    """
    check_transformers()
    _check_kind("model", model, PreTrainedModel, "AutoModelForCausalLM.from_pretrained(...)")
    _check_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "AutoTokenizer.from_pretrained")
    loaded = LoadedModel(model=model, tokenizer=tokenizer, name=name, revision=None, digest=None)
    key = f"{id(model)} {id(tokenizer)} {name}"
    with _lock:
        return _engine(loaded, key, name, config or CacheConfig(), chat_template)


def _check_kind(what: str, given: object, kind: type, maker: str) -> None:
    if not isinstance(given, kind):
        msg = (
            f"the {what} must be an object that {maker} gives, found {type(given).__name__}; "
            "to load a model by its name, use SideQuestChatModel(model=...)"
        )
        raise ConfigError(msg)


def live_engines() -> list[Engine]:
    """Every engine that somebody holds."""
    with _lock:
        return list(_engines.values())


def _engine(
    loaded: LoadedModel, weights: str, name: str, config: CacheConfig, template: ChatTemplate
) -> Engine:
    key = f"{weights} {config} {json.dumps(template, sort_keys=True)}"
    engine = _engines.get(key)
    if engine is None or engine.is_closed:
        engine = Engine(
            loaded.model, loaded.tokenizer, config=config, name=name, chat_template=template
        )
        # The engine keeps what it was loaded from, so that the weights are shared while it lives.
        engine.origin = loaded
        _engines[key] = engine
    return engine
