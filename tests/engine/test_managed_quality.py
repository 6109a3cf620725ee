"""A real model says the same over packed rows, and they take as few bytes as is promised."""

from __future__ import annotations

import pytest

from benchmarks.lossy_acts import MOST_BYTES, MOST_KL, measure, packed, text_ids
from sidequest_langchain import SideQuestChatModel

pytestmark = [pytest.mark.real, pytest.mark.slow]

N_CONTEXT, N_FORCED = 2000, 128


def test_packed_rows_keep_the_words_of_the_default_model():
    """2,000 tokens read, all of their rows packed, 128 tokens forced after them."""
    engine = SideQuestChatModel().engine
    try:
        ids = text_ids(engine, N_CONTEXT + N_FORCED)
        acts = {
            "int8": packed(8),
            "int4": packed(4),
        }
        found = measure(engine, ids, N_CONTEXT, acts)
    finally:
        engine.close()

    for name in ("int8", "int4"):
        assert 0 < found[name]["kl"] <= MOST_KL[name]
        assert found[name]["bytes"] <= MOST_BYTES[name]
    assert found["int8"]["top1"] >= 0.98
    # What is measured tells a coarser grid from a finer one.
    assert found["int4"]["kl"] > 10 * found["int8"]["kl"]
