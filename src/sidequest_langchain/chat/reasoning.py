"""Models that think before they answer: between which tags, and where a prompt left them open.

It must not know messages, tools or generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidequest_langchain.engine.tokenizer import ChatTokenizer

_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags that a model thinks between."""

    opening: str
    closing: str

    def is_open_in(self, text: str) -> bool:
        """Whether what follows `text` is inside of a thought."""
        return self.closing not in text.rpartition(self.opening)[2] and self.opening in text


def thinking_of(tokenizer: ChatTokenizer) -> Thinking | None:
    """The tags that the chat template knows; `None` if its model answers right away."""
    source = tokenizer.template_text
    return next((Thinking(*tags) for tags in _TAGS if tags[1] in source), None)
