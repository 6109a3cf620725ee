"""Is the engine right on this accelerator, and how fast is it? One command, no network.

    python -m benchmarks.gpu_check                  on the CUDA device, at most five minutes
    PYTHONPATH=src python benchmarks/gpu_check.py   the same, where nothing is installed but
                                                    torch and transformers
    python benchmarks/gpu_check.py --help           stages and options

The stages are in `benchmarks/gpu/`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a file: neither the benchmarks nor the package need be installed
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "src")]

main = import_module(f"{__package__ or 'benchmarks'}.gpu.command").main

if __name__ == "__main__":
    sys.exit(main())
