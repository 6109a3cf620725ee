"""Real models, loaded once per test session by the package's own loader.

Without their files a test is skipped, unless `SIDEQUEST_REQUIRE_MODELS` is set, as it is by
`make test`, which fetched them: there it fails.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sidequest_langchain.models.loading import LoadedModel


@cache
def load_real(name: str) -> LoadedModel:
    """A catalogue model with its tokenizer, fp32 on the CPU."""
    from sidequest_langchain.models.loading import load

    require_real(name)
    return load(name, dtype="float32", device="cpu")


def require_real(name: str) -> None:
    """Skip, or fail, where a catalogue model is not on this machine."""
    from sidequest_langchain.models.catalogue import CATALOGUE
    from sidequest_langchain.models.pulling import installed

    if not installed(CATALOGUE[name]):
        missing = f"{name} is not on this machine; run: sidequest pull {name}"
        if os.environ.get("SIDEQUEST_REQUIRE_MODELS"):
            pytest.fail(missing)
        pytest.skip(missing)
