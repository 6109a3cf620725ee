"""In which precision and on which device a model is loaded, from what the user asked.

It must not know where the model's files come from.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sidequest_langchain.errors import ConfigError

DeviceMap: TypeAlias = str | Mapping[str, int | str]
"""What accelerate takes: `"auto"`, `"balanced"`, or a device for each module."""

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SMALL_DEVICES = ("cpu", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model goes, and as what."""

    dtype: torch.dtype | None
    """`None`: as the checkpoint was saved."""
    device: torch.device | None
    """`None`: the device map says."""
    device_map: DeviceMap | None


def choose_placement(
    *, dtype: str, device: str, device_map: DeviceMap | None, was_unpacked: bool
) -> Placement:
    """Decide precision and device.

    Args:
        dtype: `"auto"` is float32 on a CPU, elsewhere as the checkpoint was saved.
        device: `"auto"` is CUDA, else MPS, else the CPU.
        device_map: As for accelerate; then `device` must be `"auto"`.
        was_unpacked: The checkpoint's float32 only comes from unpacking quantised weights, so
            an accelerator gets bfloat16.

    Raises:
        ConfigError: A value means nothing, contradicts another, or names a device that is not
            there.
    """
    if device_map is not None:
        if device != "auto":
            msg = f"device={device!r} and device_map={device_map!r} contradict; give one of them"
            raise ConfigError(msg)
        on_cpu = _is_cpu_only(device_map)
        chosen = None
    else:
        chosen = _device(device)
        on_cpu = chosen.type == "cpu"
    return Placement(
        dtype=_dtype(dtype, on_cpu=on_cpu, was_unpacked=was_unpacked),
        device=chosen,
        device_map=device_map,
    )


QUANTIZATIONS = ("auto", "int8", "none")


def wants_quantising(quantization: str, dtype: str, placement: Placement) -> bool:
    """Whether weights shall become int8 as they are loaded.

    Args:
        quantization: `"auto"` is int8 on an x86 CPU, unless a dtype was asked for. There the int8
            product was found quicker from AVX2 on; for others nobody has measured it.
        dtype: As asked for.
        placement: As chosen.

    Raises:
        ConfigError: The value means nothing, or cannot be had there.
    """
    if quantization not in QUANTIZATIONS:
        msg = f"quantization is one of {', '.join(QUANTIZATIONS)}; found {quantization!r}"
        raise ConfigError(msg)
    fits = (
        placement.device is not None
        and placement.device.type == "cpu"
        and placement.dtype is torch.float32
    )
    if quantization == "int8" and not fits:
        where = placement.device if placement.device is not None else "a device map"
        found = f"{placement.dtype or 'the dtype of the files'} on {where}"
        msg = (
            f"quantization='int8' is for float32 models on a CPU, found {found}; elsewhere "
            "load the model with a quantisation of transformers "
            "(bitsandbytes, torchao, GPTQ, AWQ) and use SideQuestChatModel.from_model"
        )
        raise ConfigError(msg)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    is_default = quantization == "auto" and dtype == "auto" and is_x86
    return fits and (quantization == "int8" or is_default)


def _dtype(asked: str, *, on_cpu: bool, was_unpacked: bool) -> torch.dtype | None:
    if asked != "auto":
        try:
            return _DTYPES[asked.removeprefix("torch.")]
        except KeyError:
            msg = f"dtype is 'auto', {', '.join(map(repr, _DTYPES))}; found {asked!r}"
            raise ConfigError(msg) from None
    if on_cpu:
        return torch.float32
    return torch.bfloat16 if was_unpacked else None


def _is_cpu_only(device_map: DeviceMap) -> bool:
    if isinstance(device_map, str):
        return device_map in _SMALL_DEVICES or _best_device().type == "cpu"
    return all(place in _SMALL_DEVICES for place in device_map.values())


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _device(asked: str) -> torch.device:
    """The device by name, if it is there."""
    if asked == "auto":
        return _best_device()
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        msg = f"device is 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'; found {asked!r}"
        raise ConfigError(msg) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        msg = f"device={asked!r}, but torch sees {found} CUDA devices; use device='auto'"
        raise ConfigError(msg)
    if device.type == "mps" and not torch.backends.mps.is_available():
        msg = f"device={asked!r}, but torch sees no MPS device; use device='auto'"
        raise ConfigError(msg)
    return device
