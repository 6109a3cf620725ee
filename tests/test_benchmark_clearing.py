"""The benchmark of clearing, on a tiny model: what it claims holds there, too."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.clearing import holds, measure, table
from sidequest_langchain import SideQuestChatModel
from tests.support.templates import TOOLS
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


def test_a_small_run() -> None:
    model = SideQuestChatModel.from_model(
        tiny_model("llama", max_position_embeddings=16_384), byte_tokenizer(TOOLS)
    )
    try:
        figures = measure(model, n_tokens=6000, n_cleared=2, max_tokens=4)
        assert holds(figures) == dict.fromkeys(holds(figures), True)
        ways = figures["ways"]
        assert ways["whole"]["again_tokens"] == 0
        assert ways["recompute"]["again_tokens"] > 1000
        assert figures["bytes_per_row"] == 512
        assert ways["whole"]["clearing"] is None
        assert ways["recompute"]["clearing"] is None
        assert ways["reuse"]["clearing"]["on_edit"] == "reuse"
        assert model.kv.usage().n_bytes == 0
        lines = table(figures, Namespace(model="tiny"))
        assert "| reuse | 0 |" in lines
    finally:
        model.engine.close()
