"""The examples that come with the package: a wheel carries them here.

In an editable checkout they live in its `examples/` folder, which is added to this
package's path, so that `sidequest_langchain.examples.tree_of_thoughts` means the same in
both. It must not know what the examples do.
"""

from __future__ import annotations

from pathlib import Path

_SRC = Path(__file__).resolve().parents[2]
_CHECKOUT = _SRC.parent / "examples"

if _SRC.name == "src" and (_CHECKOUT / "tree_of_thoughts").is_dir():
    __path__.append(str(_CHECKOUT))
