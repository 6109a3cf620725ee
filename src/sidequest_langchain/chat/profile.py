"""What a model can do, in the words of LangChain's model profiles, without loading it.

It must not know how a call is run.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models.model_profile import ModelProfile

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.models.glance import glance

_SIGNS_OF_REASONING = ("<think>", "reasoning_content", "<|channel|>")


def profile_of(
    model: str, engine: Engine | None, *, chat_template: Any, max_tokens: int | None
) -> ModelProfile:
    """The profile of a chat model.

    What depends on the model's files is only told if they are on this machine: agents are made
    before anything is loaded, and asking must fetch nothing.

    Args:
        model: The name by which it would be loaded.
        engine: That of a model which the caller loaded.
        chat_template: One that replaces the model's own.
        max_tokens: Most tokens of an answer; `None` is no limit but the context.
    """
    if engine is not None:
        context_length: int | None = engine.context_length
        own: str | None = engine.tokenizer.template_text
    else:
        seen = glance(model)
        context_length, own = seen.context_length, seen.chat_template
    template = own if chat_template is None else str(chat_template)
    profile = ModelProfile(
        open_weights=True,
        text_inputs=True,
        text_outputs=True,
        image_inputs=False,
        image_url_inputs=False,
        image_tool_message=False,
        image_outputs=False,
        pdf_inputs=False,
        pdf_tool_message=False,
        audio_inputs=False,
        audio_outputs=False,
        video_inputs=False,
        video_outputs=False,
        attachment=False,
        temperature=True,
        tool_calling=True,
        tool_choice=True,
        tool_call_streaming=True,
        structured_output=True,
    )
    if context_length is not None:
        profile["max_input_tokens"] = context_length
    limits = [limit for limit in (max_tokens, context_length) if limit is not None]
    if limits:
        profile["max_output_tokens"] = min(limits)
    if template is not None:
        profile["reasoning_output"] = any(sign in template for sign in _SIGNS_OF_REASONING)
    return profile
