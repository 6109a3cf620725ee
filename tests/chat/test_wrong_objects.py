"""Wrong objects and settings that do not go together are refused, saying what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import ConfigError, ModelError, RequestError
from sidequest_langchain.models import versions
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: ("smollm2-135m", byte_tokenizer()), "model must be"),
        (lambda: (tiny_model("llama"), None), "tokenizer must be"),
        (lambda: (byte_tokenizer(), tiny_model("llama")), "model must be"),
    ],
    ids=["a name", "no tokenizer", "swapped"],
)
def test_from_model_says_what_it_expects(given: Callable[[], tuple[Any, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SideQuestChatModel.from_model(*given())


def test_an_unsupported_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "5.99.0")
    with pytest.raises(ModelError, match=r"5\.99\.0"):
        SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer())


def test_a_name_that_is_given_is_kept_where_another_engine_runs_the_model() -> None:
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    first = SideQuestChatModel.from_model(model, tokenizer)
    second = SideQuestChatModel.from_model(model, tokenizer, name="bob")
    assert second.model == second.engine.name == "bob"
    first.engine.close()
    second.engine.close()


def test_a_receipt_says_what_was_asked() -> None:
    chat = SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer())
    assert chat.kv.release("").path == ""
    assert chat.kv.clear().path == "*"
    chat.engine.close()


def test_alternatives_without_logprobs_are_refused() -> None:
    chat = SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer())
    with pytest.raises(RequestError, match="logprobs=True"):
        chat.invoke("x", top_logprobs=3)
    chat.engine.close()


def test_half_a_surrogate_pair_is_read_as_a_replacement_character() -> None:
    chat = SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer(), max_tokens=2)
    assert chat.prompt_ids("cut \ud83d here") == chat.prompt_ids("cut \ufffd here")
    assert chat.prompt_ids("\ud83d\ude00") == chat.prompt_ids("😀")
    chat.engine.close()


def test_a_message_in_place_of_its_id_is_refused() -> None:
    chat = SideQuestChatModel.from_model(tiny_model("llama"), byte_tokenizer(), max_tokens=2)
    message = chat.invoke("x")
    with pytest.raises(ConfigError, match=r"give message\.id"):
        chat.kv.release(message)  # type: ignore[arg-type]
    assert chat.kv.release(message.id).is_known
    assert not chat.kv.release(message.id).is_known
    chat.engine.close()
