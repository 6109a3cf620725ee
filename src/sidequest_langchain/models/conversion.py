"""Converts a `.gguf` file by way of the worker process, and words its failures.

It must not import torch or transformers: the worker does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from sidequest_langchain.errors import ModelError, ModelFilesError, UnsupportedModelError
from sidequest_langchain.models.child import run_child
from sidequest_langchain.models.failures import file_errors, in_units, no_space

Convert: TypeAlias = Callable[[Path, Path, Callable[[str], None]], None]
"""`(blob, folder, on_stage)`: write the model of a `.gguf` file to an existing folder."""

_MAGIC = b"GGUF"
_ANSWER = "sidequest-answer: "
_WORKER = Path(__file__).with_name("gguf_worker.py")


def convert_gguf(blob: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
    """Convert `blob` into the existing, empty `folder`.

    Args:
        blob: The `.gguf` file.
        folder: Where config, tokenizer and safetensors go.
        on_stage: Hears what the worker is at.

    Raises:
        ModelFilesError: The file is damaged, or the disk or the memory is too small.
        UnsupportedModelError: transformers cannot read this architecture from a GGUF file.
    """
    log = folder.with_name(f"{folder.name}.log")
    with file_errors(f"convert {blob.name}", blob):
        _check_magic(blob)
        status = run_child(
            ["-P", str(_WORKER), str(blob), str(folder)],  # -P: our module names shadow nothing
            log,
            on_tick=lambda: _relay(log, on_stage),
            environment={"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
        )
        if status != 0:
            raise _failure(blob, folder, log, status)


def _check_magic(blob: Path) -> None:
    with blob.open("rb") as stream:
        found = stream.read(len(_MAGIC))
    if found != _MAGIC:
        msg = f"{blob} is no GGUF file: it begins with {found!r}, not {_MAGIC!r}"
        raise ModelFilesError(msg)


def _answers(log: Path) -> list[dict[str, str]]:
    """The worker's answers so far, without the libraries' chatter."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    whole = [line for line in lines if line.startswith(_ANSWER) and line.endswith("}")]
    return [json.loads(line.removeprefix(_ANSWER)) for line in whole]


def _relay(log: Path, on_stage: Callable[[str], None]) -> None:
    stages = [answer["stage"] for answer in _answers(log) if "stage" in answer]
    if stages:
        on_stage(stages[-1])


def _failure(blob: Path, folder: Path, log: Path, status: int) -> ModelError:
    """The error for a worker that ended badly."""
    answer = next((a for a in reversed(_answers(log)) if "failure" in a), {})
    kind, said = answer.get("failure"), answer.get("message", "")
    if kind == "disk":
        return ModelFilesError(f"could not convert {blob.name}: {no_space(folder)}")
    if kind == "memory" or status in (-9, 137):
        return ModelFilesError(
            f"could not convert {blob.name}: memory ran out. The file has "
            f"{in_units(blob.stat().st_size)}; unpacking takes about ten times that. Close other "
            "programs, or take a smaller model"
        )
    if kind == "unsupported":
        return UnsupportedModelError(
            f"transformers cannot convert {blob.name}: {said}. Give a safetensors directory of "
            "the model, or its Hub id"
        )
    if not said:
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        said = "".join(tail) or f"the converter ended with status {status}"
    return ModelFilesError(
        f"could not convert {blob.name}: {said}. The file may be damaged: fetch it again"
    )
