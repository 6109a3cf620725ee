"""Grammars over a real model and its vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jsonschema
import pytest

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.grammar import Choice, FreeText, Schema, Text, Then
from tests.engine.driving import ask, run, run_together
from tests.engine.grammars import Tools, allows, right_tokens

if TYPE_CHECKING:
    from sidequest_langchain.models.loading import LoadedModel

pytestmark = pytest.mark.real

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["Portugal", "Norway", "日本"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["city", "country", "days", "tags"],
    "additionalProperties": False,
}
CALL = Then((Text("<tool_call>\n"), Schema.of(PLACE), Text("\n</tool_call>")))


@pytest.fixture(scope="module")
def engine(real_smollm: LoadedModel) -> Iterator[Engine]:
    made = Engine(real_smollm.model, real_smollm.tokenizer)
    yield made
    made.close()


def prompt(engine: Engine) -> list[int]:
    asked = [{"role": "user", "content": "Where shall I go? Answer in JSON."}]
    return engine.tokenizer.encode(engine.tokenizer.render(asked))


def test_a_call_is_whole_and_the_best_one_of_the_plain_model(engine: Engine) -> None:
    requests = [
        ask(prompt(engine), 90, constraint=engine.grammars.constraint(CALL)),
        ask(prompt(engine), 20),
        ask(prompt(engine), 90, constraint=engine.grammars.constraint(CALL), temperature=1, seed=4),
    ]
    greedy, free, drawn = run_together(engine, requests)
    for result in (greedy, drawn):
        found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", result.text)
        assert found, result.text
        jsonschema.validate(json.loads(found[1]), PLACE)
    assert list(greedy.token_ids) == right_tokens(engine, CALL, prompt(engine), 90)
    assert free.token_ids == run(engine, ask(prompt(engine), 20)).token_ids


@pytest.mark.parametrize(
    "text", ["日本 and 🚀🛰 to Tromsø", "def f(x):\n\treturn {x!r}\n", " ", "\n\n", "a<|b|>c"]
)
def test_every_text_is_free_text(text: str, engine: Engine) -> None:
    kit = Tools(engine.tokenizer, engine.grammars, engine.vocab_size)
    ids = engine.tokenizer.encode(text, control_tokens=False)
    end = min(engine.eos_ids)
    assert allows(kit, FreeText(("<tool_call>",)), ids, end)
    assert allows(kit, Choice((text, "no")), engine.tokenizer.encode(text), end)
    assert not allows(kit, FreeText((text[:1],)), ids, end)
