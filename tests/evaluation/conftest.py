"""A tiny random model in a folder, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidequest_langchain import SideQuestChatModel
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny") / "qwen2"
    tiny_model("qwen2", max_position_embeddings=4096).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def model(folder: Path) -> SideQuestChatModel:
    return SideQuestChatModel(model=str(folder))
