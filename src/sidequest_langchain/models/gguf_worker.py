"""The child process that turns one `.gguf` file into a directory of safetensors.

A process of its own: its memory goes back when it ends, what the libraries print goes to a
log, it can be stopped at any point, and being killed for want of memory is an answer.
It must not know where the file came from, and imports nothing of this package.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
import threading
from pathlib import Path

import gguf
import torch
import transformers

ANSWER = "sidequest-answer: "
"""Begins the lines that the parent reads; everything else is the libraries' chatter."""


def convert(blob: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `blob` to `folder`, dense, in float32."""
    where, file = str(blob.parent), blob.name
    _answer(stage="reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        where, gguf_file=file, trust_remote_code=False
    )
    _answer(stage="unpacking the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=file,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    # the weights are dense now; left there, the next load would look for packed ones
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _answer(stage="writing safetensors")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _parse_once() -> None:
    """Let the file be parsed once: transformers does so three times, a third of the whole time.

    Changes the gguf module of this process, which serves nothing else.
    """
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[assignment, misc]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def _end_with_parent() -> None:
    """End this process when its standard input closes: the parent has died."""

    def watch() -> None:
        # the bare descriptor: a thread inside sys.stdin makes the interpreter's end fail
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _answer(**fields: str) -> None:
    sys.stdout.write(f"{ANSWER}{json.dumps(fields)}\n")
    sys.stdout.flush()


def _kind(error: Exception) -> str:
    """What sort of failure it is, for the parent to word."""
    text = str(error)
    full = "No space left" in text or "code: 28" in text
    if full or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return "disk"
    if isinstance(error, MemoryError) or "not enough memory" in text:
        return "memory"
    if isinstance(error, ValueError) and ("not supported" in text or "Unrecognized" in text):
        return "unsupported"
    return "other"


def main(blob: str, folder: str) -> int:
    """Convert, and say how it went."""
    _end_with_parent()
    _parse_once()
    try:
        convert(Path(blob), Path(folder))
    except Exception as error:  # every failure is the parent's to word
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        _answer(failure=_kind(error), message=first[:500])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
