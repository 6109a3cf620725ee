"""A conversation goes on in another process: what was said is encoded as it was generated."""

from __future__ import annotations

import json

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.errors import SavedThreadError
from tests.engine.saved import child
from tests.support.templates import THINK
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

CONFIG = {"configurable": {"thread_id": "t"}}
ASK = [HumanMessage("Plan a trip")]

FIRST = """
    import json
    from langchain_core.messages import HumanMessage
    from sidequest_langchain import SideQuestChatModel
    from tests.chat.test_saving import ASK, CONFIG, odd_reply
    from tests.support.force import force
    from tests.support.tiny import tiny_model
    from tests.support.tok import byte_tokenizer
    model = tiny_model("llama")
    chat = SideQuestChatModel.from_model(model, byte_tokenizer(), max_tokens=20)
    with force(model, odd_reply(chat)):
        reply = chat.invoke(ASK, CONFIG)
    chat.kv.save("t", {folder!r})
    print(json.dumps([reply.content, reply.id]))
    chat.engine.close()
"""


def odd_reply(chat):
    """`Hanzi`, letter by letter, as the tokenizer would never split it; and the end of the turn."""
    encode = chat.engine.tokenizer.encode
    letters = [token for letter in "Hanzi" for token in encode(letter)]
    assert letters != encode("Hanzi")
    return [*letters, *chat.engine.eos_ids]


def test_another_process_computes_only_what_is_new(make_chat, tmp_path):
    content, message_id = json.loads(child(FIRST.format(folder=str(tmp_path))))
    assert content == "Hanzi"
    messages = [*ASK, AIMessage(content, id=message_id), HumanMessage("And then?")]
    chat, cold = make_chat(), make_chat()
    chat.kv.load(tmp_path, "t")
    answer = chat.invoke(messages, CONFIG)
    used = answer.usage_metadata
    n_known = len(chat.prompt_ids(ASK)) + len(odd_reply(chat)) - 1
    assert used["input_token_details"]["cache_read"] == n_known
    assert chat.prompt_ids(messages) != cold.prompt_ids(messages), "the tokenizer splits otherwise"
    chat.kv.clear()
    again = chat.invoke(messages, CONFIG)
    assert again.usage_metadata["input_token_details"]["cache_read"] == 0
    assert answer.content == again.content


def test_without_the_file_the_answer_is_the_same_as_a_cold_ones(make_chat, tmp_path):
    content, message_id = json.loads(child(FIRST.format(folder=str(tmp_path))))
    messages = [*ASK, AIMessage(content, id=message_id), HumanMessage("And then?")]
    model = tiny_model("llama", seed=1)
    chat, cold = make_chat(model=model), make_chat(model=tiny_model("llama", seed=1))
    with pytest.raises(SavedThreadError, match="made with weights"):
        chat.kv.load(tmp_path, "t")
    assert chat.invoke(messages, CONFIG).content == cold.invoke(messages, CONFIG).content


def test_the_chat_models_own_template_is_compared(tmp_path):
    def made(template):
        return SideQuestChatModel.from_model(
            tiny_model("llama"), byte_tokenizer(), max_tokens=4, chat_template=template
        )

    first, same, other = made(THINK), made(THINK), made(None)
    try:
        first.invoke(ASK, CONFIG)
        first.kv.save("t", tmp_path)
        assert same.kv.load(tmp_path, "t").n_tokens
        with pytest.raises(SavedThreadError, match="made with template"):
            other.kv.load(tmp_path, "t")
    finally:
        for chat in (first, same, other):
            chat.engine.close()
