"""Loads a model and its tokenizer, ready to be read from: evaluation mode, no gradients.

It must not know the engine that will run it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidequest_langchain.errors import ConfigError, ModelError, ModelFilesError
from sidequest_langchain.models.checkpoint import judge_checkpoint
from sidequest_langchain.models.placement import (
    DeviceMap,
    Placement,
    choose_placement,
    wants_quantising,
)
from sidequest_langchain.models.progress import Report
from sidequest_langchain.models.quantising import (
    PROBE,
    QuantisationError,
    Quantised,
    quantise_weights,
)
from sidequest_langchain.models.reference import ModelFiles, obtain
from sidequest_langchain.models.versions import check_transformers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class LoadedModel:
    """A model in memory, with its tokenizer and what is known of where it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """Catalogue name, Hub id, or the name of the directory or file."""
    revision: str | None
    """The commit, if it is from the Hub."""
    digest: str | None
    """The sha256 of the `.gguf` file it was made from, if it was made here."""
    quantised: Quantised | None = None
    """What was done to its weights here; `None` if nothing."""


def load(
    reference: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    quantization: str = "none",
    progress: Report | None = None,
) -> LoadedModel:
    """Load a model, fetching and converting it first if it is not here.

    Args:
        reference: A catalogue name, a local directory, a `.gguf` file, or a Hub id. Only a Hub
            id can make this contact the Hub.
        revision: Branch, tag or commit of a Hub id.
        dtype: `"float32"`, `"bfloat16"`, `"float16"`; `"auto"` is float32 on a CPU, elsewhere
            as the checkpoint was saved.
        device: `"cpu"`, `"cuda:0"`, `"mps"`; `"auto"` is the best one there.
        device_map: Spread over devices by accelerate, instead of `device`.
        quantization: `"none"` is the weights as they are saved; `"int8"`, on a CPU, quantises
            them as they are loaded (lossy); `"auto"` is int8 if neither a dtype nor an accelerator
            was chosen and the model passes the check of `quantise_weights`, else none.
        progress: Hears the progress of a pull; `None` shows bars on a terminal, and logs elsewhere.

    Raises:
        UnknownModelError: The reference means nothing here.
        ModelFilesError: The files are absent, damaged or unreachable, or there is no room.
        UnsupportedModelError: The architecture is no causal decoder that transformers knows.
        ModelError: transformers is of another release, the device has too little memory, or int8
            was asked for and the model or this processor fails the check.
        ConfigError: `revision`, `dtype`, `device`, `device_map` or `quantization` cannot be
            honoured.
    """
    check_transformers()
    _require_accelerate(device_map)
    # asked for now so that a wrong dtype or device is said before anything is downloaded
    placement = choose_placement(
        dtype=dtype, device=device, device_map=device_map, was_unpacked=False
    )
    wants_int8 = wants_quantising(quantization, dtype, placement)
    files = obtain(reference, revision=revision, progress=progress, judge=judge_checkpoint)
    placement = choose_placement(
        dtype=dtype, device=device, device_map=device_map, was_unpacked=files.digest is not None
    )
    with _quiet_libraries(), _load_errors(files):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            files.folder, local_files_only=True, trust_remote_code=False
        )
        model = _load_weights(files, placement)
        quantised = None
        if wants_int8 and not getattr(model, "is_quantized", False):
            quantised = _quantise(model, tokenizer, files.name, is_asked=quantization == "int8")
    weights = quantised or ("packed" if getattr(model, "is_quantized", False) else "dense")
    logger.info("loaded %s: %s on %s, %s", files.name, model.dtype, model.device, weights)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=files.name,
        revision=files.revision,
        digest=files.digest,
        quantised=quantised,
    )


def _quantise(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *, is_asked: bool
) -> Quantised | None:
    """Give the model int8 weights, or say why not."""
    try:
        return quantise_weights(model, tokenizer.encode(PROBE, add_special_tokens=False))
    except QuantisationError as error:
        if is_asked:
            msg = f"{name} cannot be served with int8 weights: {error}; use quantization='none'"
            raise ModelError(msg) from error
        logger.warning("%s is served with dense weights: %s", name, error)
        return None


def _require_accelerate(device_map: DeviceMap | None) -> None:
    if device_map is not None and find_spec("accelerate") is None:
        msg = f"device_map={device_map!r} needs accelerate; run: pip install accelerate"
        raise ConfigError(msg)


def _load_weights(files: ModelFiles, placement: Placement) -> PreTrainedModel:
    """The model, placed and frozen.

    Raises:
        ModelFilesError: The checkpoint lacks weights; transformers would make them up.
    """
    device_map = placement.device_map
    if device_map is None and placement.device is not None and _is_packed(files.folder):
        device_map = {"": str(placement.device)}  # packed weights are placed as they are loaded
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        files.folder,
        dtype=placement.dtype or "auto",
        device_map=device_map,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        msg = (
            f"the checkpoint of {files.name} at {files.folder} lacks {len(missing)} weights "
            f"({', '.join(missing[:3])}, ...); it is incomplete or of another architecture"
        )
        raise ModelFilesError(msg)
    # a model that accelerate has spread, or whose weights are packed, must not be moved
    if placement.device is not None and not getattr(model, "is_quantized", False):
        model.to(placement.device)  # type: ignore[arg-type]
    model.train(mode=False)
    model.requires_grad_(requires_grad=False)
    return model


def _is_packed(folder: Path) -> bool:
    """Whether the checkpoint was saved by one of transformers' quantisers."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return isinstance(config, dict) and config.get("quantization_config") is not None


@contextmanager
def _load_errors(files: ModelFiles) -> Iterator[None]:
    """One clear error for whatever the libraries raise on a bad directory."""
    where = f"{files.name} at {files.folder}"
    try:
        yield
    except ModelError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        msg = (
            f"{where} does not fit the memory of its device ({_first_line(error)}); use "
            "dtype='bfloat16', a device_map, or a smaller model"
        )
        raise ModelError(msg) from error
    except ImportError as error:
        msg = f"loading {where} needs a package that is not installed: {_first_line(error)}"
        raise ModelError(msg) from error
    except Exception as error:  # safetensors, tokenizers, torch and transformers each have theirs
        msg = (
            f"could not load {where}: {_first_line(error)}. Files found: {_listing(files.folder)}; "
            "if one is damaged or missing, fetch the model again"
        )
        raise ModelFilesError(msg) from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Without transformers' own bars and notes; its settings are put back."""
    log: Any = transformers.utils.logging
    had_bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


def _listing(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:12])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
