"""The examples and benchmarks that come with the package: a wheel carries them here.

In an editable checkout they live in its `examples/` and `benchmarks/` folders, whose places are
added to this package's path, so that `sidequest_langchain.examples.tree_of_thoughts` means the
same in both. It must not know what they do.
"""

from __future__ import annotations

from pathlib import Path

_SRC = Path(__file__).resolve().parents[2]
_CHECKOUT = _SRC.parent

if _SRC.name == "src" and (_CHECKOUT / "examples" / "tree_of_thoughts").is_dir():
    __path__ += [str(_CHECKOUT / "examples"), str(_CHECKOUT)]
